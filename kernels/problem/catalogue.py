"""What a call may ask of attention beyond softmax(scale * Q K^T) V: one record a feature.

Whatever lists features follows from `FEATURES`: what kernels say that they do, what a call that none does is told,
the order of a kernel's operands, the checks of a call, what is done to a tile of scores, and the schema of torch's
operations. A feature beside these takes a record here and its keyword in `flydsl_flash_attn_func` (CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import fly
from fly.errors import ArgumentError, ArgumentTypeError

from ..arguments.callers import arg, written
from . import scores
from .dropout import threshold
from .mods import Mod, dependencies
from .scores import Place, ScoreTile

if TYPE_CHECKING:
    from ..arguments.checks import Checks
    from ..call.features import CallArguments
    from .features import BoundFeatures

NO_WINDOW = (-1, -1)
SOFTCAPS = (2.0**-100, 2.0**127)  # what kernels are given
SPLIT_UNIT = 128  # keys: the tiles of every build for `split_keys` divide it
WIDE_SOFTCAP = 256.0  # from here on, see `Features.wide_softcap`
DESCALES = ("q_descale", "k_descale", "v_descale")
VECTOR_LAYOUTS = ("vectorized", "paged_attention")  # of pages, where `kv_cache_layout` is none of `PLAIN_LAYOUTS`
PLAIN_LAYOUTS = ("linear", "linear3d")
VECTOR_STEP = 8  # keys of a page, and columns, that kernels find in one piece there
FP8_SUMS = ("float32", "fast")  # how products of 8-bit inputs add up: of `fp8_accumulate`, the first by default
Found = Mapping[str, Any]


@dataclass(frozen=True)
class Feature:
    """One feature.

    `name`: as kernels and tables of builds know it; `what`, `instead`: how a refusal calls it, and what a caller can
    do instead (`arg` marks arguments). `everywhere`: the generic kernel does it on every target.

    `keywords`: its keyword arguments of `flydsl_flash_attn_func`, and their types in the schema of torch's
    operations, "" for what these cannot take. `flash_attention`: those that FlashAttention-3 and -4 have, by their
    names.

    `operands`: what kernels get for it, in order; `numbers`: those that are no tensors. `implied`: operands that
    another one, or another feature, brings along, which are not asked for then. `check`: a call's keyword arguments,
    checked, as operands and fields of `Features` by name; nothing where it is not asked for.

    `load`: an operand that is one number for a head, from its tensor, once before the loop over keys. `modify`: a
    tile of scores with the operand. `steepness`: where it takes scores that are not scaled yet, and scales them, its
    derivative with respect to scaled ones, by hand. `differentiable`: its operands have gradients.
    """

    name: str
    what: str
    instead: str
    everywhere: bool = True
    keywords: Mapping[str, str] = field(default_factory=dict)
    flash_attention: Mapping[str, str] = field(default_factory=dict)
    operands: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    implied: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[CallArguments], Found] | None = None
    load: Callable[[fly.Tensor, Place], fly.Value | fly.RowVector] | None = None
    modify: Callable[[BoundFeatures, fly.Fragment, Any, ScoreTile], fly.Fragment] | None = None
    steepness: Callable[[BoundFeatures, fly.Fragment, Any, ScoreTile], fly.Fragment] | None = None
    differentiable: bool = False

    @property
    def raw(self) -> bool:
        """Whether `modify` takes scores that are not scaled yet."""
        return self.steepness is not None

    @property
    def told(self) -> tuple[str, str]:
        """What it is called, and what to do instead."""
        return self.what, self.instead

    def used_by(self, found: Found) -> bool:
        """Whether a call asks for it, given what all checks found."""
        told = (n for n in self.operands if n in found and self.implied.get(n) not in found)
        return any(told) or found.get(self.name) is not None


def _lengths(call: CallArguments) -> Found:
    names = (name for name in ("seqused_q", "seqused_kv") if call[name] is not None)
    return {name: call.counts(name) for name in names}


def _of_cache(name: str, call: CallArguments) -> Found:
    if call[name] is None:
        return {}
    counts = call.counts(name)
    if call["cu_seqlens_kv"] is not None and call["block_table"] is None:
        call.checks.fail(
            f"{arg(name)} is for (B, S, Hkv, D) keys; packed ones have {arg.cu_seqlens_kv} and {arg.seqused_kv}"
        )
    return {name: counts}


def _pages(call: CallArguments) -> Found:
    table, fail = call["block_table"], call.checks.fail
    if table is None:
        return {}
    if call["kv_batch_idx"] is None and table.shape[0] != call.batch:
        fail(f"{arg.block_table} must have a row for each of {call.batch} sequences, got shape {tuple(table.shape)}")
    if call["seqused_kv"] is None and call["cu_seqlens_kv"] is None:
        fail(f"{arg.block_table} needs the sequences' lengths: pass {arg.seqused_kv}, (B,) int32")
    if call["cu_seqlens_kv"] is not None and call["cu_seqlens_q"] is None:
        fail(
            f"{arg.cu_seqlens_kv} with {arg.block_table} is for packed queries ({arg.cu_seqlens_q}); pass "
            f"{arg.seqused_kv}, (B,) int32"
        )
    if not call.k.shape[1]:
        fail(f"pages of {arg.k} and {arg.v} must have at least one key, got shape {tuple(call.k.shape)}")
    return {"block_table": table}


def _layout(call: CallArguments) -> Found:
    """Pages are of nominal shape here: `cache.layouts.in_pages` has checked what was given."""
    layout = call["kv_cache_layout"]
    if layout not in VECTOR_LAYOUTS:
        return {}
    if call["cache_leftpad"] is not None:
        call.checks.fail(
            f"{arg.cache_leftpad} is not for kv_cache_layout={layout!r}, whose pieces of {VECTOR_STEP} keys start "
            "with a page: pass pages that start with a sequence's first key"
        )
    return {"kv_cache_layout": layout}


def _window(call: CallArguments) -> Found:
    size, fail = call["window_size"], call.checks.fail
    good = isinstance(size, Sequence) and len(size) == 2
    if not good or any(isinstance(side, bool) or not isinstance(side, int) for side in size):
        fail(f"{arg.window_size} must be two ints (left, right), got {written(size)}", ArgumentTypeError)
    for side in size:
        if not -1 <= side < 2**31:
            wanted = "sides from 0 to 2**31 - 1, or -1 for no limit"
            fail(f"{arg.window_size} must have {wanted}, got {written(tuple(size))}")
    left, right = size
    # no further than there are keys to the left and queries to the right: positions plus a side stay below 2**31
    sides = {"window_left": min(left, call.keys), "window_right": min(right, call.queries)}
    return {name: side for name, side in sides.items() if side >= 0 and not (name == "window_right" and call.causal)}


def _chunk(call: CallArguments) -> Found:
    chunk = call["attention_chunk"]
    call.checks.whole("attention_chunk", chunk, 0, 2**31 - 1)
    return {"attention_chunk": chunk} if chunk else {}


def _split_keys(call: CallArguments) -> Found:
    keys, fail = call["split_keys"], call.checks.fail
    call.checks.whole("split_keys", keys, 0, 2**31 - 1)
    if not keys:
        return {}
    if keys % SPLIT_UNIT:
        fail(f"{arg.split_keys} must be a multiple of {SPLIT_UNIT}, which every kernel's tiles divide, got {keys}")
    if call["num_kv_splits"] > 1:
        fail(f"{arg.split_keys} says where keys are split, and {arg.num_kv_splits} how often: pass one of the two")
    if call["block_mask"] is not None:
        fail(
            f"{arg.split_keys} is not for a block_mask, whose lists have no such parts: pass its mask_mod as mask_mod"
        )
    if call["dualwave_swp_lazy_rescale"]:
        wanted = "leave dualwave_swp_lazy_rescale out: it rescales rows together"
        fail(f"{arg.split_keys} makes rows independent of each other: {wanted}")
    return {"split_keys": keys}


def _softcap(call: CallArguments) -> Found:
    accepted = "a finite positive number, or 0 for none"
    cap = call.checks.number("softcap", call["softcap"], accepted, lambda cap: cap >= 0)
    if not cap:
        return {}
    # of float32 scores, larger caps leave all as they are, and smaller ones none
    cap = min(max(cap, SOFTCAPS[0]), SOFTCAPS[1])
    return {"softcap": cap, "wide_softcap": cap >= WIDE_SOFTCAP}


def _slopes(call: CallArguments) -> Found:
    if call["alibi_slopes"] is None:
        return {}
    slopes, batch, heads = call.single("alibi_slopes"), call.batch, call.heads
    if slopes.shape not in ((heads,), (batch, heads)):
        call.checks.fail(
            f"{arg.alibi_slopes} must have shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}"
        )
    call.checks.unit_last_stride("alibi_slopes", slopes)
    return {"alibi_slopes": slopes.expand(batch, heads)}


def _bias(call: CallArguments) -> Found:
    """(B, H, Sq, Skv), or (B, H, Skv) where it is not by query."""
    if call["bias"] is None:
        return {}
    bias, fail = call.floats("bias"), call.checks.fail
    if call.packed:
        fail(f"{arg.bias} is for (B, S, H, D) tensors; for packed sequences pass a score_mod with aux_tensors")
    shape = (call.batch, call.heads, call.queries, call.keys)
    if bias.dim() > 4 or any(n not in (1, m) for n, m in zip(reversed(bias.shape), reversed(shape))):
        fail(f"{arg.bias} must broadcast to (B, H, Sq, Skv) = {shape}, got shape {tuple(bias.shape)}")
    if bias.dim() < 2 or bias.shape[-2] == 1:
        # the kernels load what is not by query once for all rows
        batch, heads, _, keys = shape
        return {"bias": (bias if bias.dim() < 2 else bias.squeeze(-2)).expand(batch, heads, keys)}
    return {"bias": bias.expand(shape)}


def _sink(call: CallArguments) -> Found:
    if call["sink"] is None:
        return {}
    sink = call.floats("sink")
    if sink.shape != (call.heads,):
        wanted = f"one entry a query head, shape ({call.heads},)"
        call.checks.fail(f"{arg.sink} must have {wanted}, got {tuple(sink.shape)}")
    call.checks.unit_last_stride("sink", sink)
    return {"sink": sink}


def probability_of(checks: Checks, dropout_p: Any) -> float:
    """A call's `dropout_p`, if it is a probability."""
    return checks.number("dropout_p", dropout_p, "a probability from 0 up to 1", lambda p: 0 <= p < 1)


