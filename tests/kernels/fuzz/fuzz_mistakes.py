"""Random mistakes in calls of the public functions, and what an error must say.

A valid call is drawn and one or two of its arguments are replaced. Kernels are neither compiled nor run, so that a
call costs milliseconds. An error is one of fly's; its message starts with the function that was called, and the first
argument that it names is one that the caller passed.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernels.flash_attn_api as api
from fly import errors
from kernels import dispatch, flash_attn_interface
from kernels.api.options import UNAVAILABLE, Extras
from kernels.cache import kv_cache
from kernels.integrations import vllm
from kernels.problem.contract import Launch
from tests.kernels.cache.kv_cache_cases import Problem as AppendProblem
from tests.kernels.fuzz.fuzz_draws import APPEND, OURS, VLLM, Build, Draw
from tests.kernels.fuzz.fuzz_maker import draw_problem

FUNCTIONS = {
    OURS: flash_attn_interface.flydsl_flash_attn_func,
    APPEND: kv_cache.append_to_cache,
    VLLM: vllm.flash_attn_varlen_func,
    **{name: getattr(api, name) for name in dir(api) if name.startswith("flash_attn_")},
}

ROWS = ("q", "k", "v", "k_cache", "v_cache", "kv", "qkv")
HEADS = (*ROWS, "rotary_cos", "rotary_sin", "out")
COUNTS = (
    *("seqused_q", "seqused_kv", "seqused_k", "cache_seqlens", "cache_leftpad", "kv_batch_idx", "cache_batch_idx"),
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_k", "cu_seqlens", "block_table", "page_table"),
)
FLOATS = ("alibi_slopes", "bias", "sink", "learnable_sink", "q_descale", "k_descale", "v_descale")
TENSORS = (*HEADS, *COUNTS, *FLOATS, "workspace", "debug_counts")
SCALES = ("softmax_scale", "softcap")
WHOLE = (
    *("num_splits", "num_kv_splits", "max_seqlen_q", "max_seqlen_kv", "max_seqlen_k", "max_seqlen"),
    *("num_kv_heads", "waves_per_eu"),
)
FLAGS = (
    *("causal", "return_lse", "return_attn_probs", "return_softmax_lse", "rotary_interleaved", "rotate_each_query"),
    *("cross_seqlen", "daz", "dualwave_swp_lazy_rescale", "dualwave_swp_setprio", "dualwave_swp_enable_stagger"),
)
REQUIRED = ("q", "k_cache", "v_cache", "kv", "qkv", "cu_seqlens_q", "cu_seqlens")


class Anything:
    """A value that no argument is."""

    def __repr__(self) -> str:
        return "Anything()"


def _nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(3, 3)], layout=layout)


def _fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(tuple(x.shape), dtype=x.dtype)


# name: what a tensor becomes; none of them is accepted for any argument that is a tensor
ODD_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "text": lambda x: "x",
    "a number": lambda x: 2.5,
    "a list": lambda x: [1.0, 2.0],
    "a dict": lambda x: {},
    "anything": lambda x: Anything(),
    "a numpy array": lambda x: np.zeros(tuple(x.shape), dtype=np.float16),
    "sparse": lambda x: torch.zeros(x.shape, dtype=x.dtype).to_sparse(),
    "nested": lambda x: _nested(torch.strided),
    "jagged": lambda x: _nested(torch.jagged),
    "mkldnn": lambda x: torch.zeros(2, 2).to_mkldnn(),
    "meta": lambda x: torch.empty(tuple(x.shape), dtype=x.dtype, device="meta"),
    "fake": _fake,
    "float64": lambda x: x.double(),
    "complex": lambda x: x.to(torch.complex64),
    "bool": lambda x: x != 0,
    "uint8": lambda x: x.to(torch.uint8),
    "rank + 3": lambda x: x[None, None, None],
}
# accepted for some arguments
MAYBE_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "gradient": lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() else x,
    "none": lambda x: None,
    "zero-d": lambda x: x.new_zeros(()),
    "rank + 1": lambda x: x[None],
    "rank - 1": lambda x: x.flatten(0, 1) if x.dim() > 1 else x.sum(),
    "empty": lambda x: x.new_zeros([0] * x.dim()),
    "float32": lambda x: x.float(),
    "int64": lambda x: x.long(),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "float8_e5m2": lambda x: x.float().to(torch.float8_e5m2),
    "an int": lambda x: 3,
    "a negative int": lambda x: -1,
    "a large int": lambda x: 10**400,
    "true": lambda x: True,
    "longer": lambda x: torch.cat([x, x[:1]]) if x.dim() and len(x) else x,
    "shorter": lambda x: x[1:] if x.dim() else x,
    "wider": lambda x: torch.cat([x, x[..., :1]], -1) if x.numel() else x,
    "narrower": lambda x: x[..., 1:] if x.dim() else x,
    "more in the middle": lambda x: torch.cat([x, x[:, :1]], 1) if x.dim() > 2 and x.numel() else x,
    "more heads": lambda x: torch.cat([x, x[..., :1, :]], -2) if x.dim() > 2 and x.numel() else x,
    "no heads": lambda x: x[..., :0, :] if x.dim() > 2 else x,
    "transposed": lambda x: x.transpose(-1, -2) if x.dim() > 1 else x,
    "columns": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x,
    "every second": lambda x: x.repeat_interleave(2)[::2] if x.dim() == 1 else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() else x,
    "a parameter": lambda x: torch.nn.Parameter(x.detach().float(), requires_grad=True),
    "conjugate": lambda x: torch.complex(x.float(), x.float()).conj(),
}
ODD_NUMBERS = ("x", [1.0], {}, 1j, math.nan, math.inf, 10**400, -(10**400), (), b"x", torch.zeros(2), Anything())
ODD_WHOLES = (
    "x",
    [1],
    {},
    1j,
    2.5,
    math.nan,
    math.inf,
    10**400,
    -(10**400),
    -1,
    2**31,
    b"x",
    torch.zeros(2),
    Anything(),
)
ODD_FLAGS = ("x", [], {}, 2.5, math.nan, torch.zeros(2), Anything(), 7)
ODD_WINDOWS: tuple[Any, ...] = (
    *("xy", 3, (1,), (1, 2, 3), (1.5, 2), ("a", 1), (math.nan, 0), (10**400, 0), (2**31, 0), {}),
    *(Anything(), torch.zeros(3), [[1], [2]], (1j, 0), ([], 0), object, ()),
)
MAYBE_WINDOWS: tuple[Any, ...] = (
    *(None, (-2, 0), (None, -215), (40, -20), (True, 1), (np.int64(3), 2), [3, 2], torch.tensor([3, 2])),
    *((torch.tensor(3), 1), torch.Size([1, 2]), (None, None), range(2)),
)
ODD_FUNCTIONS = (3, "x", [], {}, torch.zeros(2), Anything())


@dataclass(frozen=True)
class Mistake:
    """A call with `arguments`, of which `changed` were changed; `must_fail`: it is wrong in every function."""

    function: str
    arguments: dict[str, Any]
    changed: tuple[str, ...]
    what: str
    must_fail: bool

    def __str__(self) -> str:
        return f"{self.function} with {self.what}"


@cache
def parameters(function: str) -> frozenset[str]:
    """The names of a function's arguments, keywords of later FlashAttentions included."""
    names = inspect.signature(FUNCTIONS[function]).parameters
    extras = set(Extras.__annotations__) if "extras" in names else set()
    return frozenset((set(names) - {"extras"}) | extras)


