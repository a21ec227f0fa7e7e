"""Bugs that show in what callers do with gradients, planted one at a time.

Losses whose gradients lie in odd ways, dropout and who draws it, checkpoints, compilers, captured graphs, block
masks, one call behind the other. Each is one that another implementation had the like of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fly.runtime.simulated import SimulatedKernel
from fly_attention import flydsl_flash_attn_backward, flydsl_flash_attn_workspace
from kernels import flash_attn_api as api
from kernels import flash_attn_generic_bwd as generic
from kernels import flash_attn_interface
from kernels.api import options as api_options
from kernels.call import gradients as calls
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem import dropout_mask
from kernels.problem.block_mask import BlockMask
from kernels.sm90 import consumer
from kernels.work import steps, tile_list
from tests.kernels.backward.planted import Cases, forget, running, shown
from tests.kernels.feature_cases import Inputs, everything
from tests.kernels.gradient_reference import by_autograd, gradients
from tests.kernels.sm90.planting import Bug


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """On the simulated Hopper GPU, nothing planned, traced or compiled before."""
    forget(monkeypatch)
    torch.compiler.reset()
    with running("sm_90a"):
        yield


def small(seed: int, tokens: int = 20, head_dim: int = 32) -> tuple[torch.Tensor, ...]:
    """q, k, v and a gradient of out."""
    inputs = Inputs([tokens], [tokens], 2, 1, head_dim, seed=seed)
    q, k, v = inputs.tensors()
    return q, k, v, inputs.floats(*q.shape, dtype=q.dtype)


def leaves_of(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def wrong_of_a_sum(seed: int) -> bool:
    """The second loss is a plain sum, whose gradient is one element in all places; the first one's was not."""
    q, k, v, dout = small(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "MOST_SHARED", 1 << 22)  # where later passes go a shorter way
        by_autograd(q, k, v, True, dout, None)
        leaves = leaves_of(q, k, v)
        found = torch.autograd.grad(flydsl_flash_attn_func(*leaves).sum(), leaves)
    return bool(gradients(q, k, v, True, torch.ones_like(q)).wrong(found))


def wrong_of_a_part(seed: int) -> bool:
    """The gradient of what `torch.cat` took begins inside of a larger tensor."""
    q, k, v, dout = small(seed)
    leaves = leaves_of(q, k, v)
    together = torch.cat([torch.zeros_like(q), flydsl_flash_attn_func(*leaves)], 2)
    found = torch.autograd.grad(together, leaves, torch.cat([torch.ones_like(dout), dout], 2))
    return bool(gradients(q, k, v, True, dout).wrong(found))


def wrong_with_dropout(seed: int, lengths: list[int], head_dim: int, backward: str) -> bool:
    """What the forward pass dropped of packed sequences the backward pass does, in every tile."""
    inputs = Inputs(lengths, lengths, 2, 1, head_dim, packed=True, seed=seed)
    q, k, v = inputs.tensors()
    dout = inputs.floats(*q.shape, dtype=q.dtype)
    options = {**inputs.form(), "dropout_p": 0.4, "rng_state": torch.tensor([seed, 8])}
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths))
    with running("sm_90a", backward):
        found = by_autograd(q, k, v, True, dout, None, **longest, **options)
    return bool(gradients(q, k, v, True, dout, **options).wrong(found))


@contextmanager
def states_drawn() -> Iterator[list[torch.Tensor]]:
    """The states of dropout that calls draw, in order."""
    drawn: list[torch.Tensor] = []

    def draw(device: torch.device) -> torch.Tensor:
        drawn.append(dropout_mask.random_state(device))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attn_interface, "random_state", draw)
        yield drawn


def wrong_behind_a_checkpoint(seed: int) -> bool:
    """A call that is made again for its gradients drops what it dropped at first."""
    q, k, v, dout = small(seed)
    leaves = leaves_of(q, k, v)
    with states_drawn() as drawn:
        call = lambda *x: flydsl_flash_attn_func(*x, dropout_p=0.4)  # noqa: E731
        found = torch.autograd.grad(checkpoint(call, *leaves, use_reentrant=False), leaves, dout)
    assert len(drawn) == 2
    return bool(gradients(q, k, v, True, dout, dropout_p=0.4, rng_state=drawn[0]).wrong(found))


