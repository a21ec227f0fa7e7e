"""The builds of the Hopper kernel: its static parameters, and which build serves which shape.

A row of the table `kernels/sm90/tiles.py` is a build: (head_dim, head_dim_v, causal, consumers, longest)
→ the other fields of `Sm90Options`, `cost` and `without`. Head dimensions and `longest` are the most that a row is
for, see `rows_for`; `longest`: of keys, None: any number; `cost`: the time of one of its tiles against that of the
shape's largest (1), which `cost.py` reckons with; `without`: features of calls that other rows serve better. Rows
without a note were measured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from fly.backends.nvvm import wgmma
from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.wgmma import PanelTile
from fly.errors import ShapeError

from ..problem.catalogue import SPLIT_UNIT
from ..problem.contract import Request
from ..problem.features import NO_FEATURES, Features
from ..work.tile_scheduler import automatic_splits
from .cost import KEYS_ALONE, NARROW, decode_splits, rounds
from .counters import MAX_ARRIVALS
from .sharing import TOGETHER, blocks_for
from .tiles import TILES

Key = tuple[Any, ...]
# When O takes a tile's maxima in: in every tile, or where they have grown a lot. The lazy ones differ in what ptxas
# makes of them: each row looks at its own growth, in raw scores or in log2 units, or all rows of a wave go together.
RESCALES = ("always", "rows", "scaled rows", "wave")
PACKS = (1, 2, 4, 8, 16, 32, 64)  # as many rows as a consumer has hold whole queries of any
DECODE_ROWS = 64  # of one consumer
OF_KEYS = "bias of keys"  # in a table of keys of tiles: where it has that, "bias" is of biases of every score


@dataclass(frozen=True)
class Sm90Options:
    """The static parameters of one build.

    `consumers` warpgroups of 64 query rows, tiles of `block_n` keys, `stages` slots in each of the K and V rings and
    `q_stages` in Q's; `ping_pong`: consumers take turns in starting products; `rescale`: one of `RESCALES`; `hold`: a
    tile's exponentials come before the wait for the last one's product. `pack_gqa` (a
    power of two) query heads that share a key head are rows of one tile: row r is query r // pack_gqa. `features`:
    what the operands are; `page_size`: of keys in pages; `combines`: the kernel puts split keys together itself;
    `takes_late`: blocks take a tile's number when they have loaded the last one's keys, and not when they begin to.
    `blocks` of a cluster have neighbouring tiles of queries, and each loads its part of every key tile's rows for all
    of them. A block mask's blocks divide into tiles.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    consumers: int
    block_n: int
    stages: int
    q_stages: int
    ping_pong: bool = True
    rescale: str = "rows"
    hold: bool = False
    pack_gqa: int = 1
    features: Features = NO_FEATURES
    page_size: int | None = None
    combines: bool = False
    takes_late: bool = False
    blocks: int = 1
    most_keys: ClassVar[int] = 256  # of a tile: columns that one product makes
    decoding: ClassVar[Mapping[int, Mapping[str, Any]]] = {}  # fields that decoding has of its own, by head dimension
    keys_alone: ClassVar[Mapping[str, Mapping[Key, int]]] = KEYS_ALONE  # keys of tiles, see `cost.py`

    def __post_init__(self) -> None:
        if self.blocks not in (1, TOGETHER):
            raise ShapeError(f"blocks is {self.blocks}; expected 1 or {TOGETHER}")
        if self.block_n > self.most_keys:
            raise ShapeError(f"block_n is {self.block_n}; expected at most {self.most_keys}")
        if self.rescale not in RESCALES:
            raise ShapeError(f"rescale is {self.rescale!r}; expected one of {', '.join(map(repr, RESCALES))}")
        if self.pack_gqa not in PACKS:
            raise ShapeError(f"pack_gqa is {self.pack_gqa}; expected one of {', '.join(map(str, PACKS))}")
        if self.combines and self.consumers > 1:
            raise ShapeError(f"consumers is {self.consumers}; expected 1 where the kernel combines split keys")
        if self.consumers not in (1, 2, 3):
            raise ShapeError(f"consumers is {self.consumers}; expected 1, 2 or 3")
        if (self.page_size is None) == ("block_table" in self.features.operands):
            raise ShapeError(f"page_size is {self.page_size}; expected one with block_table and only then")
        if self.block_n % self.key_rows or (self.page_size or self.key_rows) % self.key_rows:
            raise ShapeError(f"tiles of {self.block_n} keys do not divide into pages of {self.page_size}")
        if self.pack_gqa > 1 and self.features.drops:
            raise ShapeError(f"pack_gqa is {self.pack_gqa}; expected 1 with dropout, whose masks are by head")
        if self.blocks > 1 and (self.features != NO_FEATURES or self.block_n % (8 * self.blocks)):
            got = f"blocks is {self.blocks} with tiles of {self.block_n} keys and {self.features}"
            raise ShapeError(f"{got}; expected 1, or parts of a multiple of 8 keys and no features")
        if self.features.block_size is not None:
            rows, keys = self.features.block_size
            if self.pack_gqa > 1 or self.consumers == 3:
                got = f"pack_gqa is {self.pack_gqa} and consumers {self.consumers}"
                raise ShapeError(f"{got}; expected 1, and 1 or 2 with a block mask, whose lists are by head")
            if rows % self.block_m or keys % self.block_n:
                raise ShapeError(
                    f"blocks of {rows} x {keys} do not divide into tiles of {self.block_m} x {self.block_n}"
                )

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def decides_early(self) -> bool:
        """Whether dropout decides while scores are made alone: for that they have to take as long as it does."""
        return self.features.drops and self.consumers == 2 and 96 < self.head_dim <= 128

    @property
    def queries(self) -> int:
        """Queries of a tile; of every one, `pack_gqa` heads."""
        return self.block_m // self.pack_gqa

    @property
    def key_rows(self) -> int:
        """Keys that one bulk copy moves."""
        keys = self.block_n // self.blocks
        return keys if self.page_size is None else min(keys, self.page_size)

    @property
    def boxes(self) -> tuple[tuple[int, ...], ...]:
        """What one bulk copy moves of q, (B, S, H, D) or packed (B, S, H / pack_gqa, pack_gqa, D), of k and of v."""
        q, k, v = self.copied
        heads = (1,) if self.pack_gqa == 1 else (1, self.pack_gqa)
        return (1, self.queries, *heads, q.panel_columns), *((1, self.key_rows, 1, t.panel_columns) for t in (k, v))

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers + self.own_helpers)

    @property
    def tiles(self) -> tuple[PanelTile, PanelTile, PanelTile]:
        """Of Q, K and V in shared memory; columns past the head's are zero, as copies fill them.

        Rows of an odd number of 16 bytes begin inside 32-byte sectors: each of a row's lines then takes one more of
        the second-level cache, and K and V, which are read again and again, have few.
        """

        def keys(columns: int) -> PanelTile:
            return PanelTile.covering(self.block_n, columns, few_lines=columns % 16 > 0)

        return PanelTile.covering(self.block_m, self.head_dim), keys(self.head_dim), keys(self.head_dim_v)

    @property
    def raw_tile(self) -> PanelTile | None:
        """Of V as it arrives, where a warpgroup makes of it what consumers read."""
        return None

    @property
    def helpers(self) -> int:
        """How many roles make what consumers read of what arrives."""
        return int(self.raw_tile is not None)

    @property
    def helper_warps(self) -> int:
        """Warps of each of them."""
        return WARPGROUP // 32

    @property
    def own_helpers(self) -> int:
        """How many of them are warpgroups of their own; fewer warps are of the producer's warpgroup."""
        return self.helpers if self.helper_warps == WARPGROUP // 32 else 0

    @property
    def raw_key_tile(self) -> PanelTile | None:
        """The same of K."""
        return None

    @property
    def k_stages(self) -> int:
        """Slots of K that consumers read."""
        return self.stages

    @property
    def v_stages(self) -> int:
        """Slots of V that consumers read."""
        return self.stages

    @property
    def scales_by_key(self) -> bool:
        """Whether a warpgroup of the kernel leaves a scale for each key of a slot of K."""
        return False

    @property
    def copied(self) -> tuple[PanelTile, PanelTile, PanelTile]:
        """The tiles that bulk copies fill: of Q, and of K and V as they arrive."""
        q, k, v = self.tiles
        return q, self.raw_key_tile or k, self.raw_tile or v

    @property
    def tile_bytes(self) -> int:
        """Shared memory that the rings' slots take; barriers come on top."""
        return self.tiles[0].bytes * self.q_stages + self.key_bytes * self.stages + self.made_bytes

    @property
    def key_bytes(self) -> int:
        """Of a tile of keys and one of values, as they arrive."""
        _, k, v = self.copied
        return k.bytes + v.bytes

    @property
    def loaded_bytes(self) -> int:
        """Of these two in memory, without what is filled up."""
        return self.block_n * (self.head_dim + self.head_dim_v) * self.tiles[0].element_bytes

    @property
    def made_bytes(self) -> int:
        """Of the slots that a warpgroup of the kernel fills."""
        _, k, v = self.tiles
        made = 0 if self.raw_key_tile is None else k.bytes * self.k_stages
        return made + (0 if self.raw_tile is None else v.bytes * self.v_stages)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer and of a consumer: 512 a lane of the four schedulers in all."""
        if self.page_size is not None or self.features.block_size is not None:
            # the producer holds the pages of key tiles, or a list of tiles; beside three consumers it spills
            return {1: (96, 256), 2: (72, 216), 3: (32, 160)}[self.consumers]
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]


def rows_for(head_dim: int, head_dim_v: int, causal: bool, table: Iterable[Key] = TILES) -> list[Key]:
    """The rows for these head dimensions: of those with as many consumers, the ones for the next wider, in order.

    Not past the next wider that have a row for one consumer, which most shapes have.
    """
    rows = [key for key in table if key[0] >= head_dim and key[1] >= head_dim_v and key[2] == causal]
    next_wider = {consumers: min(key[:2] for key in rows if key[3] == consumers) for *_, consumers, _ in rows}
    return [key for key in rows if key[:2] == next_wider[key[3]] <= next_wider.get(1, key[:2])]


def _of_length(table: Mapping[Key, Any], keys: int) -> dict[Key, Any]:
    """Of rows with the same consumers, the first that is for so many keys, whatever features it is without."""
    first: dict[Key, Key] = {}
    for key in table:
        if key[-1] is None or keys <= key[-1]:
            first.setdefault(key[:-1], key)
    return {key: table[key] for key in first.values()}


def key_for(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    seq_len: int,
    seq_len_kv: int,
    slices: int,
    units: int,
    table: Mapping[Key, Mapping[str, Any]] = TILES,
    packing: Callable[[Key], int] = lambda key: 1,
) -> Key:
    """The row for a shape: `slices` (sequences x heads x splits) of `seq_len` queries, on `units` multiprocessors.

    Of rows with as many consumers the first that is long enough counts (`_of_length`); of those, the one that takes
    least time, with as many heads packed as `packing` says: what decides when the launch does not fill the device.

    Raises:
        LookupError: no row has these head dimensions.
    """
    rows = rows_for(head_dim, head_dim_v, causal, _of_length(table, seq_len_kv))
    if not rows:
        raise LookupError(f"the sm90 kernel's table has no {(head_dim, head_dim_v, causal)} for {seq_len_kv} keys")

    def time(key: Key) -> float:
        pack = packing(key)
        cost: float = table[key].get("cost", 1.0)
        tile = 64 * key[3] // pack, table[key]["block_n"]
        return cost * rounds(seq_len, seq_len_kv, tile, slices // pack, units, causal)

    return min(rows, key=time)


def options_of(
    key: Key, tiles: Mapping[str, Any] | None = None, kind: type[Sm90Options] = Sm90Options
) -> Sm90Options:
    """The build of a row, or of a row with other tiles, for the largest head dimensions that it is for."""
    head_dim, head_dim_v, causal, consumers, _ = key
    fields = {name: value for name, value in (tiles or TILES[key]).items() if name not in ("cost", "without")}
    return kind(head_dim, head_dim_v, causal, consumers, **fields)


def build_for(
    request: Request,
    units: int,
    typical: tuple[int, int] | None = None,
    table: Mapping[Key, Mapping[str, Any]] = TILES,
    kind: type[Sm90Options] = Sm90Options,
) -> tuple[Sm90Options, int]:
    """The build for a request on a device with `units` multiprocessors, of a `kind`, and the number of key splits.

    `typical`: (queries, keys) of packed sequences on average, which decide about packing heads: one long sequence
    among many short ones loses nothing by it.
    """
    asked = request.static_features
    rows = _of_length(table, 0 if asked.block_size is not None else request.seq_len_kv)
    own = rows_for(request.head_dim, request.value_dim, request.causal, rows)
    served = {key: rows[key] for key in own if _serves(key, rows[key], request)}
    options, splits = _plain_build_for(request, units, typical, served, kind)
    if asked.invariant:
        block_n = invariant_keys(request, table)
        options = replace(options, rescale=kind.rescale, combines=False)
    elif asked.elementwise:
        block_n = elementwise_keys(options, asked, request.seq_len_kv, request.bias_by_query)
    else:
        block_n = options.block_n
    if asked.block_size is not None:
        keys = asked.block_size[1]
        # the most keys that divide a block
        block_n = max(n for n in range(wgmma.K, block_n + 1, wgmma.K) if keys % n == 0)
    if asked.block_size is not None or options.takes_late:
        # as many tiles more in flight as that makes them smaller
        options = replace(options, stages=max(2, options.stages * options.block_n // block_n))
    if request.page_size is not None:
        block_n = _power_of_two(block_n)
    return replace(options, block_n=block_n, features=asked, page_size=request.page_size), splits


def _serves(key: Key, row: Mapping[str, Any], request: Request) -> bool:
    """Whether a row is for a request's features."""
    if request.static_features.block_size is not None:
        consumers: int = key[3]
        return consumers < 3 and request.static_features.block_size[0] % (64 * consumers) == 0
    if request.static_features.invariant and key[3] == 3 and row["block_n"] < SPLIT_UNIT:
        return False  # registers of three consumers take no wider tile
    return not set(row.get("without", ())).intersection(request.features)