@cache
def all_names() -> frozenset[str]:
    """Every argument's name of every function, and what FlashAttention's arguments are called inside."""
    return frozenset().union(*(parameters(name) for name in FUNCTIONS))


def valid_arguments(draw: Draw, build: Build) -> dict[str, Any]:
    """Keyword arguments of a valid call."""
    if build.function != APPEND:
        return draw_problem(draw, build, "cpu").call()[1]
    from tests.kernels.fuzz_calls import append_case

    problem = AppendProblem(append_case(draw, build), draw.getrandbits(31))
    given = {
        **{name: getattr(problem, name) for name in ("q", "k_cache", "v_cache", "k", "v")},
        "rotary_cos": problem.cos,
        "rotary_sin": problem.sin,
        "cache_seqlens": problem.seqlens,
        "cache_batch_idx": problem.batch_idx,
        "block_table": problem.block_table,
        "rotary_interleaved": build.interleaved,
    }
    return {name: value for name, value in given.items() if value is not None}


def disagree(arguments: Mapping[str, Any]) -> bool:
    """Whether there are two tables of pages, or rows of dtypes that no function takes together.

    Queries of 16 bits may go with keys of 8.
    """
    dtypes = {name: x.dtype for name in ROWS if isinstance(x := arguments.get(name), torch.Tensor)}
    pairs = (("k", "v"), ("k_cache", "v_cache"))
    mixed = {torch.float16, torch.bfloat16} <= set(dtypes.values())
    tables = all(arguments.get(name) is not None for name in ("block_table", "page_table"))
    return tables or mixed or any(dtypes[k] != dtypes[v] for k, v in pairs if k in dtypes and v in dtypes)


