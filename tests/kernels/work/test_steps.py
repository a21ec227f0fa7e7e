"""Kernels bound by the names of their parameters: a made-up backward on the emulator, with what that has besides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fly
from fly.errors import ArgumentError
from kernels.work import steps
from kernels.work.steps import Steps, bind_kernel

N = 64
INPUTS = ("q", "k", "v", "out", "dout", "lse")
GRADIENTS = ("dq", "dk", "dv")


@fly.kernel
def sums(dout: fly.Tensor, out: fly.Tensor, delta: fly.Tensor):
    """delta = dout * out."""
    i = fly.thread_id.x
    delta.store(dout.load(i) * out.load(i), i)


@fly.kernel
def gradients(
    q: fly.Tensor,
    k: fly.Tensor,
    v: fly.Tensor,
    dout: fly.Tensor,
    lse: fly.Tensor,
    delta: fly.Tensor,
    rng_state: fly.Tensor | None,
    dq: fly.Tensor,
    dk: fly.Tensor,
    dv: fly.Tensor,
    scale: fly.f32,
    *operands: fly.Operand,
):
    """Something of everything that a backward has, of which each parameter has a part of its own."""
    i = fly.thread_id.x
    q, k, v, dout, lse, delta = (tensor.load(i) for tensor in (q, k, v, dout, lse, delta))
    dropped = fly.f32(0.0) if rng_state is None else rng_state.load(i).to(fly.f32)
    sink = operands[1].load(i) * operands[0] if operands else fly.f32(0.0)
    dq.store(dout * k + delta * scale, i)
    dk.store(dout * q + lse, i)
    dv.store(dout + v * 2.0 + dropped + sink, i)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")


def call(seed: int, *, dropout: bool, sink: bool):
    """A call's tensors, in no kernel's order, and among them some that no kernel here names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(N, generator=generator) for name in (*GRADIENTS, *reversed(INPUTS), "nobody's")}
    tensors["rng_state"] = torch.randint(0, 100, (N,), dtype=torch.int32, generator=generator) if dropout else None
    return tensors | ({"sink": torch.randn(N, generator=generator)} if sink else {})


def wanted(given, scale, factor):
    dropped = 0.0 if given["rng_state"] is None else given["rng_state"].float()
    sink = given["sink"] * factor if "sink" in given else 0.0
    return (
        given["dout"] * given["k"] + given["dout"] * given["out"] * scale,
        given["dout"] * given["q"] + given["lse"],
        given["dout"] + given["v"] * 2.0 + dropped + sink,
    )


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_a_backward_of_two_kernels_takes_what_its_parameters_name(dropout, sink, seed):
    example = call(seed, dropout=dropout, sink=sink)
    arguments = {**example, "delta": torch.empty(N), "scale": 0.5, "factor": 3.0}
    first = bind_kernel(sums, 1, N, arguments, {})
    second = bind_kernel(gradients, 1, N, arguments, {}, operands=("factor", "sink") if sink else ())
    assert first.takes == ("dout", "out", "delta")
    rest = (("rng_state",) if dropout else ()), ("dq", "dk", "dv"), (("sink",) if sink else ())
    assert second.takes == ("q", "k", "v", "dout", "lse", "delta", *(name for names in rest for name in names))

    launch = Steps((second,)).behind(first, "delta", 4 * N).launch()
    assert launch.workspace_bytes == 4 * N
    for offset in range(2):
        given = call(seed + offset, dropout=dropout, sink=sink) | {"workspace": torch.empty(N)}
        launch.run(given, None)
        for name, gradient in zip(GRADIENTS, wanted(given, 0.5, 3.0)):
            torch.testing.assert_close(given[name], gradient, msg=f"{name}, seed {seed + offset}")


def test_a_parameter_may_be_called_something_else(seed):
    given = call(seed, dropout=False, sink=False)
    bound = bind_kernel(sums, 1, N, given, {}, called={"delta": "dq", "out": "q"})
    assert bound.takes == ("dout", "q", "dq")
    Steps((bound,)).launch().run(given, None)
    torch.testing.assert_close(given["dq"], given["dout"] * given["q"])


def test_what_a_kernel_needs_has_to_be_there():
    given = call(0, dropout=False, sink=False)
    with pytest.raises(ArgumentError, match="argument 'delta' is None"):
        bind_kernel(sums, 1, N, given, {})


def test_parts_of_a_workspace_begin_at_multiples_of_256_bytes_and_streams_have_addresses_of_their_own():
    """What a kernel in front leaves moves the other parts; the stream of a launch decides the rest."""
    launched = []

    def bound(name, *takes):
        launch = lambda addresses, stream: launched.append((name, list(addresses), stream))  # noqa: E731
        return steps.BoundKernel(
            SimpleNamespace(launch=launch, entry=SimpleNamespace(current_stream=int, kernel=None)), takes
        )

    forward = Steps(
        (bound("forward", "q", "part", "counters"), bound("combine", "part", "more", "out")),
        {"part": 0, "more": 512},
        600,
        {"counters": lambda stream: 1000 + stream},
    )
    launch = forward.behind(bound("turn", "v", "turned"), "turned", 300).launch()
    assert launch.workspace_bytes == 512 + 600
    tensors = {name: torch.empty(4) for name in ("q", "v", "out", "workspace")}
    launch.run(tensors, 7)
    q, v, out, start = (tensor.data_ptr() for tensor in tensors.values())
    assert launched == [
        ("turn", [v, start], 7),
        ("forward", [q, start + 512, 1007], 7),
        ("combine", [start + 512, start + 1024, out], 7),
    ]