def _plain_build_for(
    request: Request,
    units: int,
    typical: tuple[int, int] | None,
    table: Mapping[Key, Mapping[str, Any]],
    kind: type[Sm90Options],
) -> tuple[Sm90Options, int]:
    """The same without features and pages."""
    dims, lengths = (request.head_dim, request.value_dim), typical or (request.seq_len, request.seq_len_kv)
    group, keys = request.num_heads // request.num_kv_heads, request.seq_len_kv
    if request.static_features.block_size is not None:
        group, keys = 1, 0  # heads may have lists of their own, and lists are short
    if request.static_features.drops:
        group = 1  # and masks of dropout

    @cache
    def packing(key: Key) -> int:
        return packed_heads(group, *lengths, request.causal, options_of(key, table[key], kind))

    pack = packing(key_for(*dims, request.causal, _MANY, keys, 1, 1, table))
    heads, rows = request.batch * request.num_heads, request.seq_len * pack
    if rows <= DECODE_ROWS:
        # a sequence's only query sees all keys
        causal = request.causal and (request.seq_len > 1 or "packed" in request.features)
        options = decode_options(*dims, causal, pack, kind, request.page_size is not None, request.seq_len_kv)
        automatic = decode_splits(
            heads // pack, -(-request.seq_len_kv // options.block_n), options.loaded_bytes, units
        )
        splits = request.num_kv_splits or automatic
        combines = splits > 1 and heads // pack <= MAX_ARRIVALS and not request.partial
        return replace(options, combines=combines), splits
    blocks = -(-rows // 128) * (heads // pack)
    splits = request.num_kv_splits or automatic_splits(blocks, -(-request.seq_len_kv // 128), units)
    key = key_for(*dims, request.causal, request.seq_len, keys, heads * splits, units, table, packing)
    options = options_of(key, table[key], kind)
    options = replace(options, head_dim=dims[0], head_dim_v=dims[1], pack_gqa=packing(key))
    if kind is Sm90Options and splits == 1:
        slices = heads // options.pack_gqa
        options = replace(options, blocks=blocks_for(request, options.queries, slices, units))
    return options, splits


def keys_seen(request: Request, given: Mapping[str, Any]) -> int:
    """How many keys the queries of a sequence see together at most, with the request's operands `given` by name."""
    reaches = (given[name] for name in ("window_left", "attention_chunk") if name in request.static_features.operands)
    most: int = min((request.seq_len_kv, *(reach + request.seq_len for reach in reaches)))
    return most


# Keys of a tile where dropout is all that a call asks for, by consumers, and beside three of D=64 only: builds have
# registers for so many, and lanes share all calls for random numbers of a multiple of 64. Of D=64 96 took 0.95 of the
# time of 64, 128 took 1.06 (H200).
_DROPOUT = {1: 128, 2: 128, 3: 96}
# Keys of a tile of decoding where what is computed for every score alone needs registers: its one consumer has 256. A
# power of two: with a bias, 80 keys took 1.3 times as long as 64.
_ELEMENTWISE_DECODING = 128


def elementwise_keys(options: Sm90Options, asked: Features, keys: int, by_query: bool = True) -> int:
    """Keys of a tile of a build, made for a plain call of `keys` keys, with code for every score alone.

    Builds for decoding, which memory bounds, keep the number that they all have. `by_query`: a bias, if there is one,
    is of every score, and not of keys.
    """
    if options.takes_late:
        return _power_of_two(min(options.block_n, _ELEMENTWISE_DECODING))
    rows = rows_for(options.head_dim, options.head_dim_v, options.causal)
    build = next(row[:4] for row in rows if row[3] == options.consumers)
    what = asked.alone
    if what == "bias" and not by_query and OF_KEYS in options.keys_alone:
        what = OF_KEYS
    if what == "dropout" and (options.consumers < 3 or options.head_dim == 64):
        return min(options.block_n, _DROPOUT[options.consumers])
    alone = _of_length({} if what is None else options.keys_alone.get(what, {}), keys)
    return min(options.block_n, next((alone[key] for key in alone if key[:-1] == build), NARROW))


def invariant_keys(request: Request, table: Mapping[Key, Any]) -> int:
    """Keys of a tile where a row's result may not depend on the launch: as many in all builds of its dimensions.

    A row's sums depend on the tiles of keys that they are made in, and not on which rows are beside it, nor how many.
    """
    if request.static_features.elementwise:
        return NARROW
    dims = request.head_dim, request.value_dim
    rows = [key for causal in (False, True) for key in rows_for(*dims, causal, table)]
    wide = [key for key in rows if key[3] == 2] or rows
    return _power_of_two(min(SPLIT_UNIT, *(table[key]["block_n"] for key in wide)))


_MANY = 1 << 20  # query rows that fill any device


def visited(seq_len: int, seq_len_kv: int, causal: bool, queries: int, block_n: int) -> int:
    """Key tiles that all tiles of `queries` queries of one head, or packed set, visit together."""
    ends = (min(end, seq_len) for end in range(queries, seq_len + queries, queries))
    seen = (min(end + seq_len_kv - seq_len, seq_len_kv) if causal else seq_len_kv for end in ends)
    return sum(max(1, -(-keys // block_n)) for keys in seen)


def packed_heads(group: int, seq_len: int, seq_len_kv: int, causal: bool, options: Sm90Options) -> int:
    """How many of the `group` query heads of a key head to pack into a build's tiles.

    The largest power of two that divides the group, or 1 where tiles would then visit more than 31/32 of the key
    tiles, or 255/256 under a causal mask: long sequences fill their tiles anyway. Fewer queries a tile have fewer
    scores to hide too, which on an H200 saved more than the visits, up to the longest sequences tried, 32768.
    """
    pack = min(group & -group, PACKS[-1])
    block_m, block_n = options.block_m, options.block_n
    plain, packed = (visited(seq_len, seq_len_kv, causal, block_m // p, block_n) for p in (1, pack))
    return pack if packed <= plain * pack * (255 / 256 if causal else 31 / 32) else 1


def _power_of_two(keys: int) -> int:
    """The largest that is no larger: tiles of so many keys divide into pages, or pages into tiles."""
    return 1 << keys.bit_length() - 1


# Of K and V in a block's slots when memory decides. More and blocks finish unevenly, since some multiprocessors get
# more of the bandwidth than others; 48 KiB are too few to have all of it. Measured on an H200.
_IN_FLIGHT = 80 << 10
# Sequences with no more keys have tiles of so many: what a wider one holds is for nothing.
_SHORT = 64


def decode_options(
    head_dim: int,
    head_dim_v: int,
    causal: bool,
    pack_gqa: int = 1,
    kind: type[Sm90Options] = Sm90Options,
    paged: bool = False,
    keys: int | None = None,
) -> Sm90Options:
    """The build for launches with at most `DECODE_ROWS` rows a sequence and key head: those that memory bounds.

    One consumer, which has no other to take turns with; two slots for Q, so that a tile's keys are on their way
    before the last tile is done, and two or a few for keys, together no more than memory's speed takes. For keys in
    pages (`paged`) one more, since a tile's pages must be known before it is on its way. Tiles can take milliseconds,
    so that the wait for the next one's number is nothing next to a block that got one which another has time for.
    `keys`: the most that a sequence has, if that is known.
    """
    fields: dict[str, Any] = {"q_stages": 2, "ping_pong": False, "pack_gqa": pack_gqa, "takes_late": True}
    own = kind.decoding.get(head_dim)
    if own is not None:
        return kind(head_dim, head_dim_v, causal, 1, **{**fields, **own})
    one = kind(head_dim, head_dim_v, causal, 1, block_n=wgmma.K, stages=1, **fields)
    block_n = min(_IN_FLIGHT // 2 // one.key_bytes * wgmma.K, kind.most_keys)
    one = replace(one, block_n=_power_of_two(block_n) if paged else block_n)
    one = replace(one, stages=_IN_FLIGHT // one.loaded_bytes + paged)
    return replace(one, block_n=min(one.block_n, _SHORT)) if keys is not None and keys <= _SHORT else one


_SECTION_BYTES = 32 << 20
_SECTION_HEADS = 16, 64


def section_for(request: Request, options: Sm90Options) -> int:
    """How many heads, or packed sets, to work on at a time.

    One where all tiles take as long: blocks go from head to head together, and K and V that they read stay in the
    second-level cache. Causal tiles differ in length: the short ones of several heads fill the places that the long
    ones leave. Sections are as large as each other, as a small last one leaves places empty. Measured on an H200 for
    512 to 16384 keys. Tiles of block masks are taken to differ as well.
    """
    if not request.causal and request.static_features.block_size is None:
        return 1
    heads = request.batch * request.num_heads // options.pack_gqa
    sharing = request.num_heads // options.pack_gqa // request.num_kv_heads
    bytes_of_keys = options.tiles[0].element_bytes * request.seq_len_kv * (request.head_dim + request.value_dim)
    least, most = _SECTION_HEADS
    wanted = _power_of_two(min(most, max(least, _SECTION_BYTES * sharing // max(1, bytes_of_keys))))
    return -(-heads // max(1, round(heads / wanted)))