def draw_mistake(draw: Draw, build: Build) -> Mistake:
    """A call of the build with something wrong, or at least unusual, in it."""
    arguments = valid_arguments(draw, build)
    edits = [_edit(draw, build.function, arguments) for _ in range(draw.choice((1, 1, 1, 2)))]
    changed = []
    must_fail = False
    words = []
    for name, value, what, fails in edits:
        if name in changed:
            continue
        changed.append(name)
        words.append(f"{name}: {what}")
        must_fail |= fails
        arguments[name] = value
    must_fail |= disagree(arguments)
    return Mistake(build.function, arguments, tuple(changed), ", ".join(words), must_fail)


def _edit(draw: Draw, function: str, arguments: dict[str, Any]) -> tuple[str, Any, str, bool]:
    """(an argument's name, its new value, in words, whether that is wrong in any case)."""
    known = sorted(parameters(function))
    given = [name for name in arguments if name in TENSORS]
    kind = draw.choice(("tensor",) * 5 + ("any",) * 3 + ("combination",) * 2 + ("content", "unknown"))
    if kind == "unknown" and "Unpack" in str(inspect.signature(FUNCTIONS[function])):
        if draw.chance(0.5):
            return "nonsense", draw.choice((None, 1, "x")), "an unknown keyword", True
        name = draw.choice(sorted(UNAVAILABLE))
        return name, draw.choice(("x", 3, True, torch.zeros(2), math.nan)), "not available", False
    if kind == "combination":
        return _combination(draw, function, arguments)
    if kind == "content" and (wrong := _content(draw, arguments)) is not None:
        return wrong
    name = draw.choice(given) if kind == "tensor" else draw.choice(known)
    if name in TENSORS:
        x = arguments.get(name)
        x = x if isinstance(x, torch.Tensor) else torch.zeros(2, 3, 2, 32, dtype=torch.bfloat16)
        table = draw.choice((ODD_TENSORS, MAYBE_TENSORS))
        what = draw.choice(sorted(table))
        if name in REQUIRED and what == "none":
            return name, None, what, name in arguments
        try:
            value = table[what](x)
        except (RuntimeError, IndexError):  # torch makes no such tensor of this one
            value, what, table = "x", "text", ODD_TENSORS
        must = table is ODD_TENSORS and not (name == "workspace" and isinstance(value, torch.Tensor))
        return name, value, f"{what} {_short(value)}", must
    return name, *_other(draw, name)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        return f"{str(value.dtype)[6:]}{tuple(value.shape)}"
    return "" if isinstance(value, torch.Tensor) else repr(value)[:40]


def _other(draw: Draw, name: str) -> tuple[Any, str, bool]:
    """(value, in words, whether it is wrong in any case) for an argument that is no tensor."""
    table: tuple[Any, ...] = (
        None,
        "x",
        -1,
        2.5,
        True,
        math.nan,
        10**400,
        [],
        Anything(),
        torch.zeros(2),
        np.zeros(2),
    )
    must = False
    if name in SCALES:
        must = draw.chance(0.7)
        table = (
            ODD_NUMBERS
            if must
            else (None, -1.0, 0, True, torch.tensor(0.5), np.float32(0.5), -math.inf, 1e39, 1e-400)
        )
    elif name in WHOLE:
        must = draw.chance(0.7)
        table = ODD_WHOLES if must else (None, 0, True, np.int64(3), torch.tensor(3), 65, 7)
    elif name in FLAGS:
        must = draw.chance(0.7)
        table = ODD_FLAGS if must else (None, 0, 1, np.True_, torch.tensor(True))
    elif name == "window_size":
        must = draw.chance(0.6)
        table = ODD_WINDOWS if must else MAYBE_WINDOWS
    elif name in ("score_mod", "mask_mod", "block_mask"):
        table, must = ODD_FUNCTIONS, True
    elif name == "aux_tensors":
        table = (3, "x", [np.zeros(2)], [None], torch.zeros(2), [torch.zeros(2, dtype=torch.float64)], {})
    value = table[draw.randrange(len(table))]
    if name == "softcap" and isinstance(value, int) and value < 0:
        must = False  # FlashAttention takes negative ones for none
    return value, repr(value)[:40], must