def _dropout(call: CallArguments) -> Found:
    probability = probability_of(call.checks, call["dropout_p"])
    state = call.random_state("rng_state")
    dropped = threshold(probability, call.checks.function)
    return {"rng_state": state, "dropped": dropped, "query_heads": call.heads} if dropped else {}


def _fp8_cache(call: CallArguments) -> Found:
    return {"fp8_cache": True} if call.fp8_cache else {}


def _descales(call: CallArguments) -> Found:
    found = {}
    for name in DESCALES:
        if call[name] is None:
            continue
        scales, shape = call.single(name), (call.batch, call.kv_heads)
        by_key = tuple(call.k.shape[:-1]) if call.fp8_cache and name != "q_descale" else None
        if call.fp8_cache and name == "q_descale":
            call.checks.fail(f"{arg(name)} is for {arg.q} of 8 bits, got {arg.q} of {call.q.dtype}: leave it out")
        if scales.shape in ((), (1,), (call.kv_heads,), shape):
            found[name] = scales.expand(shape)
        elif scales.shape == by_key:
            # a batch of one is what packed keys are
            found[name] = scales if scales.dim() == 3 else scales.unsqueeze(0)
        else:
            wanted = f"shape (), (1,), (Hkv,) or (B, Hkv) = {shape}"
            wanted += "" if by_key is None else f", or one for each key and head, {arg(name[0])}'s {by_key}"
            call.checks.fail(f"{arg(name)} must have {wanted}, got {tuple(scales.shape)}")
    return found


