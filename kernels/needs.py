"""Conditions of kernels on calls, and calls that a kernel leaves to others: what rows of `dispatch` are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .arguments.callers import arg, plain
from .problem.catalogue import BY_NAME
from .problem.contract import Request


@dataclass(frozen=True)
class Need:
    """A condition of a kernel on the call: in words, and as a function that says why a request fails it, or None.

    `by_length`: whether that depends on how many keys the longest sequence has, which is another one's business
    where results are batch-invariant (`split_keys`): such a call is refused then, and no other kernel serves it.
    """

    what: str
    refuses: Callable[[Request], str | None]
    by_length: bool = False


@dataclass(frozen=True)
class Preference:
    """Calls that a kernel can serve and a later one of the table serves faster: in words, and as a function."""

    what: str
    yields: Callable[[Request], bool]


def aligned(bytes_: int) -> Need:
    """Addresses and strides of q, k, v and out are multiples of `bytes_`."""

    def refuses(request: Request) -> str | None:
        if request.alignment >= bytes_:
            return None
        return (
            f"takes tensors whose addresses and strides are multiples of {bytes_} bytes, not of {request.alignment}: "
            "make them contiguous, from an allocation of their own"
        )

    return Need(f"{bytes_}-byte aligned tensors", refuses)


def keys_within(bytes_: int, ahead: int = 0) -> Need:
    """One sequence's K and V, and `ahead` rows past their end, span less than `bytes_` in memory."""

    def refuses(request: Request) -> str | None:
        most = bytes_ // request.kv_pitch - ahead if request.kv_pitch else request.seq_len_kv
        if request.seq_len_kv <= most:
            return None
        return (
            f"reaches {most} keys whose rows are {request.kv_pitch} bytes apart, not {request.seq_len_kv}: make "
            f"{arg.k} and {arg.v} contiguous"
        )

    return Need(f"a sequence's K and V within {bytes_ >> 20} MiB", refuses, by_length=True)


def page_within(bytes_: int, rows: int) -> Need:
    """A page of K or V, and `rows` rows if it has fewer, span less than `bytes_` in memory."""

    def refuses(request: Request) -> str | None:
        most = bytes_ // max(request.page_size or 0, rows)
        if request.kv_pitch < most:
            return None
        return (
            f"takes keys less than {most} bytes apart in pages of {request.page_size}, not {request.kv_pitch}: make "
            f"{arg.k} and {arg.v} contiguous"
        )

    return Need(f"a page within {bytes_ >> 20} MiB", refuses)


def pages_in_runs(rows: int) -> Need:
    """Pages have a power of two of at least `rows` keys, and sequences begin where their first page does."""

    def refuses(request: Request) -> str | None:
        size = request.page_size
        if size is None:
            return None
        if size < rows or size & (size - 1):
            return (
                f"takes pages of a power of two of at least {rows} keys, not of {size}: allocate such pages, or "
                f"gather a sequence's pages into {arg.k} and {arg.v}"
            )
        if "cache_leftpad" in request.features:
            return (
                f"does not do padding at the left of pages ({arg.cache_leftpad} with {arg.block_table}): pass "
                "pages that start with a sequence's first key"
            )
        return None

    return Need(f"pages of a power of two of at least {rows} keys, without padding at the left", refuses)


def unless_paged(need: Need, paged: Need) -> Need:
    """`paged` is for keys in pages, `need` for others."""
    return Need(
        f"{need.what}; {paged.what}",
        lambda request: (paged if "paged" in request.features else need).refuses(request),
        by_length=need.by_length,
    )


def unless_wide_fp8(need: Need, wide: Need) -> Need:
    """`wide` is for head dimensions above 128 and for `fp8_accumulate="fast"`."""

    def refuses(request: Request) -> str | None:
        is_wide = request.head_dim > 128 or request.static_features.fp8_accumulate is not None
        return (wide if is_wide else need).refuses(request)

    return Need(
        f"{need.what} ({wide.what} at head_dims above 128 and with fp8_accumulate='fast')",
        refuses,
        by_length=need.by_length,
    )


def unless_filled(need: Need, filled: Need) -> Need:
    """`filled` is for head dimensions that are no multiples of 64: their rows get columns of zeros."""

    def refuses(request: Request) -> str | None:
        whole = request.head_dim % 64 == request.value_dim % 64 == 0
        return (need if whole else filled).refuses(request)

    return Need(
        f"{need.what} ({filled.what} at head_dims that are no multiples of 64)", refuses, by_length=need.by_length
    )


def mask_blocks(rows: int, keys: int) -> Need:
    """A block mask's blocks have multiples of `rows` queries and of `keys` keys."""

    def refuses(request: Request) -> str | None:
        size = request.static_features.block_size
        if size is None or not (size[0] % rows or size[1] % keys):
            return None
        return (
            f"takes a block_mask whose BLOCK_SIZE is a multiple of ({rows}, {keys}), not {size}: build it with such "
            "blocks, or pass its mask_mod as mask_mod"
        )

    return Need(f"blocks of a block_mask in multiples of ({rows}, {keys})", refuses)


def only(feature: str) -> Need:
    """A kernel for calls that ask for `feature` alone; another row serves the others."""
    what, _ = BY_NAME[feature].told

    def refuses(request: Request) -> str | None:
        return None if feature in request.features else f"is for {what} alone: another kernel serves this call"

    return Need(plain(what), refuses)


# How many blocks of 256 queries, one on each of MI300X's 304 compute units, are slower than blocks of 128, three on
# each, by the most keys of a sequence. From the timing model: docs/notebook.md, "Short causal calls on gfx942".
FILLED = {512: 3 * 304, 768: 5 * 304, 1024: 12 * 304}


def _short_triangles(request: Request) -> bool:
    if request.features or request.partial or request.cross_seqlen or not request.causal:
        return False
    blocks = request.batch * request.num_heads * -(-request.seq_len // 256)
    least = next((least for keys, least in FILLED.items() if request.seq_len_kv <= keys), None)
    return request.head_dim == request.value_dim == 64 and least is not None and blocks >= least


SHORT_TRIANGLES = Preference(
    "causal calls without features at head_dim 64, from "
    + ", ".join(f"{least} blocks of 256 queries on at {keys} keys" for keys, least in FILLED.items()),
    _short_triangles,
)


def _bias_of_wide_heads(request: Request) -> bool:
    return request.bias_by_query and min(request.head_dim, request.value_dim) > 96 and not request.deterministic


# docs/notebook.md, "A bias at head dimension 128: which of the two"
BIAS_OF_WIDE_HEADS = Preference(
    "calls with a bias of every score at head dimensions above 96, in any order of additions", _bias_of_wide_heads
)
