"""Builds of the Hopper kernel with features, as ptxas sees them; see `test_flash_attn_sm90_isa.py`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from fly.lang.signature import ScalarSpec, TensorSpec
from fly.runtime.compile import compile_kernel
from kernels.flash_attn_sm90 import flash_attn_sm90
from kernels.problem.catalogue import BY_NAME, NUMBERS, OPERANDS
from kernels.problem.features import Features
from kernels.problem.mods import Mod
from kernels.sm90.builds import Sm90Options, build_for, decode_options, elementwise_keys, options_of
from kernels.sm90.cost import KEYS_ALONE
from kernels.work.tile_list import PARTIAL, WHOLE
from tests.backends.builds import needs_ptxas
from tests.kernels.feature_cases import by_head, stripes
from tests.kernels.sm90.hopper_stub import UNITS
from tests.kernels.sm90.test_flash_attn_sm90_isa import accept, specs
from tests.kernels.sm90.test_sm90_builds import request

LISTS = (*PARTIAL, *WHOLE)
TENSORS = {
    "alibi_slopes": TensorSpec("f32", 2, 4, True),
    "bias": TensorSpec("bf16", 4, 2, True),
    "sink": TensorSpec("f32", 1, 4, True),
    "rng_state": TensorSpec("i64", 1, 8, True),
    **{name: TensorSpec("i32", 3 + name.endswith("indices"), 4, True) for name in LISTS},
}
COUNTS = TensorSpec("i32", 1, 4, True)
WINDOW = ("window_left", "window_right")
DROPOUT = BY_NAME["dropout"].operands
MANY = 1 << 20  # keys of a long call
LONG, FULL, SHORT = (128, 128, True, 2, None), (128, 128, False, 2, None), (64, 64, True, 3, None)


def with_features(base: Sm90Options, asked: Features) -> Sm90Options:
    """As `build_for` makes it of a build."""
    block_n = elementwise_keys(base, asked, MANY) if asked.elementwise else base.block_n
    return replace(base, features=asked, block_n=block_n)


def compiled(options: Sm90Options, form: str, **tensors: TensorSpec):
    """A build with operands for its features; `tensors`: other ones than `TENSORS`."""
    operands: list[TensorSpec | ScalarSpec] = []
    for name in options.features.operands:
        number = ScalarSpec("f32" if name == "softcap" else "i32")
        operands.append(number if name in NUMBERS else (TENSORS | tensors).get(name, COUNTS))
    if options.features.score_mod is not None:
        operands.append(TensorSpec("f32", 2, 4, True))
    arguments = (*specs(options, form, "bf16"), *operands)
    return compile_kernel(flash_attn_sm90, arguments, {"options": options}, "sm_90a", (options.threads, 1, 1))


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize(
    ("base", "form", "asked"),
    [
        (options_of(LONG), "dense", Features(("window_left", "softcap", "alibi_slopes", "sink"))),
        (options_of(FULL), "split", Features(("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx", *WINDOW))),
        (options_of(SHORT), "dense", Features(("softcap", "alibi_slopes"))),
        (options_of(SHORT), "packed", Features(score_mod=Mod.of(by_head))),
        (options_of(FULL), "dense", Features(mask_mod=Mod.of(stripes))),
        (replace(options_of(LONG), pack_gqa=8), "packed", Features(("seqused_kv", "window_left", "sink"))),
        (decode_options(128, 128, False, 8), "split", Features(("seqused_kv", "window_left", "alibi_slopes"))),
        (decode_options(64, 64, False, 8), "dense", Features(("window_left", "softcap", "sink"))),
        (options_of(LONG), "dense", Features(("attention_chunk",))),
        (options_of((144, 144, True, 3, None)), "dense", Features(("window_left", "sink"))),
        (options_of(LONG), "dense", Features(DROPOUT)),
        (options_of(FULL), "packed", Features(DROPOUT)),
        (options_of(SHORT), "dense", Features(("softcap", *DROPOUT))),
        (decode_options(128, 128, False), "split", Features(("window_left", *DROPOUT))),
        (decode_options(128, 128, False, 8), "split", Features(("seqused_kv", "window_left", "attention_chunk"))),
        (replace(decode_options(128, 128, False, 8), combines=True), "split", Features(("seqused_kv", "sink"))),
    ],
    ids=lambda x: "+".join(x.operands) or "function" if isinstance(x, Features) else None,
)
def test_builds_with_features_are_accepted_as_they_are_meant(base, form, asked, tmp_path):
    options = with_features(base, asked)
    # the producer, a single thread, has 32 or 40 registers: lengths and windows at once cost it two more
    stack = 8 if "window_left" in asked.operands and base.consumers > 1 else 0
    accept(compiled(options, form), options, tmp_path, stack)


# the hungriest that is alone, for each row; where there is a causal build, the full one is it without a loop
ALONE = {
    "bias": (Features(("bias",)), {"bias": TensorSpec("f32", 4, 16, True)}),
    "function": (Features(score_mod=Mod.of(by_head)), {}),
}
ROWS_ALONE = [
    (kind, row)
    for kind, rows in KEYS_ALONE.items()
    for row in rows
    if row[4] is None and (row[2] or (*row[:2], True, *row[3:]) not in rows)
]


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize(("kind", "row"), ROWS_ALONE, ids=str)
def test_wide_tiles_are_accepted_too(kind, row, tmp_path):
    asked, tensors = ALONE[kind]
    options = with_features(options_of(row), asked)
    assert options.block_n == KEYS_ALONE[kind][row] > 64
    accept(compiled(options, "dense", **tensors), options, tmp_path)


# of a thread's 32 scores of 64 keys: with whole tiles in runs, and, for keys past the end, element by element
BIASES = {
    "bf16, aligned": (TensorSpec("bf16", 4, 16, True), {"v2.b16": 16, "b16": 32}),
    "bf16, 4 bytes": (TensorSpec("bf16", 4, 4, True), {"v2.b16": 16, "b16": 32}),
    "f16, unaligned": (TensorSpec("f16", 4, 2, True), {"b16": 64}),
    "f32, aligned": (TensorSpec("f32", 4, 16, True), {"v2.b32": 16, "b32": 32}),
    "f32, unaligned": (TensorSpec("f32", 4, 4, True), {"b32": 64}),
    "bf16, any stride": (TensorSpec("bf16", 4, 2, False), {"b16": 32}),
    "bf16 of keys": (TensorSpec("bf16", 3, 16, True), {"v2.b16": 8, "b16": 16}),
    "f32 of keys": (TensorSpec("f32", 3, 16, True), {"v2.b32": 8, "b32": 16}),
}


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_is_loaded_in_runs_before_the_products(bias, tmp_path):
    spec, per_tile = BIASES[bias]
    options = with_features(options_of(LONG), Features(("bias",)))
    artefact = compiled(options, "dense", bias=spec)
    accept(artefact, options, tmp_path)
    loads = re.findall(r"ld\.global\.((?:v2\.)?b\d+)", artefact.isa)
    # a tile's first scores, the loops along the diagonal and below it, the next tile's first scores
    assert Counter(loads) == {kind: 4 * count * options.block_n // 64 for kind, count in per_tile.items()}
    assert artefact.isa.index("ld.global.") < artefact.isa.index("wgmma.mma_async")


def test_whole_tiles_of_a_window_have_no_mask():
    """Three loops: along the diagonal, inside of the window, along its left edge."""
    plain, windowed = (
        compiled(with_features(options_of(LONG), Features(names)), "dense").isa for names in ((), ("window_left",))
    )
    commits = [isa.count("wgmma.commit_group.sync.aligned") for isa in (plain, windowed)]
    assert commits == [8, 10]


@pytest.mark.parametrize("base", [LONG, SHORT], ids=str)
def test_dropout_compares_four_weights_and_masks_two_at_a_time(base):
    """The threshold's product is a compare's: once a word of four weights, and no test of one weight."""
    options = with_features(options_of(base), Features(DROPOUT))
    plain, dropping = (
        compiled(replace(options, features=asked), "dense").isa for asked in (Features(), options.features)
    )
    # a tile's first scores, the loops along the diagonal and below it, the next tile's first scores
    # a mask of each pair, and two swaps of lanes for each word of decisions, of which there is one in 64 keys
    masks, swaps = options.block_n // 4, 2 * -(-options.block_n // 64)
    assert dropping.count("prmt.b32") == 4 * (masks + swaps)
    assert dropping.count("selp") - plain.count("selp") < 4 * options.block_n // 2
    assert dropping.count("setp") - plain.count("setp") < 16


def listed(*names: str, size=(128, 128), **functions) -> Features:
    """A call's features with a block mask."""
    operands = tuple(name for name in OPERANDS if name in (*names, *LISTS))
    return Features(operands, mask_mod=Mod.of(stripes), block_size=size, **functions)


