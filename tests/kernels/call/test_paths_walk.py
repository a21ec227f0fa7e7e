"""The whole table of kernels: every target, kernel, feature and class of head dimensions is served or well refused.

A refusal names the target, what about the call is not done, and what to do instead.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from fly.backends.target import target
from fly.errors import UnsupportedError
from fly.lang.signature import ScalarSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from kernels import dispatch
from kernels.arguments.callers import plain
from kernels.dispatch import AMD, KERNELS, NVIDIA
from kernels.flash_attn_generic import flash_attn_generic, options_for
from kernels.problem.catalogue import BY_NAME, DESCALES, NUMBERS, OPERANDS
from kernels.problem.contract import Request
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from tests.backends.builds import needs_ptxas, run_ptxas

ARCHS = (*AMD, *NVIDIA)
# one that many kernels have, an odd one, mixed ones, the largest, and two that no kernel has
HEAD_DIMS = ((64, 64), (128, 128), (40, 40), (96, 96), (192, 128), (256, 256), (64, 128), (36, 36), (512, 512))
PLAIN = Request(
    head_dim=128,
    dtype="bf16",
    causal=True,
    cross_seqlen=False,
    return_lse=True,
    batch=2,
    seq_len=1024,
    seq_len_kv=1024,
    num_heads=8,
    num_kv_heads=2,
    softmax_scale=0.1,
    kv_pitch=512,
)
SINGLE = [(), *((name,) for name in BY_NAME)]
PAIRS = list(itertools.combinations(BY_NAME, 2))
CHANGES = ({}, {"dtype": "f16"}, {"dtype": "f8e4m3"}, {"alignment": 2}, {"tuning": {"waves_per_eu": 2}})


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No variable is set."""
    for variable in ("FLY_KERNEL", "FLYDSL_DISABLE_DUALWAVE_SWP"):
        monkeypatch.delenv(variable, raising=False)


def requests(features=SINGLE):
    """Every combination of features, head dimensions and other differences."""
    for names, (dim, value_dim), change in itertools.product(features, HEAD_DIMS, CHANGES):
        yield replace(PLAIN, features=names, head_dim=dim, head_dim_v=value_dim, **change)


def combination(kernel: dispatch.Kernel, arch: str, request: Request) -> list[str]:
    """What a refusal by `kernel` must name: every word here, the first thing that is in the way."""
    if request.dtype not in kernel.dtypes:
        return [request.dtype, "convert with"]
    if request.head_dim not in kernel.head_dims:
        return [f"not {request.head_dim}: "]
    mixed = kernel.mixed_dims and request.value_dim in kernel.head_dims
    if request.head_dim != request.value_dim and not mixed:
        return [f"not ({request.head_dim}, {request.value_dim}): pad v"]
    missing = [name for name in request.features if not kernel.has(name, arch)]
    if missing:
        return [plain(part) for name in missing for part in BY_NAME[name].told]
    if set(request.tuning) - set(kernel.tuning):
        return [*request.tuning, "leave it out"]
    return [f"not of {request.alignment}: make them contiguous"] if request.alignment < 16 else []


def check_choice(arch: str, request: Request) -> bool:
    """Whether the call is served; what refuses it does so in full."""
    meant = [kernel for kernel in KERNELS if arch in kernel.archs]
    able = [kernel for kernel in meant if dispatch.refusal(kernel, arch, request) is None]
    if able:
        assert dispatch.choose(arch, request) is next((k for k in able if not k.yields(request)), able[0])
        return True
    with pytest.raises(UnsupportedError) as caught:
        dispatch.choose(arch, request)
    text = str(caught.value)
    assert f"on target {arch}: " in text
    for kernel in meant:
        assert f"the {kernel.name} kernel" in text
        if not request.tuning or "waves_per_eu" not in kernel.tuning:
            for words in combination(kernel, arch, request):
                assert words in text
    return False