def _combination(draw: Draw, function: str, arguments: dict[str, Any]) -> tuple[str, Any, str, bool]:
    """Arguments that do not go with what is there."""
    heads = [name for name in ROWS if name in arguments]
    name = draw.choice(heads)
    x = arguments[name]
    other = torch.float16 if x.dtype == torch.bfloat16 else torch.bfloat16
    choices: list[tuple[str, Any, str, bool]] = [
        (name, x.to(other), "the other 16-bit dtype", False),
        (name, x.detach().clone().requires_grad_(), "a gradient", False),
        ("k" if "k" in arguments else name, None, "missing", False),
        ("v" if "v" in arguments else name, None, "missing", False),
    ]
    if function == OURS:
        choices += [
            ("out", arguments["q"], "q itself", bool(arguments["q"].numel())),
            ("out", arguments["q"].new_zeros(1).expand(arguments["q"].shape), "all at one address", False),
            ("cu_seqlens_q", None, "missing", False),
            ("max_seqlen_q", 3, "of packed sequences", False),
            ("stream", draw.choice((3, "x", -1, Anything())), "on the CPU", True),
            ("debug_counts", torch.zeros(2), "where it is not counted", False),
            ("workspace", torch.zeros(3), "too small", False),
            ("num_kv_heads", 17, "of another k", True),
            ("aux_tensors", [torch.zeros(2)], "without a function", False),
        ]
    if "block_table" in arguments and function not in (OURS, APPEND):
        choices.append(("page_table", arguments["block_table"], "a second table", False))
    if function in (APPEND, "flash_attn_with_kvcache"):
        choices += [
            ("rotary_cos", None, "missing", "rotary_sin" in arguments),
            ("rotary_cos", torch.zeros(5, 8, dtype=arguments["q"].dtype), "alone", "rotary_sin" not in arguments),
            ("cache_seqlens", None, "missing", "k" in arguments and arguments["k"] is not None),
            ("cache_seqlens", -1, "negative", True),
            ("cache_seqlens", 10**400, "too large", True),
            ("k", x.new_zeros(()), "zero-d", True),
            ("v", x.new_zeros(()), "zero-d", True),
        ]
    if function not in (OURS, APPEND):
        choices += [
            ("dropout_p", draw.choice((0.001, "x", math.nan, -1)), "dropout", function != "flash_attn_with_kvcache")
        ]
    return draw.choice(choices)


def _content(draw: Draw, arguments: dict[str, Any]) -> tuple[str, Any, str, bool] | None:
    """A length, an offset, an entry or a page that does not exist, on the device."""
    names = [name for name in COUNTS if isinstance(arguments.get(name), torch.Tensor) and arguments[name].numel()]
    if not names:
        return None
    name = draw.choice(names)
    changed = arguments[name].clone()
    place = draw.randrange(changed.numel())
    value = draw.choice((-1, -(2**31), 10**9, 2**31 - 1))
    changed.view(-1)[place] = value
    tensors = [arguments[x] for x in arguments if x in HEADS]
    something = all(x.numel() for x in tensors if isinstance(x, torch.Tensor))
    # entries of a table that no length reaches may be anything
    return name, changed, f"{value} at {place}", something and name not in ("block_table", "page_table")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Calls are checked and do nothing else."""
    saved = dispatch.prepare_function, kv_cache._prepare
    launch = Launch(lambda tensors, stream: None)
    dispatch.prepare_function = lambda kernel: lambda tensors, request: launch
    kv_cache._prepare = lambda *arguments: None
    plans = [(owner._plans, dict(owner._plans)) for owner in (flash_attn_interface, kv_cache)]
    for held, _ in plans:
        held.clear()
    try:
        yield
    finally:
        dispatch.prepare_function, kv_cache._prepare = saved
        for held, before in plans:
            held.clear()
            held.update(before)


def judge_mistake(mistake: Mistake) -> str:
    """What is wrong with how the call ended, or nothing; for within `without_kernels`, in grad mode."""
    function = FUNCTIONS[mistake.function]
    try:
        inspect.signature(function).bind(**mistake.arguments)
    except TypeError:
        return ""  # Python itself says which argument a function does not have, or needs
    try:
        function(**mistake.arguments)
    except errors.FlyError as error:
        return _message(mistake, str(error), type(error).__name__)
    return "accepted" if mistake.must_fail else ""


def _message(mistake: Mistake, message: str, error: str) -> str:
    """What is wrong with an error's message."""
    start = f"{mistake.function}: "
    if not message.startswith(start):
        return f"{error}'s message does not start with {start!r}: {message}"
    words = re.findall(r"[A-Za-z_]\w*", message[len(start) :])
    named = [word for word in words if word in all_names() or word in mistake.changed]
    passed = set(mistake.arguments) | set(mistake.changed)
    if not named:
        return f"{error}'s message names no argument: {message}"
    if named[0] not in passed and not (named[0] in parameters(mistake.function) and "go together" in message):
        return f"{error}'s message names {named[0]}, which the caller did not pass: {message}"
    return ""
