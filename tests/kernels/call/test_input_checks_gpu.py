"""Offsets, lengths, entries and pages on a GPU: a debug mode names what is wrong, and otherwise nothing is read."""

from __future__ import annotations

import pytest
import torch

from fly.errors import ArgumentError, UnsupportedError
from tests.kernels.call.input_cases import GOOD, MISTAKES, append, numbers, packed, run_nothing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]
DEVICE = "cuda"


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named(mistake, monkeypatch):
    run_nothing(monkeypatch)
    function, arguments = mistake.arguments(DEVICE)
    function(**arguments)  # not looked at by default
    monkeypatch.setenv("FLY_CHECK_INPUTS", "1")
    for _ in range(2):  # also a call whose plan is known
        with pytest.raises(ArgumentError) as error:
            function(**arguments)
        assert str(error.value) == f"{function.__name__}: {mistake.message}"


@pytest.mark.parametrize("call", GOOD)
def test_good_calls_give_the_same(call, monkeypatch, seed):
    """With the checks on; queries outside of all sequences are not written, so they start as zeros."""
    function, good = GOOD[call]
    results = []
    for asked in ("0", "1"):
        monkeypatch.setenv("FLY_CHECK_INPUTS", asked)
        torch.manual_seed(seed)
        arguments = good(DEVICE)
        for tensor in arguments.values():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                tensor.normal_()
        if "k_cache" not in arguments:
            arguments["out"] = torch.zeros_like(arguments["q"])
        function(**arguments)
        results.append([arguments[name].clone() for name in ("out", "k_cache", "v_cache") if name in arguments])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b), f"seed {seed}"


@pytest.mark.parametrize("name", ["decreasing offsets", "page that does not exist", "full cache"])
def test_by_default_nothing_waits(name, monkeypatch):
    """Even where an entry is wrong."""
    monkeypatch.delenv("FLY_CHECK_INPUTS", raising=False)
    function, arguments = MISTAKES[name].arguments(DEVICE)
    function(**arguments)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(**arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_work_on_the_callers_stream_is_waited_for(monkeypatch):
    """Offsets that become wrong on the stream of the call, late."""
    monkeypatch.setenv("FLY_CHECK_INPUTS", "1")
    arguments, stream = packed(DEVICE), torch.cuda.Stream()
    function = GOOD["packed"][0]
    function(**arguments, stream=stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        arguments["cu_seqlens_q"][1] = 7
    with pytest.raises(ArgumentError, match="cu_seqlens_q"):
        function(**arguments, stream=stream)


@pytest.mark.parametrize("good", [packed, append], ids=lambda good: good.__name__)
def test_a_capture_is_refused_and_goes_on_without_checks(good, monkeypatch):
    function, arguments = GOOD[good.__name__][0], good(DEVICE)
    monkeypatch.delenv("FLY_CHECK_INPUTS", raising=False)
    function(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        monkeypatch.setenv("FLY_CHECK_INPUTS", "1")
        with pytest.raises(UnsupportedError, match=f"{function.__name__}: FLY_CHECK_INPUTS=1 reads a report back"):
            function(**arguments)
        monkeypatch.delenv("FLY_CHECK_INPUTS")
        function(**arguments)
    graph.replay()
    torch.cuda.synchronize()


def test_large_tables(monkeypatch, seed):
    """A table of more places than the launch has threads; the first wrong one is named."""
    run_nothing(monkeypatch)
    monkeypatch.setenv("FLY_CHECK_INPUTS", "1")
    generator = torch.Generator().manual_seed(seed)
    batch, pages = 300, 200
    function, arguments = GOOD["paged"][0], GOOD["paged"][1](DEVICE)
    table = torch.randint(0, 10, (batch, pages), generator=generator, dtype=torch.int32)
    wrong = torch.randint(0, batch * pages, (3,), generator=generator)
    table.view(-1)[wrong] = 10
    arguments |= {
        "q": torch.zeros(batch, 2, 4, 64, dtype=torch.bfloat16, device=DEVICE),
        "block_table": table.to(DEVICE),
        "seqused_kv": numbers(*[16 * pages] * batch, device=DEVICE),
    }
    row, column = divmod(int(wrong.min()), pages)
    with pytest.raises(ArgumentError) as error:
        function(**arguments)
    assert f"block_table[{row}, {column}] is 10; accepted: 0 to 9" in str(error.value), f"seed {seed}"
