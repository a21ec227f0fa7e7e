"""What the backward kernels are compiled to: registers, and none of them spilled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from fly.backends.nvvm.codegen import resources
from kernels import flash_attn_sm90_bwd, flash_attn_sm90_bwd_wide
from tests.backends.builds import needs_ptxas
from tests.kernels.backward.builds import bindings_of, compiled
from tests.kernels.feature_cases import Inputs
from tests.kernels.sanitizer_set import asked


def builds_of(arch: str, head_dim: int, *names: str, of: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """(kernel, artefact) of dkdv and dq of a causal call with some of `FEATURES`."""
    inputs = Inputs([256], [256], head_dim=head_dim)
    bindings = bindings_of(arch, inputs, True, of, **asked(*names)(inputs))
    return [(b.kernel.name, compiled(arch, b)) for b in bindings if "options" in b.statics]


# those that take the most registers, of each row of the tables
CROWDED = [
    (64, ("plain",), ()),
    (64, ("softcap", "dropout"), ()),
    (128, ("plain",), ()),
    (128, ("bias of every score",), ("bias",)),
    (128, ("softcap", "window both"), ()),
    (128, ("dropout",), ()),
    (128, ("seqused",), ()),
    (128, ("block mask",), ()),
    (256, ("plain",), ()),
    (256, ("alibi heads",), ()),
    (256, ("dropout",), ()),
]


@needs_ptxas
@pytest.mark.sample(4)
@pytest.mark.parametrize(("head_dim", "names", "of"), CROWDED, ids=str)
def test_ptxas_spills_nothing(head_dim, names, of):
    for name, artefact in builds_of("sm_90a", head_dim, *names, of=of):
        found = resources(artefact.isa, "sm_90a", 0)
        assert (found.spills, found.scratch_bytes) == (0, 0), name


@needs_ptxas
@pytest.mark.parametrize("arch", ["sm_86", "sm_89"])
def test_packed_causal_heads_of_64_spill_nothing_before_hopper(arch):
    inputs = Inputs([256], [256], head_dim=64, packed=True)
    for binding in bindings_of(arch, inputs, True):
        if "options" in binding.statics:
            found = resources(compiled(arch, binding).isa, arch, 0)
            assert (found.spills, found.scratch_bytes) == (0, 0), binding.kernel.name


@needs_ptxas
@pytest.mark.sample(2)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["softcap", "alibi heads", "bias of every score", "dropout", "score_mod aux"])
def test_heads_of_128_spill_nothing_with_dk_and_dv_in_two_warpgroups(name, causal):
    """Features beside which the other fused kernel spills at D=128."""
    inputs = Inputs([256], [256], head_dim=128)
    found = bindings_of("sm_90a", inputs, causal, module=flash_attn_sm90_bwd_wide, **asked(name)(inputs))
    for binding in (b for b in found if b.kernel.name == "flash_attn_sm90_bwd"):
        taken = resources(compiled("sm_90a", binding).isa, "sm_90a", 0)
        assert (taken.spills, taken.scratch_bytes) == (0, 0)
        break
    else:
        pytest.fail("no fused kernel was bound")


# (head dimension, names of `FEATURES`, packed): each spilled once
FUSED = [
    (128, ("softcap",), False),
    (128, ("alibi heads",), False),
    (128, ("bias of keys",), False),
    (128, ("score_mod aux",), False),
    (128, ("softcap", "window both"), False),
    (128, ("softcap", "window both"), True),
    (96, ("dropout",), False),
    (64, ("softcap", "dropout"), False),
]


@needs_ptxas
@pytest.mark.sample(2)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("head_dim", "names", "packed"), FUSED, ids=str)
def test_the_fused_kernel_spills_nothing_with_dk_and_dv_in_each_warpgroup(head_dim, names, packed, causal):
    inputs = Inputs([256], [256], head_dim=head_dim, packed=packed)
    found = bindings_of("sm_90a", inputs, causal, module=flash_attn_sm90_bwd, **asked(*names)(inputs))
    (binding,) = (b for b in found if b.kernel.name == "flash_attn_sm90_bwd")
    taken = resources(compiled("sm_90a", binding).isa, "sm_90a", 0)
    assert (taken.spills, taken.scratch_bytes) == (0, 0)


@pytest.mark.parametrize("head_dim", [192, 256])
def test_no_slot_is_given_back_before_loads_of_its_numbers_have_ended(head_dim):
    """An arrival at an mbarrier does not wait for loads, but a store of what is made of them does."""
    inputs = Inputs([256], [256], head_dim=head_dim)
    found = bindings_of("sm_90a", inputs, True, module=flash_attn_sm90_bwd_wide)
    (binding,) = (b for b in found if b.kernel.name == "flash_attn_sm90_bwd")
    numbers: dict[str, str] = {}
    events = []  # synchronisations at named barriers by number, loads from shared memory, arrivals at mbarriers
    for line in compiled("sm_90a", binding).isa.splitlines():
        if move := re.match(r"\s*mov\.b32\s+(%r\d+), (\d+);", line):
            numbers[move[1]] = move[2]
        elif sync := re.match(r"\s*barrier\.cta\.sync\.aligned (%r\d+)", line):
            events.append(numbers[sync[1]])
        elif event := re.match(r"\s*(ld\.shared|mbarrier\.arrive)", line):
            events.append(event[1])
    sections = "-".join(events).split(f"-{flash_attn_sm90_bwd_wide.WEIGHED}-")[1:]
    of_keys = [section.split(f"-{flash_attn_sm90_bwd_wide.STORED}-")[0] for section in sections]
    assert of_keys and all("ld.shared" in section for section in of_keys)
    assert not any("mbarrier.arrive" in section for section in of_keys)


@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    ("head_dim", "name"), [(64, "plain"), (128, "plain"), (256, "plain"), (128, "softcap"), (128, "score_mod aux")]
)
def test_amd_s_kernels_need_no_scratch_memory(head_dim, name, arch):
    for kernel, artefact in builds_of(arch, head_dim, name):
        found = artefact.resources
        assert found.scratch_bytes == 0, kernel
        if name == "plain":
            assert found.spills == 0, kernel
