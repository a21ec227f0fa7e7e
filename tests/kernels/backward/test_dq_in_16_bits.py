"""`dq_accumulate="16bit"` on AMD's fused kernels: dQ added up in its own memory, and what takes no part in it.

Gradients of all forms of calls are in the kernels' own tests (`tests/kernels/gfx950`, `tests/kernels/gfx942`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fly.__main__ import main
from fly.errors import ArgumentError, ArgumentTypeError, EmulatorError, UnsupportedError
from fly.runtime.launch import Launcher
from fly_attention import flydsl_flash_attn_backward, flydsl_flash_attn_func, flydsl_flash_attn_workspace
from kernels import flash_attn_api, flash_attn_interface
from kernels import flash_attn_gfx942_bwd as gfx942
from kernels import flash_attn_gfx950_bwd as gfx950
from kernels.call import gradients as calls
from kernels.dispatch import AMD, BACKWARD_KERNELS
from kernels.gfx950 import backward_launch, dq_in_place
from kernels.gfx950.backward import BLOCK_M, WAVES
from tests.kernels.backward.builds import bindings_of, compiled
from tests.kernels.feature_cases import Inputs
from tests.kernels.gradient_reference import gradients
from tests.kernels.reference import max_difference
from tests.kernels.sm90.planting import Bug

HOW = {"dq_accumulate": "16bit"}
MODULES = {"gfx942": gfx942, "gfx950": gfx950}


@pytest.fixture(params=AMD)
def arch(request, emulate, monkeypatch):
    """Each of the two targets, whose fused kernel takes all calls."""
    emulate(request.param, "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", request.param)
    return request.param


def forward(inputs: Inputs, causal: bool = False, **options: Any) -> dict[str, torch.Tensor]:
    """q, k, v, out, lse and a gradient of out."""
    q, k, v = inputs.tensors()
    out, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, **options)
    return {"dout": inputs.floats(*out.shape, dtype=q.dtype), "q": q, "k": k, "v": v, "out": out, "lse": lse}


# what is compiled


@pytest.mark.parametrize(
    ("arch", "dims", "dtype", "causal"),
    [
        ("gfx950", (128, 128), "bf16", False),
        ("gfx950", (128, 128), "f16", True),
        ("gfx950", (64, 64), "bf16", True),
        ("gfx950", (192, 128), "bf16", False),
        ("gfx942", (128, 128), "bf16", False),
        ("gfx942", (128, 128), "f16", True),
        ("gfx942", (64, 64), "bf16", True),
    ],
    ids=str,
)
def test_pairs_are_added_and_no_float32(arch, dims, dtype, causal):
    """Half as many additions as of float32, and no scratch memory."""
    inputs = Inputs([256], [256], 2, 1, dims[0], dtype, head_dim_v=dims[1])
    found = {}
    for sums in ("float32", "16bit"):
        bindings = bindings_of(arch, inputs, causal, module=MODULES[arch], dq_accumulate=sums)
        found[sums] = {b.kernel.name: b for b in bindings}
    name = f"flash_attn_{arch}_bwd"
    assert [*found["float32"]] == ["row_statistics", name, "round_dq"]
    assert [*found["16bit"]] == ["row_statistics", "clear_dq", name, "order_dq"]
    artefact = compiled(arch, found["16bit"][name])
    added = re.findall(r"\w+_atomic_\w+", artefact.isa)
    assert set(added) == {f"global_atomic_pk_add_{dtype}"}
    before = re.findall(r"\w+_atomic_\w+", compiled(arch, found["float32"][name]).isa)
    assert set(before) == {"global_atomic_add_f32"} and len(before) == 2 * len(added)
    assert len(added) % (BLOCK_M * dims[0] // WAVES // 64 // 2) == 0  # whole tiles
    taken = artefact.resources
    assert taken.scratch_bytes == 0 and taken.registers + taken.accum_registers <= 512


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("arch", AMD)
def test_heads_in_parts_take_no_scratch_memory(arch, causal, monkeypatch):
    monkeypatch.setattr(backward_launch, "parts_of_group", lambda *args, **named: 2)
    bindings = bindings_of(arch, Inputs([256], [256], 2, 1, 128), causal, module=MODULES[arch], **HOW)
    assert [b.kernel.name for b in bindings][-2:] == ["add_parts", "order_dq"]
    (binding,) = (b for b in bindings if b.kernel.name == f"flash_attn_{arch}_bwd")
    assert compiled(arch, binding).resources.scratch_bytes == 0


# memory


@pytest.mark.parametrize("queries", [64, 70], ids=["whole tiles", "a tail"])
def test_dq_and_the_workspace_may_hold_anything(arch, queries, seed):
    inputs = Inputs([queries], [40], 2, 1, 64, seed=seed)
    given = forward(inputs)
    size = flydsl_flash_attn_workspace(*(given[x] for x in "qkv"), False, backward=True, **HOW)
    memory = torch.full((size,), 255, dtype=torch.uint8)  # as floats, NaN
    results = {f"d{x}": torch.full_like(given[x], torch.nan) for x in "qkv"}
    found = flydsl_flash_attn_backward(**given, causal=False, **results, workspace=memory, **HOW)
    assert found[0] is results["dq"]
    q, k, v = (given[x] for x in "qkv")
    assert not gradients(q, k, v, False, given["dout"]).wrong(found), f"seed {seed}"


def test_the_workspace_has_no_sums(arch):
    """Of 1000 queries: statistics of rows, and a tile for each sequence and head."""
    q, k, v = Inputs([1000] * 2, [40] * 2, 4, 4, 128).tensors()
    sizes = [
        flydsl_flash_attn_workspace(q, k, v, False, backward=True, dq_accumulate=sums)
        for sums in ("float32", "16bit")
    ]
    statistics, tails = 2 * 4 * 2 * 4 * 1000, 2 * 2 * 4 * 32 * 128
    assert sizes[1] <= statistics + tails + 3 * 256
    assert sizes[0] >= statistics + 4 * q.numel()


def test_queries_that_are_not_in_use_keep_what_they_have(arch, seed):
    """And so does what lies between the rows of a gradient whose heads are in a wider tensor."""
    inputs = Inputs([70, 33], [60, 20], 2, 1, 64, packed=True, seed=seed)
    used = {"seqused_q": torch.tensor([66, 30], dtype=torch.int32)}
    options = {**inputs.form(), "max_seqlen_q": 70, "max_seqlen_kv": 60, **used}
    given = forward(inputs, True, **options)
    wide = torch.full((103, 3, 64), 7.0, dtype=given["q"].dtype)
    results = {"dq": wide[:, 1:]} | {f"d{x}": torch.empty_like(given[x]) for x in "kv"}
    flydsl_flash_attn_backward(**given, causal=True, **results, **options, **HOW)
    written = (wide != 7.0).all(-1)
    inside = torch.zeros(103, 3, dtype=torch.bool)
    inside[:66, 1:] = inside[70:100, 1:] = True
    assert torch.equal(written, inside), f"seed {seed}"


# what it costs


def by_blocks(given: dict[str, torch.Tensor], keys: int) -> torch.Tensor:
    """dq of one head without a mask, each block of `keys` keys' part of it in float64, added up in q's dtype."""
    q, k, v, out, dout = (given[x][0, :, 0].double() for x in ("q", "k", "v", "out", "dout"))
    scale = q.shape[1] ** -0.5
    weights = torch.softmax(q @ k.T * scale, -1)
    ds = weights * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
    total = torch.zeros_like(given["q"][0, :, 0])
    for first in range(0, len(k), keys):
        part = (ds[:, first : first + keys] @ k[first : first + keys]).to(total.dtype)
        total = total + part
    return total * scale


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_error_is_that_of_sums_in_16_bits(arch, dtype, seed):
    """16 blocks of 256 keys: at most twice the error of sums in q's dtype, beside that of plain attention."""
    inputs = Inputs([32], [4096], 1, 1, 64, dtype, seed=seed)
    given = forward(inputs)
    found, *_ = flydsl_flash_attn_backward(**given, causal=False, **HOW)
    reference = gradients(*(given[x] for x in "qkv"), False, given["dout"])
    exact, plain = reference.exact[0], reference.plain[0]
    summed = max_difference(by_blocks(given, 256)[None, :, None], exact)
    allowed = 2 * (max_difference(plain, exact) + summed)
    assert summed > 0 and max_difference(found, exact) <= allowed, f"seed {seed}"