@pytest.mark.parametrize("arch", ARCHS)
def test_every_call_is_served_or_refused_in_full(arch):
    served = {request.features for request in requests() if check_choice(arch, request)}
    # where few architectures have them
    alone = {"debug_counts": ("gfx942", "gfx950")}
    alone |= dict.fromkeys(("descale", "fp8_accumulate"), ("gfx950", "sm_90a"))
    alone["kv_cache_layout"] = dispatch.AMD
    assert served == {(), *((name,) for name in BY_NAME if arch in alone.get(name, (arch,)))}


@pytest.mark.parametrize("arch", ARCHS)
def test_pairs_of_features(arch):
    """What is done alone is done together, but for `debug_counts`, which one kernel of a target has."""
    for request in requests(PAIRS):
        together = check_choice(arch, request)
        if "debug_counts" not in request.features:
            parts = (replace(request, features=(name,)) for name in request.features)
            assert together == all(any(dispatch.refusal(k, arch, r) is None for k in KERNELS) for r in parts)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_forced_kernel(arch, kernel, monkeypatch):
    monkeypatch.setenv("FLY_KERNEL", kernel.name)
    for request in requests():
        if dispatch.refusal(kernel, arch, request) is None:
            assert dispatch.choose(arch, request) is kernel
            continue
        with pytest.raises(UnsupportedError) as caught:
            dispatch.choose(arch, request)
        text = str(caught.value)
        assert text.startswith(f"FLY_KERNEL={kernel.name}: the {kernel.name} kernel ")
        assert text.endswith(f"unset FLY_KERNEL, and flash attention chooses its kernel for target {arch}")
        if arch not in kernel.archs:
            assert f"not on {arch}" in text


def test_an_unknown_target_is_named():
    with pytest.raises(UnsupportedError, match=r"no kernel for target gfx90a; targets: gfx942, gfx950, sm_80"):
        dispatch.choose("gfx90a", PLAIN)


GENERIC_OPERANDS = tuple(name for name in OPERANDS if name not in DESCALES)
# tensors of every operand, as `check_features` gives them
OPERAND_SPECS = {
    **{name: ScalarSpec("i32") for name in NUMBERS},
    "softcap": ScalarSpec("f32"),
    **{name: TensorSpec("i32", 1, 4, True) for name in ("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx")},
    "alibi_slopes": TensorSpec("f32", 2, 4, True),
    "bias": TensorSpec("bf16", 4, 2, True),
    "sink": TensorSpec("f32", 1, 4, True),
    "rng_state": TensorSpec("i64", 1, 8, True),
    **{name: TensorSpec("i32", 3, 4, True) for name in ("block_counts", "whole_block_counts")},
    **{name: TensorSpec("i32", 4, 4, True) for name in ("block_indices", "whole_block_indices")},
}


@needs_ptxas
@pytest.mark.parametrize(
    ("arch", "head_dim", "block_size"), [("sm_80", 64, None), ("sm_90a", 128, (128, 128)), ("sm_80", 256, (64, 64))]
)
def test_all_features_together_compile_on_nvidia(arch, head_dim, block_size, tmp_path):
    """Of every class of tiles: two stages, queries in shared memory, and tiles by turns."""
    description = target(arch)
    lists = ("block_counts", "block_indices")
    names = tuple(name for name in OPERAND_SPECS if block_size is not None or not name.endswith(lists))
    names = tuple(name for name in GENERIC_OPERANDS if name in names)  # in their order, and not in pages
    asked = Features(
        names,
        score_mod=Mod.of(lambda s, b, h, q, k, table: s + table[h, k]),
        mask_mod=Mod.of(lambda b, h, q, k, table: q != k),
        block_size=block_size,
    )
    options = options_for(description, head_dim, False, 16, features=asked)
    dense = TensorSpec("bf16", 4, 16, True)
    specs = (
        *(dense, dense, dense, dense, TensorSpec("f32", 3, 16, True), ScalarSpec("f32"), None, None),
        *(OPERAND_SPECS[name] for name in names),
        TensorSpec("f32", 2, 16, True),
    )
    threads = options.waves * description.wave_size
    artefact = compile_kernel(flash_attn_generic, specs, {"options": options}, arch, (threads, 1, 1))
    assert artefact.fields[-1].name == f"operands{len(names)}.stride0"
    run_ptxas(artefact.isa, arch, tmp_path)
