"""Offsets, lengths, entries and pages on the device: what is wrong is named, what is right is left alone."""

from __future__ import annotations

import random
import re
import shutil

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fly
from fly.backends.target import target
from fly.errors import ArgumentError, ConfigError
from fly.lang.signature import ScalarSpec
from kernels.arguments.callers import plain
from kernels.call import device_values
from kernels.call.device_rules import RULES
from kernels.call.device_values import THREADS, check_inputs
from kernels.flash_attn_api import flash_attn_varlen_func, flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.backends.builds import run_ptxas
from tests.kernels.call.input_cases import GOOD, MISTAKES, heads, numbers, packed, run_nothing
from tests.simulated import Machine, Program, flat
from tests.tracing import ARCHS, matrix, trace

mistakes = pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())


@pytest.fixture
def nothing_runs(monkeypatch):
    """Calls are checked, and no more."""
    run_nothing(monkeypatch)


@pytest.fixture
def inputs_of(nothing_runs, monkeypatch):
    """`inputs_of(function, arguments)`: (list of rules, tensors, numbers) of a call, which is not checked."""

    def inputs_of(function, arguments):
        found = []

        def keep(rules, tensors, known):
            found.append((rules, {name: tensor.clone() for name, tensor in tensors.items()}, known))

        with monkeypatch.context() as patch:
            patch.setattr(device_values, "find_on_host", keep)
            function(**arguments)
        return found[0]

    return inputs_of


def simulated(arch):
    """`find_on_device` with `check_inputs` as it is traced for a target, run in numpy."""

    class Kernel:
        def __getitem__(self, grid_and_block):
            grid, block = grid_and_block

            def launch(report, *operands, stream, **statics):
                arrays = [x.numpy() if isinstance(x, torch.Tensor) else x for x in operands]
                specs = [matrix("i32", x.ndim) if isinstance(x, np.ndarray) else "i32" for x in arrays]
                module = trace(check_inputs, matrix("i64", 2), *specs, arch=arch, block=block, **statics)
                Machine(Program.of(module, target(arch)))(flat(report.numpy(), *arrays), (grid, 1, 1))

            return launch

    return Kernel()


@mistakes
def test_a_mistake_is_named(mistake, nothing_runs):
    function, arguments = mistake.arguments()
    with pytest.raises(ArgumentError) as error:
        function(**arguments)
    assert str(error.value) == f"{function.__name__}: {mistake.message}"


@pytest.mark.parametrize("call", GOOD)
def test_good_calls_are_left_alone(call, nothing_runs, inputs_of):
    function, good = GOOD[call]
    function(**good("cpu"))
    rules, tensors, known = inputs_of(function, good("cpu"))
    assert device_values.find_on_host(rules, tensors, known) is None


def test_every_rule_has_a_mistake(inputs_of):
    """And every mistake is found where it is, by the rule that is about it."""
    broken = set()
    for mistake in MISTAKES.values():
        rules, tensors, known = inputs_of(*mistake.arguments())
        broken.add(device_values.find_on_host(rules, tensors, known).rule)
    assert broken == {rule for rules in RULES.values() for rule in rules}


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
def test_the_kernel_finds_what_the_host_finds(arch, inputs_of, monkeypatch):
    """Every mistake, in the emulator; a kernel for each kind of call."""
    monkeypatch.setenv("FLY_ARCH", arch)
    for name, mistake in MISTAKES.items():
        inputs = inputs_of(*mistake.arguments())
        assert plain(str(device_values.find_on_device(*inputs))) == mistake.message, name
    for function, good in GOOD.values():
        assert device_values.find_on_device(*inputs_of(function, good("cpu"))) is None


def nonsense(inputs, draw):
    """The same inputs, each tensor with a few entries changed to anything."""
    rules, tensors, known = inputs
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in changed.values():
        entries = tensor.view(-1)
        for _ in range(draw.choice([0, 0, 1, 3])):
            near = draw.choice(list(known.values())) + draw.randint(-2, 2)
            entries[draw.randrange(len(entries))] = draw.choice([near, -1, 0, 1, 2**31 - 1, -(2**31)])
    return rules, changed, known


@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm_80", "sm_90a"])
def test_random_nonsense_is_found_alike(arch, inputs_of, monkeypatch, seed):
    """By the host and by the kernel, in the emulator and as it is traced for NVIDIA GPUs; or not at all."""
    if arch.startswith("gfx"):
        monkeypatch.setenv("FLY_ARCH", arch)
    else:
        monkeypatch.setattr(device_values, "check_inputs", simulated(arch))
    draw, found = random.Random(seed), []
    for name, (function, good) in GOOD.items():
        inputs = inputs_of(function, good("cpu"))
        for _ in range(12 if arch.startswith("gfx") else 4):
            wrong = nonsense(inputs, draw)
            expected, got = (find(*wrong) for find in (device_values.find_on_host, device_values.find_on_device))
            assert got == expected, f"seed {seed}, {name}: {got} instead of {expected}"
            found.append(expected)
    assert None in found and len(set(map(str, found))) > 5, f"seed {seed}"