def wrong_while_compiled(seed: int) -> bool:
    """196 tokens, k and v as they come and q with its heads outside: gradients lie as compilers were told."""
    q, k, v, dout = small(seed, 196)
    leaves = leaves_of(q.flatten(1), k, v)

    def step(flat: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        heads_outside = flat.view(q.shape).transpose(1, 2).contiguous()
        return api.flash_attn_func(heads_outside.transpose(1, 2), *others, causal=True) * 1.0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    try:
        dq, *others = torch.autograd.grad(compiled(*leaves), leaves, dout)
    except RuntimeError as error:  # torch's, of a view that there is not
        assert "view size is not compatible" in str(error)
        return True
    return bool(gradients(q, k, v, True, dout).wrong([dq.view(q.shape), *others]))


def repeats_what_is_dropped(seed: int) -> bool:
    """A compiled call draws its dropout every time."""
    q, k, v, _ = small(seed)
    compiled = torch.compile(lambda *x: api.flash_attn_func(*x, dropout_p=0.4), fullgraph=True, backend="aot_eager")
    first, second = (compiled(q, k, v) for _ in range(2))
    return torch.equal(first, second)


@contextmanager
def captured() -> Iterator[Callable[[], None]]:
    """A function that makes the launches again that were made here, with the same arguments, as a graph does."""
    launches: list[tuple[Any, ...]] = []
    launch = SimulatedKernel.launch

    class Arguments:
        def __init__(self, view: Any) -> None:
            self.view = bytes(view)

    def record(self: SimulatedKernel, grid: Any, block: Any, arguments: Any, *rest: Any) -> None:
        launches.append((self, grid, block, Arguments(arguments.view), *rest))
        launch(self, grid, block, arguments, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedKernel, "launch", record)
        yield lambda: [launch(*arguments) for arguments in launches]


def wrong_when_replayed(seed: int) -> bool:
    """Launches of a forward and a backward pass drop by what the state holds when they run."""
    q, k, v, dout = small(seed)
    out, results = torch.empty_like(q), [torch.empty_like(x) for x in (q, k, v)]
    options: dict[str, Any] = {"dropout_p": 0.4, "rng_state": torch.tensor([seed, 8])}
    size = flydsl_flash_attn_workspace(q, k, v, backward=True, **options)
    memory = torch.empty(size, dtype=torch.uint8)
    given = dict(zip(("dq", "dk", "dv"), results, strict=True), workspace=memory)
    with captured() as replay:
        _, lse = flydsl_flash_attn_func(q, k, v, out=out, return_lse=True, **options)
        flydsl_flash_attn_backward(dout, q, k, v, out, lse, **given, **options)
    options["rng_state"] += 1
    for x in (out, lse, *results):
        x.fill_(torch.nan)
    replay()
    return bool(gradients(q, k, v, True, dout, **options).wrong(results))


def first_half(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key < 128


def wrong_where_no_block_sees(seed: int, backward: str) -> bool:
    """Of two blocks of keys, by the lists of a block mask, nobody sees the second one."""
    inputs = Inputs([40], [200], 2, 1, 64, seed=seed)
    leaves = leaves_of(*inputs.tensors())
    lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.tensor([[[[0, 1]]]], dtype=torch.int32)
    mask = BlockMask(*lists, None, None, (128, 128), (40, 200), everything)
    dout = inputs.floats(*leaves[0].shape, dtype=leaves[0].dtype)
    with running("sm_90a", backward, ""):
        found = torch.autograd.grad(flydsl_flash_attn_func(*leaves, False, block_mask=mask), leaves, dout)
    return bool(gradients(*leaves, False, dout, mask_mod=first_half).wrong(found))


def wrong_behind_another(seed: int, backward: str) -> bool:
    """Of the second of two passes in one workspace, which holds what the first one knew of its rows."""
    memory = torch.empty(0, dtype=torch.uint8)
    with running("sm_90a", backward, ""):
        for q, k, v, dout in (small(seed, head_dim=64), small(seed + 1, head_dim=64)):
            out, lse = flydsl_flash_attn_func(q, k, v, return_lse=True)
            if not len(memory):
                memory = torch.zeros(flydsl_flash_attn_workspace(q, k, v, backward=True), dtype=torch.uint8)
            found = flydsl_flash_attn_backward(dout, q, k, v, out, lse, workspace=memory)
    return bool(gradients(q, k, v, True, dout).wrong(found))


CASES: Cases = {
    "a sum": wrong_of_a_sum,
    "a part": wrong_of_a_part,
    "dropout": lambda seed: wrong_with_dropout(seed, [9, 30], 32, "generic"),
    "dropout, sm90": lambda seed: wrong_with_dropout(seed, [9, 70], 64, "sm90"),
    "a checkpoint": wrong_behind_a_checkpoint,
    "compiled": wrong_while_compiled,
    "compiled dropout": repeats_what_is_dropped,
    "replayed": wrong_when_replayed,
    "an empty column": lambda seed: wrong_where_no_block_sees(seed, "generic"),
    "an empty column, sm90": lambda seed: wrong_where_no_block_sees(seed, "sm90"),
    "one behind the other": lambda seed: wrong_behind_another(seed, "generic"),
    "one behind the other, sm90": lambda seed: wrong_behind_another(seed, "sm90"),
}
_TAKEN_AT_FIRST = """if "rng_state" in given:
        given["rng_state"] = kind.backward.setdefault("state", given["rng_state"].clone())
    prepared.launch.run(given, None)"""
_IN_ORDER = "together([kernel.prepared for kernel in self.kernels], takes, len(order))"
_STATISTICS_LAST = """together(
        [kernel.prepared for kernel in (*self.kernels[1:], self.kernels[0])], [*takes[1:], takes[0]], len(order)
    )"""

BUGS = (
    Bug(
        "a later pass takes a gradient to lie as that of the first",
        calls,
        "_form",
        "dout.stride(), *map => *map",
        "a sum",
        "wrong out-of-bounds",
    ),
    Bug(
        "a gradient is taken to begin where its memory does",
        calls,
        "run",
        "dout = loadable(dout) => dout = loadable(dout.as_strided(dout.shape, dout.stride(), 0))",
        "a part",
        "wrong",
    ),
    Bug(
        "all sequences have the first one's dropped weights",
        generic.flash_attn_generic_dkdv,
        "function",
        "HeadOfKeys(fly.remade(batch), head, seen) => HeadOfKeys(fly.i32(0), head, seen)",
        "dropout",
        "wrong",
    ),
    Bug(
        "every tile has the first one's dropped weights",
        consumer.Consumer,
        "_decided",
        'j * BLOCK_M, "columns" => fly.i32(0), "columns"',
        "dropout, sm90",
        "wrong",
    ),
    Bug(
        "dropout is drawn past torch's generators",
        dropout_mask,
        "random_state",
        "torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device) => "
        'torch.tensor([__import__("secrets").randbits(62), 0], device=device)',
        "a checkpoint",
        "wrong",
    ),
    Bug(
        "gradients lie as inputs do",
        calls,
        "results_for",
        "make(x, memory_format=_CONTIGUOUS) => make(x)",
        "compiled",
        "wrong",
    ),
    Bug(
        "dropout is drawn while a graph is traced",
        api_options,
        "attention",
        'options["rng_state"] = random_state(q.device) => options["rng_state"] = torch.tensor([1, 2])',
        "compiled dropout",
        "wrong",
    ),
    Bug(
        "what is dropped is decided where a pass is planned",
        calls,
        "run",
        f"prepared.launch.run(given, None) => {_TAKEN_AT_FIRST}",
        "replayed",
        "wrong",
    ),
    *(
        Bug(
            f"lists have a block at least, {case}",
            tile_list.BlockRow,
            "of",
            "fly.maximum(counts.load(*place), 0) => fly.maximum(counts.load(*place), 1)",
            case,
            "wrong",
        )
        for case in ("an empty column", "an empty column, sm90")
    ),
    *(
        Bug(
            f"a pass does not wait for what is known of its rows, {case}",
            steps.Steps,
            "launch",
            f"{_IN_ORDER} => {_STATISTICS_LAST}",
            case,
            "wrong",
        )
        for case in ("one behind the other", "one behind the other, sm90")
    ),
)


@pytest.mark.parametrize("case", CASES)
def test_without_a_bug_there_is_none(case, seed):
    assert not CASES[case](seed), f"seed {seed}"


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, monkeypatch, seed):
    found = shown(CASES, bug, monkeypatch, seed)
    assert found in bug.found.split(), f"{found}, seed {seed}"
