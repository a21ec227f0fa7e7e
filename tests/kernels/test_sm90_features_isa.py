"""Builds of the Hopper kernel with features, as ptxas sees them; see `tests/kernels/test_flash_attn_sm90_isa.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fly.lang.signature import ScalarSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from kernels.features import NUMBERS, Features, Mod
from kernels.flash_attn_sm90 import flash_attn_sm90
from kernels.sm90_builds import Sm90Options, decode_options, options_of
from tests.backends.builds import needs_ptxas
from tests.kernels.feature_cases import by_head, stripes
from tests.kernels.test_flash_attn_sm90_isa import accept, specs

TENSORS = {
    "alibi_slopes": TensorSpec("f32", 2, 4, True),
    "bias": TensorSpec("bf16", 4, 2, True),
    "sink": TensorSpec("f32", 1, 4, True),
}
COUNTS = TensorSpec("i32", 1, 4, True)
WINDOW = ("window_left", "window_right")
LONG, FULL, SHORT = (128, 128, True, 2, None), (128, 128, False, 2, None), (64, 64, True, 3, None)


def with_features(base: Sm90Options, asked: Features) -> Sm90Options:
    """As `build_for` makes it of a build."""
    return replace(base, features=asked, block_n=min(base.block_n, 64) if asked.elementwise else base.block_n)


def compiled(options: Sm90Options, form: str):
    """A build with operands for its features."""
    operands: list[TensorSpec | ScalarSpec] = []
    for name in options.features.operands:
        number = ScalarSpec("f32" if name == "softcap" else "i32")
        operands.append(number if name in NUMBERS else TENSORS.get(name, COUNTS))
    if options.features.score_mod is not None:
        operands.append(TensorSpec("f32", 2, 4, True))
    arguments = (*specs(options, form, "bf16"), *operands)
    return compile_kernel(flash_attn_sm90, arguments, {"options": options}, "sm_90a", (options.threads, 1, 1))


@needs_ptxas
@pytest.mark.parametrize(
    ("base", "form", "asked"),
    [
        (options_of(LONG), "dense", Features(("window_left", "softcap", "alibi_slopes", "sink"))),
        (options_of(FULL), "split", Features(("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx", *WINDOW))),
        (options_of(SHORT), "dense", Features(("softcap", "alibi_slopes"))),
        (options_of(LONG), "dense", Features(("bias",))),
        (options_of(SHORT), "packed", Features(score_mod=Mod.of(by_head))),
        (options_of(FULL), "dense", Features(mask_mod=Mod.of(stripes))),
        (replace(options_of(LONG), pack_gqa=8), "packed", Features(("seqused_kv", "window_left", "sink"))),
        (decode_options(128, 128, False, 8), "split", Features(("seqused_kv", "window_left", "alibi_slopes"))),
        (decode_options(64, 64, False, 8), "dense", Features(("window_left", "softcap", "sink"))),
        (replace(decode_options(128, 128, False, 8), combines=True), "split", Features(("seqused_kv", "sink"))),
    ],
    ids=lambda x: "+".join(x.operands) or "function" if isinstance(x, Features) else None,
)
def test_builds_with_features_are_accepted_as_they_are_meant(base, form, asked, tmp_path):
    options = with_features(base, asked)
    # the producer, a single thread, has 32 or 40 registers: lengths and windows at once cost it two more
    stack = 8 if "window_left" in asked.operands and base.consumers > 1 else 0
    accept(compiled(options, form), options, tmp_path, stack)


def test_whole_tiles_of_a_window_have_no_mask():
    """Three loops: along the diagonal, inside of the window, along its left edge."""
    plain, windowed = (
        compiled(with_features(options_of(LONG), Features(names)), "dense").isa for names in ((), ("window_left",))
    )
    commits = [isa.count("wgmma.commit_group.sync.aligned") for isa in (plain, windowed)]
    assert commits == [8, 10]