# bugs


def of_dirty_memory(seed: int, queries: int) -> bool:
    """Whether gradients are wrong where their memory and the workspace hold something."""
    inputs = Inputs([queries], [300], 1, 1, 64, seed=seed)
    given = forward(inputs)
    q, k, v = (given[x] for x in "qkv")
    size = flydsl_flash_attn_workspace(q, k, v, False, backward=True, **HOW)
    memory = torch.full((size // 2,), 3.0, dtype=q.dtype).view(torch.uint8)
    results = {f"d{x}": torch.full_like(given[x], 3.0) for x in "qkv"}
    found = flydsl_flash_attn_backward(**given, causal=False, **results, workspace=memory, **HOW)
    return bool(gradients(q, k, v, False, given["dout"]).wrong(found))


CALLS: dict[str, Callable[[int], bool]] = {
    "whole tiles": lambda seed: of_dirty_memory(seed, 64),
    "a tail": lambda seed: of_dirty_memory(seed, 40),
}
CLEARING = "fly.store(zeros, start.offset(row * pitch + column * dtype.bytes), align=VECTOR * dtype.bytes)"
BUGS = (
    Bug("dq is not cleared", dq_in_place, "_clear", f"{CLEARING} => pass", "whole tiles", "wrong"),
    Bug("a tail is not cleared", dq_in_place, "_clear", f"{CLEARING} => pass", "a tail", "wrong"),
    Bug(
        "a tail is added up as if dq had all of its rows",
        dq_in_place.SumsInPlace,
        "rows",
        "first + BLOCK_M <= => first <",
        "a tail",
        "report wrong",
    ),
    Bug(
        "rows are half of a wave's apart",
        dq_in_place.SumsInPlace,
        "of_lane",
        "pitch * 2) => pitch)",
        "whole tiles",
        "report wrong",
    ),
    Bug(
        "a tile is stored before all of it has been read",
        dq_in_place,
        "_order",
        "fly.barrier() => pass",
        "whole tiles",
        "report wrong",
    ),
)


@pytest.mark.parametrize("case", CALLS)
def test_without_a_bug_there_is_none(arch, case, seed):
    assert not CALLS[case](seed), f"seed {seed}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_show(arch, bug, monkeypatch, seed):
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    monkeypatch.setattr(calls, "_kinds", {})
    kernel = importlib.import_module(f"kernels.flash_attn_{arch}_bwd")
    for traced in (getattr(kernel, f"flash_attn_{arch}_bwd"), dq_in_place.clear_dq, dq_in_place.order_dq):
        monkeypatch.setattr(traced, "launcher", Launcher(traced), raising=False)
    bug.plant(monkeypatch)
    try:
        shown = "wrong" if CALLS[bug.case](seed) else "nothing"
    except EmulatorError:
        shown = "report"
    assert shown in bug.found.split(), f"{bug}: {shown}, seed {seed}"


# who takes it, and how it is refused


def leaves_of_64(requires_grad: bool = True) -> list[torch.Tensor]:
    return [torch.randn(1, 20, 2, 64, dtype=torch.bfloat16).requires_grad_(requires_grad) for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dq_accumulate": "16"}, ArgumentError, "dq_accumulate must be 'float32' or '16bit', got '16'"),
        ({"dq_accumulate": None}, ArgumentTypeError, "dq_accumulate must be 'float32' or '16bit', got None"),
        ({"dq_accumulate": np.zeros(2)}, ArgumentTypeError, "dq_accumulate must be 'float32' or '16bit', got array"),
        (
            {**HOW, "deterministic": True},
            ArgumentError,
            "dq_accumulate='16bit' adds parts of q's gradient up in an order that changes from run to run, and "
            "deterministic is True; accepted with it: 'float32'",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_values_that_are_none_are_refused(options, error, message, requires_grad):
    with pytest.raises(error, match=re.escape(message)) as caught:
        flydsl_flash_attn_func(*leaves_of_64(requires_grad), **options)
    assert type(caught.value) is error


@pytest.mark.parametrize("options", [{"dq_accumulate": "f16"}, {**HOW, "deterministic": True}], ids=str)
def test_flash_attentions_functions_refuse_them_in_their_own_names(options):
    with pytest.raises(ArgumentError, match=r"^flash_attn_func: dq_accumulate.*'float32'") as caught:
        flash_attn_api.flash_attn_func(*leaves_of_64(), **options)
    assert "flydsl" not in str(caught.value)


def test_caches_have_no_gradients_to_add_up():
    q, k, v = leaves_of_64(False)
    with pytest.raises(ArgumentTypeError, match="unexpected keyword argument 'dq_accumulate'"):
        flash_attn_api.flash_attn_with_kvcache(q, k, v, **HOW)


@pytest.mark.parametrize(
    ("target", "kernel"), [("gfx950", "generic"), ("sm_90a", "sm90"), ("sm_90a", "sm90_wide"), ("sm_90a", "generic")]
)
def test_kernels_that_add_in_float32_refuse_it(target, kernel, emulate, monkeypatch):
    emulate(target, "")
    monkeypatch.setenv("FLY_BACKWARD_KERNEL", kernel)
    message = f"the {kernel} kernel adds q's gradient up in float32 alone: call without dq_accumulate='16bit'"
    q, k, v = leaves_of_64()
    for call in (
        lambda: flydsl_flash_attn_func(q, k, v, **HOW),
        lambda: flash_attn_api.flash_attn_func(q, k, v, **HOW),
        lambda: flydsl_flash_attn_workspace(q, k, v, backward=True, **HOW),
    ):
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            call()
    out, lse = flydsl_flash_attn_func(q.detach(), k.detach(), v.detach(), return_lse=True, **HOW)
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        flydsl_flash_attn_backward(out, q.detach(), k.detach(), v.detach(), out, lse, **HOW)


def test_every_kernel_says_what_it_needs():
    without = {kernel.name for kernel in BACKWARD_KERNELS if "float32" in " ".join(n.what for n in kernel.needs)}
    assert {kernel.name for kernel in BACKWARD_KERNELS} - without == {*AMD}


def test_deterministic_algorithms_of_torch_refuse_it(emulate):
    emulate("gfx950", "")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UnsupportedError, match="the gfx950 kernel adds parts of q's gradient up in an order"):
            flydsl_flash_attn_func(*leaves_of_64(), **HOW)
    finally:
        torch.use_deterministic_algorithms(False)


def test_paths_show_who_serves_it(capsys, monkeypatch):
    monkeypatch.delenv("FLY_BACKWARD_KERNEL", raising=False)
    main(["paths", "--backward", "--head-dim", "64", "--dq-accumulate", "16bit"])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for target in AMD:
        assert f"{target} {target} chosen {target} generic no: it adds q's gradient up in float32 alone" in shown
    assert "sm_90a sm90 no: it adds q's gradient up in float32 alone: call without dq_accumulate='16bit'" in shown
    assert "sm_90a (none) such a call raises an UnsupportedError" in shown
    main(["paths", "--backward"])
    assert "sums of q's" in capsys.readouterr().out


def test_results_do_not_depend_on_it(emulate, seed):
    """Nor do gradients depend on what another call asked for: each has a plan of its own."""
    emulate("gfx950", "")
    inputs = Inputs([40], [300], 1, 1, 64, seed=seed)
    dout, found = None, []
    for options in ({}, HOW, {}, HOW):
        leaves = [x.clone().requires_grad_() for x in Inputs([40], [300], 1, 1, 64, seed=seed).tensors()]
        out = flydsl_flash_attn_func(*leaves, False, **options)
        dout = inputs.floats(*out.shape, dtype=out.dtype) if dout is None else dout
        found.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    assert all(torch.equal(x[0], found[0][0]) and torch.equal(x[2], found[0][2]) for x in found), f"seed {seed}"
    assert not torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][1], found[2][1]) and torch.equal(found[1][1], found[3][1])


# operations


def test_it_goes_through_compilers(arch, seed):
    inputs = Inputs([40], [60], 2, 1, 64, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)

    def step(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(function(*leaves), leaves, dout)

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        return flash_attn_api.flash_attn_func(*leaves, causal=True, **HOW)

    eager, as_graph = step(call), step(torch.compile(call, fullgraph=True, backend="aot_eager"))
    assert all(map(torch.equal, eager, as_graph)), f"seed {seed}"  # a block of keys: additions have one order
    assert not gradients(q, k, v, True, dout).wrong(eager), f"seed {seed}"
    checks = ["test_schema", "test_faketensor", "test_autograd_registration"]
    leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
    operation = torch.ops.fly.flash_attn.default
    torch.library.opcheck(operation, (*leaves, True), HOW | {"return_lse": True}, test_utils=checks)