def with_lists(dims: tuple[int, int], causal: bool, seq_len: int, asked: Features) -> Sm90Options:
    """The build for a long or a short call with a block mask."""
    shape = {"head_dim": dims[0], "head_dim_v": dims[1], "causal": causal, "static_features": asked}
    return build_for(request(seq_len, 4096, 16, 16, 4, **shape), UNITS)[0]


@pytest.mark.sample(2)
@needs_ptxas
@pytest.mark.parametrize(
    ("dims", "causal", "seq_len", "form", "asked"),
    [
        ((64, 64), False, 4096, "dense", listed()),
        ((64, 64), True, 4096, "dense", listed(size=(64, 64))),
        ((96, 96), False, 4096, "dense", listed()),
        ((128, 128), False, 4096, "dense", listed()),
        (
            (128, 128),
            True,
            4096,
            "split",
            listed("seqused_q", "seqused_kv", "cache_leftpad", "kv_batch_idx", *WINDOW[:1]),
        ),
        ((128, 128), False, 4096, "dense", listed("softcap", "alibi_slopes", "sink")),
        ((128, 128), False, 4096, "dense", listed("bias")),
        ((128, 128), False, 4096, "dense", listed(score_mod=Mod.of(by_head))),
        ((128, 128), False, 40, "split", listed("seqused_kv", *WINDOW)),
        ((192, 128), False, 4096, "dense", listed()),
        ((192, 192), True, 4096, "dense", listed()),
        ((256, 256), False, 4096, "dense", listed()),
        ((256, 256), False, 40, "split", listed()),
    ],
    ids=lambda x: "+".join(x.operands[:3]) if isinstance(x, Features) else None,
)
def test_builds_with_block_masks_are_accepted_as_they_are_meant(dims, causal, seq_len, form, asked, tmp_path):
    options = with_lists(dims, causal, seq_len, asked)
    accept(compiled(options, form), options, tmp_path)


def test_a_block_mask_has_one_loop_and_calls_its_function_behind_a_branch():
    """Its tiles test whether they need a mask; those that do not are of the same products as without a mask."""
    options = with_lists((128, 128), True, 4096, listed())
    plain, lists = (compiled(o, "dense").isa for o in (replace(options, features=Features()), options))
    # first tile, loops, next tile, last tile: the plain build has a loop along the diagonal too
    assert [isa.count("wgmma.commit_group.sync.aligned") for isa in (plain, lists)] == [8, 6]
    # the function's remainders by 3 are multiplications that no other code has
    assert plain.count("mul.hi") < lists.count("mul.hi")