def test_the_first_of_many_places_is_found(monkeypatch, seed):
    """More places than threads of a launch, two blocks of them; in the emulator."""
    monkeypatch.setattr(device_values, "MAX_BLOCKS", 2)
    draw = random.Random(seed)
    batch, pages = 300, 7
    table = torch.randint(0, 50, (batch, pages), dtype=torch.int32)
    lengths = torch.full((batch,), 16 * pages, dtype=torch.int32)
    known = {"batch": batch, "queries": 1, "pages": 50, "page_size": 16, "table_pages": pages, "table_columns": pages}
    wrong = sorted(draw.sample(range(batch * pages), 4))
    table.view(-1)[wrong] = 50
    found = device_values.find_on_device("attention", {"seqused_kv": lengths, "block_table": table}, known)
    assert (found.row, found.column, found.value) == (*divmod(wrong[0], pages), 50), f"seed {seed}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("call", ["packed", "masked", "append paged"])
def test_the_kernel_compiles_for_every_target(call, arch, inputs_of, tmp_path):
    """And has registers enough."""
    rules, tensors, known = inputs_of(GOOD[call][0], GOOD[call][1]("cpu"))
    specs = [matrix("i32", tensor.dim()) for tensor in tensors.values()] + [ScalarSpec("i32")] * len(known)
    statics = {"names": (*tensors, *known), "rules": rules}
    built = fly.compile(check_inputs, matrix("i64", 2), *specs, block=THREADS, target=arch, **statics)
    if arch.startswith("gfx"):
        assert built.resources.scratch_bytes == 0
    elif shutil.which("ptxas"):
        assert "0 bytes spill stores, 0 bytes spill loads" in run_ptxas(built.isa, arch, tmp_path)


def forwarded(arguments, **changes):
    return flydsl_flash_attn_func(**(arguments | changes))


@pytest.mark.parametrize(
    ("asked", "emulators", "raises"),
    [(None, None, True), ("1", "1", True), ("1", "0", True), (None, "0", False), ("0", "1", False), ("", "", False)],
)
def test_flags(asked, emulators, raises, nothing_runs, monkeypatch):
    """Of their own accord checks are made where the emulator's are; `FLY_CHECK_INPUTS` has the last word."""
    for name, value in (("FLY_CHECK_INPUTS", asked), ("FLY_EMULATOR_CHECKS", emulators)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    calls = [
        MISTAKES["decreasing offsets"].arguments(),
        MISTAKES["padding past the length"].arguments(),
        MISTAKES["full cache"].arguments(),
    ]
    for function, arguments in calls:
        for _ in range(2):  # also a call whose plan is known
            if raises:
                with pytest.raises(ArgumentError):
                    function(**arguments)
            else:
                function(**arguments)


def test_flags_count_in_the_next_call(nothing_runs, monkeypatch):
    """Calls of one kind, with other offsets and under other flags."""
    arguments = packed()
    monkeypatch.delenv("FLY_CHECK_INPUTS", raising=False)
    forwarded(arguments)
    arguments["cu_seqlens_q"][1] = 7
    with pytest.raises(ArgumentError, match=re.escape("cu_seqlens_q[2] is 5, less than cu_seqlens_q[1], which is 7")):
        forwarded(arguments)
    monkeypatch.setenv("FLY_CHECK_INPUTS", "0")
    forwarded(arguments)
    monkeypatch.setenv("FLY_CHECK_INPUTS", "1")
    with pytest.raises(ArgumentError):
        forwarded(arguments)
    monkeypatch.setenv("FLY_CHECK_INPUTS", "yes")
    with pytest.raises(ConfigError, match="FLY_CHECK_INPUTS='yes': expected 0 or 1"):
        forwarded(arguments)


def test_messages_are_in_the_names_of_the_call(nothing_runs):
    """Of FlashAttention's functions, whose arguments have other names than what is behind them."""
    cache = {"q": heads(2, 1, 4), "k_cache": heads(4, 16, 2), "v_cache": heads(4, 16, 2)}
    given = {
        "page_table[1, 1] is 4; accepted: 0 to 3": {
            "page_table": numbers([0, 1], [2, 4]),
            "cache_seqlens": numbers(32, 17),
        },
        "cache_seqlens[0] is 17; accepted: 0 to 16": {"cache_seqlens": numbers(17, 3)},
        "cache_batch_idx[0] is 4; accepted: 0 to 3": {"cache_batch_idx": numbers(4, 0)},
        "cache_seqlens[1] is 15; with 2 new keys 17 are more": {
            "k": heads(2, 2, 2),
            "v": heads(2, 2, 2),
            "cache_seqlens": numbers(0, 15),
        },
    }
    for message, arguments in given.items():
        with pytest.raises(ArgumentError, match=re.escape(f"flash_attn_with_kvcache: {message}")):
            flash_attn_with_kvcache(**cache, **arguments)
    tokens = (heads(9, 4), heads(9, 2), heads(9, 2), numbers(0, 4, 9), numbers(0, 5, 4), 5, 5)
    message = "flash_attn_varlen_func: cu_seqlens_k[2] is 4, less than cu_seqlens_k[1], which is 5"
    with pytest.raises(ArgumentError, match=re.escape(message)):
        flash_attn_varlen_func(*tokens)


def test_a_tensor_without_memory_is_for_other_checks_to_name():
    with FakeTensorMode():
        table = torch.zeros(1, 3, dtype=torch.int32)
    assert device_values.find_on_host("attention", {"block_table": table}, {}) is None