def _fp8_sums(call: CallArguments) -> Found:
    how = call["fp8_accumulate"]
    if not isinstance(how, str) or how not in FP8_SUMS:
        accepted = " or ".join(map(repr, FP8_SUMS))
        error = ArgumentError if isinstance(how, str) else ArgumentTypeError
        call.checks.fail(f"{arg.fp8_accumulate} must be {accepted}, got {written(how)}", error)
    return {} if how == FP8_SUMS[0] else {"fp8_accumulate": how}


def _function(name: str, call: CallArguments) -> Found:
    function = call[name]
    return {} if function is None else {name: Mod.of(call.function(name, function, dependencies))}


def _score_mod(call: CallArguments) -> Found:
    found = {**_function("score_mod", call), **_function("score_mod_bwd", call)}
    if [*found] == ["score_mod_bwd"]:
        call.checks.fail("score_mod_bwd is the derivative of a score_mod, and there is none: pass both or neither")
    return found


BLOCKS = ("block_counts", "block_indices", "whole_block_counts", "whole_block_indices")


def _blocks(call: CallArguments) -> Found:
    from .block_mask import BlockMask  # torch's, which those do not load that only read this table

    mask, fail = call["block_mask"], call.checks.fail
    if mask is None:
        return {}
    if call["block_table"] is not None:
        fail("block_mask is for k and v without block_table: for keys in pages pass its mask_mod as mask_mod")
    if not isinstance(mask, BlockMask):
        hint = "; pass fly_attention.BlockMask.of(it)" if type(mask).__name__ == "BlockMask" else ""
        fail(f"block_mask must be a fly_attention.BlockMask, got {type(mask).__name__}{hint}", ArgumentTypeError)
    if call.packed:
        fail("block_mask is for (B, S, H, D) tensors; for packed sequences pass its mask_mod as mask_mod")
    if call["mask_mod"] is not None:
        fail("block_mask has a mask_mod of its own: leave mask_mod out, or build a block mask of both")
    lists = mask.check(call.batch, call.heads, (call.queries, call.k.shape[-3]), call.device)
    found: dict[str, Any] = dict(zip(BLOCKS, lists)) | {"block_size": tuple(mask.BLOCK_SIZE)}
    if mask.mask_mod is not None:
        found["mask_mod"] = Mod.of(call.function("block_mask.mask_mod", mask.mask_mod, dependencies))
    return found


