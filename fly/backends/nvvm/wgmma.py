"""Warpgroup matrix products (WGMMA) of Hopper: operands in shared memory through descriptors, or A in registers.

PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": register layouts, shared-memory matrix layouts and
descriptors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fly.backends.nvvm.dialect import MOST_WAITED
from fly.backends.nvvm.emit import operation, shared_address
from fly.errors import AtomError, LayoutError, ShapeError
from fly.ir.dtypes import DType, dtype, f32, i32, i64
from fly.ir.memory import Pointer, load
from fly.ir.value import Value, from_elements, select, shuffle
from fly.lang.ids import lane_of
from fly.lang.sync import shuffle_xor
from fly.layout import Layout

if TYPE_CHECKING:
    from fly.backends.nvvm.emit import Attribute

M, K = 64, 16  # of one instruction on 16-bit operands
K_BYTES = 32  # of any operands
LANES = 128
UNIT = 16  # bytes that a descriptor counts in
DTYPES = {"bf16": "bf16", "f16": "f16", "f8e4m3": "e4m3", "f8e5m2": "e5m2"}  # and the instruction's names
_MODES = {128: 1, 64: 2, 32: 3}  # bytes of a swizzled line -> the descriptor's layout type


@dataclass(frozen=True)
class PanelTile:
    """A (rows x columns) tile of 16-bit or 8-bit elements in shared memory as TMA writes it and WGMMA reads it.

    Columns are cut into panels of `swizzle` bytes (128, 64 or 32); a panel holds its rows one after the other, and
    16-byte pieces of row r are swapped by xor with bits of r, which repeats every 8 rows.
    """

    rows: int
    columns: int
    swizzle: int = 128
    element_bytes: int = 2
    is_static: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.element_bytes not in (1, 2):
            raise LayoutError(f"elements of a panel tile have {self.element_bytes} bytes; expected 1 or 2")
        if self.swizzle not in _MODES:
            raise LayoutError(f"swizzle of {self.swizzle} bytes; expected one of {', '.join(map(str, _MODES))}")
        if self.rows <= 0 or self.rows % 8:
            raise LayoutError(f"rows of a panel tile is {self.rows}; expected a positive multiple of 8")
        if self.columns <= 0 or self.columns % self.panel_columns:
            raise LayoutError(
                f"columns of a panel tile is {self.columns}; expected a positive multiple of {self.panel_columns}"
            )

    @staticmethod
    def widest(rows: int, columns: int, element_bytes: int = 2) -> PanelTile:
        """The tile with the widest swizzle that divides its rows: the fewest copies, the fewest bank conflicts."""
        for swizzle in _MODES:
            if columns * element_bytes % swizzle == 0:
                return PanelTile(rows, columns, swizzle, element_bytes)
        raise LayoutError(f"columns of a panel tile is {columns}; expected a multiple of {K_BYTES // element_bytes}")

    @staticmethod
    def covering(rows: int, columns: int, element_bytes: int = 2, *, few_lines: bool = False) -> PanelTile:
        """The tile that holds so many columns, and perhaps more, in the fewest bytes.

        Of equals the widest lines. Lines of 32 bytes only where one is enough: copies go by lines, and as many bytes
        in short ones take longer. `few_lines`: in the fewest lines, and of equals the fewest bytes.
        """
        row = element_bytes * columns
        sizes = {swizzle: (-(-row // swizzle), -(-row // swizzle) * swizzle) for swizzle in _MODES}
        swizzles = [swizzle for swizzle in _MODES if swizzle > K_BYTES or row <= swizzle]
        best = min(swizzles, key=lambda s: sizes[s] if few_lines else sizes[s][::-1])
        return PanelTile(rows, sizes[best][1] // element_bytes, best, element_bytes)

    @property
    def panel_columns(self) -> int:
        return self.swizzle // self.element_bytes

    @property
    def panels(self) -> int:
        return self.columns // self.panel_columns

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.swizzle

    @property
    def bytes(self) -> int:
        return self.rows * self.columns * self.element_bytes

    def __call__(self, row: int, column: int) -> int:
        """Byte offset of a static coordinate."""
        panel, inside = divmod(column, self.panel_columns)
        phase = (row * self.swizzle >> 7) % (self.swizzle // 16)
        return panel * self.panel_bytes + row * self.swizzle + ((inside * self.element_bytes) ^ (phase * 16))

    # descriptors, without the address: bits 16-29 leading, 32-45 stride byte offset (in 16 bytes), 62-63 the swizzle

    def _descriptor(self, leading: int, stride: int) -> int:
        return leading >> 4 << 16 | stride >> 4 << 32 | _MODES[self.swizzle] << 62

    @property
    def by_columns(self) -> SharedLayout:
        """The tile as an operand whose k runs along columns ("K-major"): Q and K of attention."""
        return SharedLayout(self._descriptor(16, 8 * self.swizzle), transposed=False)

    @property
    def by_rows(self) -> SharedLayout:
        """The tile as an operand whose k runs along rows ("MN-major"): V of attention.

        Raises:
            LayoutError: 8-bit elements, which the instruction takes with k along columns only.
        """
        if self.element_bytes == 1:
            raise LayoutError("WGMMA takes 8-bit operands with k along columns only; store the transposed matrix")
        return SharedLayout(self._descriptor(self.panel_bytes, 8 * self.swizzle), transposed=True)

    def step(self, k: int, *, along_rows: bool) -> int:
        """Byte offset of the operand's k-th element along its k."""
        if along_rows:
            return k * self.swizzle
        panel, inside = divmod(k, self.panel_columns)
        return panel * self.panel_bytes + inside * self.element_bytes


@dataclass(frozen=True)
class SharedLayout:
    """The constant part of a descriptor, and whether the operand lies with k along rows."""

    bits: int
    transposed: bool


@dataclass(frozen=True)
class Operand:
    """A matrix in shared memory: its tile, which way its k runs, and where it starts: `units` of `UNIT` bytes behind
    `pointer`. What changes from product to product belongs into `units`: it is one addition to a descriptor that was
    made before."""

    pointer: Pointer
    tile: PanelTile
    along_rows: bool = False
    units: Value | int = 0

    @property
    def layout(self) -> SharedLayout:
        return self.tile.by_rows if self.along_rows else self.tile.by_columns

    @property
    def k(self) -> int:
        """Elements of k that one instruction takes."""
        return K_BYTES // self.tile.element_bytes

    def descriptor(self) -> Value:
        """The 64-bit descriptor of the operand's first `k` elements of k."""
        high, low = divmod(self.layout.bits, 1 << 32)
        start = ((shared_address(self.pointer) & 0x3FFFF) >> 4) | i32(low)
        # no carry: addresses in shared memory are shorter than the descriptor's field
        return from_elements([start + self.units, i32(high - (high >> 31 << 32))]).bitcast(i64)[0]

    def steps(self, count: int, extent: int) -> tuple[int, ...]:
        """What to add to the descriptor for each `k` elements of k, of an operand with `extent` rows or columns.

        Raises:
            ShapeError: the tile is smaller than that.
        """
        have = (self.tile.columns, self.tile.rows) if self.along_rows else (self.tile.rows, self.tile.columns)
        if count <= 0 or extent > have[0] or count * self.k > have[1]:
            wanted = f"{count} steps of a WGMMA operand of {extent} by {self.k}"
            raise ShapeError(f"{wanted} do not fit a tile of {have[0]} by {have[1]}")
        return tuple(self.tile.step(t * self.k, along_rows=self.along_rows) // UNIT for t in range(count))


@dataclass(frozen=True)
class WarpgroupAtom:
    """D (64 x n, f32) += A (64 x k) * B (k x n) by the 128 threads of a warpgroup; k is 16, or 32 of 8-bit elements.

    `a`, `c`: (thread, value) -> row + 64 * column, as in `fly.MmaAtom`. Values 8t .. 8t+7 of the accumulators,
    narrowed to 16 bits, are the A registers of columns 16t .. 16t+15: one product's result is the next one's operand
    as it is. 8-bit ones are so for columns in another order, see `by_pairs`.
    """

    n: int
    dtype: str
    is_static: ClassVar[bool] = True
    m: ClassVar[int] = M
    lanes: ClassVar[int] = LANES
    accumulator: ClassVar[str] = "f32"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise AtomError(f"WGMMA of {self.dtype}; expected one of {', '.join(DTYPES)}")
        if not 8 <= self.n <= 256 or self.n % 8:
            raise AtomError(f"WGMMA with n = {self.n}; expected a multiple of 8 from 8 to 256")

    @property
    def k(self) -> int:
        return K_BYTES // dtype(self.dtype).bytes

    @property
    def a(self) -> Layout:
        run = 4 // dtype(self.dtype).bytes  # neighbours in k that share a register
        return Layout(((4, 8, 4), (run, 2, 2)), ((run * M, 1, 16), (M, 8, 4 * run * M)))

    @property
    def c(self) -> Layout:
        return Layout(((4, 8, 4), (2, 2, self.n // 8)), ((2 * M, 1, 16), (M, 8, 8 * M)))

    def values(self, operand: str) -> int:
        """Elements of the accumulators ("c") or of A in registers ("a") that one thread holds."""
        return {"c": M * self.n // LANES, "a": M * self.k // LANES}[operand]


@dataclass(frozen=True)
class FirstRows:
    """The accumulators of an atom without rows 8 to 15 of each 16: those of products with few rows in use.

    A lane has one row instead of two; `c` as of the atom, for `fly.AccumulatorLayout`.
    """

    atom: WarpgroupAtom
    is_static: ClassVar[bool] = True
    m: ClassVar[int] = M
    lanes: ClassVar[int] = LANES
    accumulator: ClassVar[str] = "f32"

    @property
    def n(self) -> int:
        return self.atom.n

    @property
    def c(self) -> Layout:
        return Layout(((4, 8, 4), (2, self.n // 8)), ((2 * M, 1, 16), (M, 8 * M)))

    def values(self, operand: str) -> int:
        """Elements of the accumulators ("c") that one thread holds."""
        return {"c": M * self.n // LANES // 2}[operand]

    @staticmethod
    def of(accumulators: Value) -> Value:
        """The first rows of an atom's accumulators, of any width."""
        return shuffle(accumulators, accumulators, [v for v in range(len(accumulators)) if not v & 2])

    @staticmethod
    def twice(values: Value) -> Value:
        """Accumulators of the atom whose rows 8 to 15 are as the first ones."""
        return shuffle(values, values, [v // 4 * 2 + v % 2 for v in range(2 * len(values))])


def issue(
    atom: WarpgroupAtom, a: Operand | Sequence[Value], b: Operand, steps: int, accumulator: Value | None = None
) -> Value:
    """Start D += A * B over `steps` times `atom.k` elements of k, as one group; D is usable after a `wait` with it.

    `a` is a matrix in shared memory, or one register operand (`atom.values("a")` elements) a step; without an
    `accumulator` (a vector of n / 2 f32) D starts from zero. Until the wait, neither D nor `a`'s registers may be
    touched.

    Raises:
        ShapeError: operands or accumulator of a wrong type or length, or tiles that are smaller than the product.
    """
    count = atom.values("c")
    if accumulator is not None and (accumulator.dtype is not f32 or accumulator.length != count):
        raise ShapeError(f"the accumulator of WGMMA with n = {atom.n} is {accumulator!r}; expected {count} x f32")
    from_memory = isinstance(a, Operand)
    operands = [] if accumulator is None else [accumulator]
    operands.append(b.descriptor())
    if isinstance(a, Operand):
        operands.append(a.descriptor())
        a_steps = a.steps(steps, M)
    else:
        operands += _registers(atom, a, steps)
        a_steps = ()
    if b.k != atom.k or (isinstance(a, Operand) and a.k != atom.k):
        raise ShapeError(f"a tile of WGMMA of {atom.dtype} has elements of {b.tile.element_bytes} bytes")
    accumulates = int(accumulator is not None)
    attributes: dict[str, Attribute] = {
        "n": atom.n,
        "dtype": atom.dtype,
        "accumulates": accumulates,
        "a_registers": int(not from_memory),
        "a_transposed": int(isinstance(a, Operand) and a.layout.transposed),
        "b_transposed": int(b.layout.transposed),
        "a_steps": a_steps,
        "b_steps": b.steps(steps, atom.n),
    }
    groups = (accumulates, 1, 1 if from_memory else steps)
    (result,) = operation("wgmma", operands, [f32.vector(count)], attributes, operand_groups=groups)
    return Value(result, f32, count)


def _registers(atom: WarpgroupAtom, a: Sequence[Value], steps: int) -> Sequence[Value]:
    """A in registers, one operand a step."""
    if len(a) != steps:
        raise ShapeError(f"{len(a)} register operands for {steps} steps of WGMMA; expected one each")
    for operand in a:
        if operand.dtype is not dtype(atom.dtype) or operand.length != atom.values("a"):
            wanted = f"{atom.values('a')} x {atom.dtype}"
            raise ShapeError(f"a register operand of WGMMA is {operand!r}; expected {wanted}")
    return a


def load_registers(
    atom: WarpgroupAtom, pointer: Pointer, tile: PanelTile, first_row: Any, steps: int
) -> tuple[Value, ...]:
    """64 rows of a tile in shared memory from `first_row` on, a multiple of 8, as A in registers: one operand a step.

    Such an operand is read from shared memory once, not by every product; `steps` times `atom.k` columns.

    Raises:
        ShapeError: a tile of other elements than the atom's, or of fewer columns.
    """
    if tile.element_bytes != dtype(atom.dtype).bytes:
        raise ShapeError(f"a tile of WGMMA of {atom.dtype} has elements of {tile.element_bytes} bytes")
    if steps * atom.k > tile.columns:
        raise ShapeError(f"{steps} steps of {atom.k} columns do not fit a tile of {tile.columns} columns")
    lane = lane_of(LANES)
    row = first_row + lane // 32 * 16 + lane % 32 // 4  # and 8 rows further, whose swizzle is the same
    swap = (row * tile.swizzle >> 7) % (tile.swizzle // UNIT)
    line = pointer.offset(row * tile.swizzle + lane % 4 * 4)

    def word(column: int, below: int) -> Value:
        panel, inside = divmod(column * tile.element_bytes, tile.swizzle)
        place = panel * tile.panel_bytes + below * tile.swizzle + ((inside // UNIT) ^ swap) * UNIT
        return load(line.offset(place), i32)

    def operand(step: int) -> Value:
        halves = (step * atom.k, step * atom.k + UNIT // tile.element_bytes)
        words = from_elements([word(column, below) for column in halves for below in (0, 8)])
        return words.bitcast(dtype(atom.dtype))

    return tuple(map(operand, range(steps)))


def wait(newer: int, *accumulators: Value, after: Sequence[Value] = ()) -> list[Value]:
    """Until at most `newer` groups that were started later are unfinished; the accumulators, now usable.

    Only what this returns may be read: it is what keeps a use from moving before the wait. `after`: f32 values, never
    below zero, that are computed before the wait begins, so that their work hides behind the products.

    Raises:
        ShapeError: more accumulators than a wait can have.
    """
    count = len(accumulators)
    if count > MOST_WAITED:
        raise ShapeError(f"a wait for {count} accumulators of WGMMA; expected at most {MOST_WAITED}")
    there = [int(i < count) for i in range(MOST_WAITED)]
    results = operation(
        "wgmma_wait",
        [*accumulators, *after],
        [accumulator.type for accumulator in accumulators],
        {"newer": newer, "accumulators": count},
        operand_groups=[*there, len(after)],
        result_groups=there,
    )
    return [accumulator.with_ir(result) for accumulator, result in zip(accumulators, results, strict=True)]


def computed(value: Value) -> None:
    """Products that are started behind this are started when `value` (f32, never below zero) has been computed.

    ptxas puts arithmetic that is behind the start of products among them, or behind those that are started next.
    """
    operation("computed", [value])


PAIRS = Layout((2, 2, 4), (1, 8, 2))
"""Which of 16 columns of the accumulators each of 16 columns of A is that `by_pairs` makes."""


def by_pairs(values: Value, kind: DType) -> tuple[Value, ...]:
    """A warpgroup's accumulators, narrowed to 8 bits, as A registers of 32 columns each, no lane giving any away.

    A thread has 2 neighbouring columns of every 8, but 4 neighbours of every 16 in A: those become 2 of one 8 and 2
    of the next. So the columns of A are in another order, `PAIRS` in each 16, and the rows of B must be in the same.

    Raises:
        ShapeError: the accumulators' width is no multiple of 32.
    """
    if len(values) % 16:
        raise ShapeError(f"A registers of {values!r}: {2 * len(values)} columns are no multiple of 32")
    # of 16 values, two pairs of columns of row g and two of row g + 8, then the next two of both
    order = [half + row + eight + i for half in (0, 8) for row in (0, 2) for eight in (0, 4) for i in (0, 1)]
    return tuple(shuffle(values, values, [first + i for i in order]).to(kind) for first in range(0, len(values), 16))


def runs(values: Value) -> tuple[list[Value], Value, list[list[Value]]]:
    """A warpgroup's accumulators, narrowed to 16 bit, as runs of 8 columns: (rows, column, pieces[row][i]).

    Piece i of a row starts at column `column + 32 * i`; one that starts past the accumulators' width holds anything.
    Rows (i32) count from the fragment's first. The four lanes that share a row trade their pairs of columns, so that
    each can store 16 bytes at once.

    Raises:
        ShapeError: the elements are not 16 bits wide.
    """
    if values.dtype.bits != 16:
        raise ShapeError(f"runs of {values!r}; expected elements of 16 bits")
    lane = lane_of(LANES)
    row = lane // 32 * 16 + lane % 32 // 4
    words = values.bitcast(i32)
    odd, upper = (lane & 1) == 1, (lane & 2) == 2
    pieces: list[list[Value]] = []
    for half in range(2):  # rows g and g + 8: words 0, 2, ... and 1, 3, ... of each 16 columns
        mine = [words[2 * chunk + half] for chunk in range(len(words) // 2)]
        mine += mine[-1:] * (-len(mine) % 4)
        pieces.append([_turn(mine[i : i + 4], odd, upper) for i in range(0, len(mine), 4)])
    return [row, row + 8], lane % 4 * 8, [[p.bitcast(values.dtype) for p in part] for part in pieces]


def _turn(words: Sequence[Value], odd: Value, upper: Value) -> Value:
    """Transpose 4 words over 4 lanes: lane i gets word i of each lane, in lane order."""
    words = list(words)
    for mask, condition, step in ((1, odd, 1), (2, upper, 2)):
        turned = list(words)
        for low in (i for i in range(4) if not i & step):
            high = low + step
            # a lane keeps one word of each pair and trades the other for its partner's
            given = select(condition, words[low], words[high])
            got = shuffle_xor(given, mask)
            turned[low] = select(condition, got, words[low])
            turned[high] = select(condition, words[high], got)
        words = turned
    return from_elements(words)