# In the order in which kernels take operands, and in which scores are modified.
FEATURES = (
    Feature(
        "packed",
        f"packed sequences ({arg('cu_seqlens_q, cu_seqlens_kv')})",
        "call it once per sequence with (1, S, H, D) tensors",
    ),
    Feature("split_kv", f"split keys ({arg.num_kv_splits} > 1)", f"{arg.num_kv_splits}=1 gives the same result"),
    Feature(
        "split_keys",
        f"parts of a fixed number of keys ({arg.split_keys})",
        f"without it, a row's last bits may depend on its batch; {arg.num_kv_splits}=1 does not split keys",
        keywords={"split_keys": "SymInt"},
        flash_attention={"split_keys": "split_keys"},
        operands=("split_keys",),
        numbers=("split_keys",),
        check=_split_keys,
    ),
    Feature("debug_counts", "counting of rescales (debug_counts)", "leave debug_counts out", everywhere=False),
    Feature(
        "seqused",
        f"lengths in use ({arg('seqused_q, seqused_kv')})",
        "cut the sequences, or pack them with cu_seqlens",
        keywords={"seqused_q": "Tensor?", "seqused_kv": "Tensor?"},
        flash_attention={"seqused_q": "seqused_q", "seqused_k": "seqused_kv"},
        operands=("seqused_q", "seqused_kv"),
        implied={"seqused_kv": "block_table"},
        check=_lengths,
    ),
    Feature(
        "cache_leftpad",
        f"padding at the left ({arg.cache_leftpad})",
        f"cut it off {arg.k} and {arg.v}, or pack sequences with cu_seqlens",
        keywords={"cache_leftpad": "Tensor?"},
        operands=("cache_leftpad",),
        check=partial(_of_cache, "cache_leftpad"),
    ),
    Feature(
        "kv_batch_idx",
        f"entries of a cache ({arg.kv_batch_idx})",
        f"pass {arg.k}[{arg.kv_batch_idx}] and {arg.v}[{arg.kv_batch_idx}]",
        keywords={"kv_batch_idx": "Tensor?"},
        operands=("kv_batch_idx",),
        check=partial(_of_cache, "kv_batch_idx"),
    ),
    Feature(
        "paged",
        f"keys in pages ({arg.block_table})",
        f"gather a sequence's pages into {arg.k} and {arg.v}",
        keywords={"block_table": "Tensor?"},
        flash_attention={"page_table": "block_table"},
        operands=("block_table",),
        check=_pages,
    ),
    Feature(
        "kv_cache_layout",
        f"pages in ROCm's vectorised layouts ({arg.kv_cache_layout})",
        f"allocate {arg.k} and {arg.v} as (pages, page_size, Hkv, D)",
        everywhere=False,
        keywords={"kv_cache_layout": "str"},
        check=_layout,
    ),
    Feature(
        "window",
        f"sliding windows ({arg.window_size})",
        f"a {arg.mask_mod} gives the same result",
        keywords={"window_size": "SymInt[]?"},
        operands=("window_left", "window_right"),
        numbers=("window_left", "window_right"),
        check=_window,
    ),
    Feature(
        "attention_chunk",
        f"chunks of keys ({arg.attention_chunk})",
        f"a {arg.mask_mod} gives the same result",
        keywords={"attention_chunk": "SymInt"},
        flash_attention={"attention_chunk": "attention_chunk"},
        operands=("attention_chunk",),
        numbers=("attention_chunk",),
        check=_chunk,
    ),
    Feature(
        "softcap",
        f"{arg.softcap}",
        f"a {arg.score_mod} gives the same result",
        keywords={"softcap": "float"},
        operands=("softcap",),
        numbers=("softcap",),
        check=_softcap,
        modify=lambda given, tile, cap, at: scores.cap(tile, cap, at, wide=given.features.wide_softcap),
        steepness=lambda given, tile, cap, at: scores.cap_steepness(tile, cap, at, wide=given.features.wide_softcap),
    ),
    Feature(
        "alibi",
        f"ALiBi ({arg.alibi_slopes})",
        f"a {arg.score_mod} gives the same result",
        keywords={"alibi_slopes": "Tensor?"},
        operands=("alibi_slopes",),
        check=_slopes,
        load=lambda slopes, place: scores.of_head(place, lambda head: slopes.load(place.batch, head).to(fly.f32)),
        modify=lambda given, tile, slope, at: scores.add_distances(tile, slope, at),
    ),
    Feature(
        "bias",
        f"additive {arg.bias}",
        f"a {arg.score_mod} with aux_tensors gives the same result",
        keywords={"bias": "Tensor?"},
        operands=("bias",),
        check=_bias,
        modify=lambda given, tile, bias, at: scores.add_bias(tile, bias, at, alone=given.features.only_bias),
        differentiable=True,
    ),
    Feature(
        "sink",
        f"sinks ({arg.sink})",
        f"rescale the output by sigmoid(lse - {arg.sink})",
        keywords={"sink": "Tensor?"},
        flash_attention={"learnable_sink": "sink"},
        operands=("sink",),
        check=_sink,
        differentiable=True,
    ),
    Feature(
        "dropout",
        f"dropout ({arg.dropout_p})",
        f"{arg.dropout_p}=0.0 is what inference does",
        keywords={"dropout_p": "float", "rng_state": "Tensor?"},
        operands=("rng_state", "dropped", "query_heads"),
        numbers=("dropped", "query_heads"),
        check=_dropout,
    ),
    Feature(
        "block_mask",
        "block-sparse masks (block_mask)",
        "its mask_mod as mask_mod gives the same result",
        keywords={"block_mask": ""},
        operands=BLOCKS,
        check=_blocks,
    ),
    Feature(
        "fp8_cache",
        f"8-bit {arg('k, v')} with 16-bit {arg.q}",
        f"convert {arg.k} and {arg.v} to {arg.q}'s dtype",
        everywhere=False,
        check=_fp8_cache,
    ),
    Feature(
        "descale",
        f"scales of 8-bit inputs ({arg('q_descale, k_descale, v_descale')})",
        f"{arg.softmax_scale} takes a factor of the scores, and out can be multiplied",
        everywhere=False,
        keywords=dict.fromkeys(DESCALES, "Tensor?"),
        flash_attention={name: name for name in DESCALES},
        operands=DESCALES,
        implied={"k_descale": "fp8_cache", "v_descale": "fp8_cache"},
        check=_descales,
    ),
    Feature(
        "fp8_accumulate",
        f"sums of 8-bit products with fewer bits ({arg.fp8_accumulate}='fast')",
        f"{arg.fp8_accumulate}='float32', the default, is at least as exact",
        everywhere=False,
        keywords={"fp8_accumulate": "str"},
        flash_attention={"fp8_accumulate": "fp8_accumulate"},
        check=_fp8_sums,
    ),
    Feature(
        "score_mod",
        "score_mod",
        "softcap, alibi_slopes and bias cover common cases",
        keywords={"score_mod": "", "score_mod_bwd": ""},
        check=_score_mod,
    ),
    Feature(
        "mask_mod",
        "mask_mod",
        "window_size and bias cover common cases",
        keywords={"mask_mod": ""},
        check=partial(_function, "mask_mod"),
    ),
)
BY_NAME = {feature.name: feature for feature in FEATURES}
EVERYWHERE = tuple(feature.name for feature in FEATURES if feature.everywhere)
# The operands that kernels know, in the order in which they take them. Auxiliary tensors come last.
OPERANDS = tuple(name for feature in FEATURES for name in feature.operands)
NUMBERS = tuple(name for feature in FEATURES for name in feature.numbers)
DIFFERENTIABLE = tuple(name for feature in FEATURES if feature.differentiable for name in feature.operands)
MODIFIERS = tuple(feature for feature in FEATURES if feature.modify is not None)
