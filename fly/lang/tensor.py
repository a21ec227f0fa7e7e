"""Tensors in global memory: a pointer, a shape and strides that are run-time values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, overload

from fly.errors import DTypeError, ShapeError, StaticValueError
from fly.ir import memory
from fly.ir.atomics import atomic_add, atomic_add_bounded
from fly.ir.control import cond, when
from fly.ir.dtypes import DType, i1, i32, i64
from fly.ir.math import maximum, minimum
from fly.ir.memory import Pointer
from fly.ir.tape import note_load
from fly.ir.value import Number, Value, as_value, constant, from_elements, select
from fly.layout import Layout

if TYPE_CHECKING:
    from fly.int_tuple import Shape


@overload
def wide(value: int) -> int: ...
@overload
def wide(value: Value) -> Value: ...
def wide(value: Any) -> Any:
    """An integer as i64, so that products of sizes and strides do not wrap."""
    return value.to(i64) if isinstance(value, Value) else value


class Tensor:
    """A strided array in global memory: what a kernel's positional parameters are.

    `shape` holds i32 and `stride` (in elements) i64 values, or Python integers where known at compile time;
    `alignment` is the number of bytes that divide the address and every stride but a unit one.
    """

    def __init__(
        self, pointer: Pointer, dtype: DType, shape: tuple[Any, ...], stride: tuple[Any, ...], alignment: int
    ):
        self.pointer = pointer
        self.dtype = dtype
        self.shape = shape
        self.stride = stride
        self.alignment = alignment

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"<tensor of rank {self.rank}, {self.dtype}>"

    def _offset(self, coordinates: tuple[Any, ...]) -> Any:
        """Byte offset of a coordinate; 64 bit unless everything is static."""
        total: Any = 0
        for index, stride in zip(coordinates, self.stride, strict=True):
            term = wide(index) * stride
            total = term if isinstance(total, int) and total == 0 else total + term
        return total * self.dtype.bytes

    def at(self, *coordinates: Any) -> Pointer:
        """The address of an element; one integer (static or traced) per dimension, in 64-bit arithmetic."""
        if len(coordinates) != self.rank:
            raise ShapeError(f"{self!r} takes {self.rank} coordinates, not {len(coordinates)}")
        for coordinate in coordinates:
            if not isinstance(coordinate, int) and not (
                isinstance(coordinate, Value) and coordinate.dtype.is_int and coordinate.length is None
            ):
                raise DTypeError(f"tensor coordinate {coordinate!r} is no scalar integer")
        return self.pointer.offset(self._offset(coordinates))

    def __getitem__(self, key: Any) -> Tensor:
        """Fix some coordinates: `q[batch, :, head, :]` keeps the dimensions marked `:`."""
        key = key if isinstance(key, tuple) else (key,)
        if len(key) != self.rank:
            raise ShapeError(f"{self!r} takes {self.rank} indices, not {len(key)}")
        kept = [i for i, k in enumerate(key) if isinstance(k, slice)]
        if any(key[i] != slice(None) for i in kept):
            raise ShapeError("only the full slice ':' is supported on tensors; use .rows() and tiles for ranges")
        origin = self.at(*(0 if isinstance(k, slice) else k for k in key))
        return Tensor(
            origin,
            self.dtype,
            tuple(self.shape[i] for i in kept),
            tuple(self.stride[i] for i in kept),
            self.alignment,
        )

    def section(self, first: Any, count: Any) -> Tensor:
        """Entries [first, first + count) of the first dimension; the caller answers for their being there."""
        if self.rank == 0:
            raise ShapeError(f"{self!r} has no dimension to take a section of")
        stride = self.stride[0]
        unit = isinstance(stride, int) and stride == 1
        return Tensor(
            self.at(first, *[0] * (self.rank - 1)),
            self.dtype,
            (count, *self.shape[1:]),
            self.stride,
            min(self.alignment, self.dtype.bytes) if unit else self.alignment,
        )

    def load(self, *coordinates: Any, length: int | None = None, align: int | None = None) -> Value:
        """The element at a coordinate, or `length` contiguous ones from it on (last stride 1).

        `align`: bytes that divide its address, by default an element's. Vectors of less are loaded in pieces.
        """
        if length is not None:
            self._require_unit_stride()
        value = memory.load(self.at(*coordinates), self.dtype, length, align=align)
        note_load(self, coordinates, value)
        return value

    def store(self, value: Any, *coordinates: Any) -> None:
        """Store a number, or a scalar or vector (last stride 1) of the tensor's dtype, from a coordinate on."""
        if isinstance(value, Number):
            value = constant(value, self.dtype)
        if not isinstance(value, Value) or value.dtype is not self.dtype:
            raise DTypeError(f"cannot store {value!r} into {self!r}; convert with .to(fly.{self.dtype})")
        if value.length is not None:
            self._require_unit_stride()
        memory.store(value, self.at(*coordinates), align=self.dtype.bytes)

    def atomic_add(self, value: Any, *coordinates: Any, align: int | None = None) -> None:
        """Add a number, or a scalar or vector (last stride 1), from a coordinate on; nothing where that is outside.

        See `fly.atomic_add`. Of a vector that reaches past the last dimension's end nothing is added. `align`: bytes
        that divide its address.

        Raises:
            DTypeError: not of the tensor's dtype, or not what atomics add.
        """
        if isinstance(value, Number):
            value = constant(value, self.dtype)
        if not isinstance(value, Value) or value.dtype is not self.dtype:
            raise DTypeError(f"cannot add {value!r} to {self!r}; convert with .to(fly.{self.dtype})")
        if value.length is not None:
            self._require_unit_stride()
        address = self.at(*coordinates)
        lengths = [1] * (self.rank - 1) + [value.length or 1] * (self.rank > 0)
        inside = i1(True)
        for index, length, size in zip(map(as_value, coordinates), lengths, self.shape):
            inside = inside & (index >= 0) & (index <= size - length)
        with when(inside):
            atomic_add(value, address, align=align)

    def __setitem__(self, key: Any, value: Any) -> None:
        index = ", ".join(map(repr, key if isinstance(key, tuple) else (key,)))
        raise DTypeError(
            f"elements of {self!r} are not assigned; write x.store(value, {index}) for x[{index}] = value"
        )

    def __len__(self) -> int:
        raise StaticValueError(f"len() of {self!r}, whose sizes are only known at run time; use x.shape[0]")

    def __bool__(self) -> bool:
        """True: an optional argument is a tensor or None."""
        return True

    def __iter__(self) -> Iterator[Any]:
        raise StaticValueError(
            f"{self!r} is not iterated over at compile time; use `for i in fly.range(x.shape[0])` and x.load(i)"
        )

    def _require_unit_stride(self) -> None:
        if self.rank == 0:
            raise ShapeError(f"{self!r} is one element, which has no neighbours; load it without a length")
        if not isinstance(self.stride[-1], int) or self.stride[-1] != 1:
            raise ShapeError(
                f"{self!r} has a run-time last stride, and vectors need elements next to each other: pass "
                "x.contiguous() (to fly.compile, a TensorSpec with unit_stride=True), or load single elements"
            )

    def tile(self, size: int, index: Any) -> Tile:
        """Elements [index * size, (index + 1) * size) of a vector; what lies beyond the end reads as zero."""
        if self.rank != 1:
            raise ShapeError(f"tile() takes a vector, not {self!r}; fix other coordinates first")
        if not isinstance(size, int) or size <= 0:
            raise ShapeError(f"tile size {size!r} is no static positive integer")
        self._require_unit_stride()
        first = wide(index) * size
        remaining = maximum(minimum(wide(self.shape[0]) - first, size), 0).to(i32)
        return Tile(self.at(first), self.dtype, size, remaining, min(self.alignment, size * self.dtype.bytes))

    def rows(self, columns: int) -> RowView:
        """A matrix with `columns` (static) contiguous elements in each row."""
        if self.rank != 2:
            raise ShapeError(f"rows() takes a matrix, not {self!r}; fix other coordinates first")
        self._require_unit_stride()
        return RowView(self.pointer, self.dtype, self.shape[0], self.stride[0], columns, self.alignment)

    def panel(self, first: Any, columns: int) -> Panel:
        """The rows of a matrix from row `first` on, in tiles of `columns` (static) columns: what a product walks."""
        return Panel(self.rows(columns), first, self.shape[1])


def _refused(operator: str) -> Callable[..., Any]:
    def refuse(tensor: Tensor, *_: Any) -> Any:
        raise DTypeError(
            f"{operator} of {tensor!r}, which is memory; load values first: x.load(i), or a tile's share"
        )

    return refuse


# what a newcomer would write for loading; `==` stays Python's
for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Tensor, f"__{_operator}__", _refused(_operator))
    setattr(Tensor, f"__r{_operator}__", _refused(_operator))
for _operator in ("neg", "abs", "lt", "le", "gt", "ge", "float", "int"):
    setattr(Tensor, f"__{_operator}__", _refused(_operator))


@dataclass(frozen=True)
class Tile:
    """A piece of a vector, `remaining` of whose `size` elements exist."""

    pointer: Pointer
    dtype: DType
    size: int
    remaining: Value
    alignment: int

    def share(self, layout: Layout, thread: Value) -> Share:
        """The part of a thread under a (thread, value) -> element layout whose values are contiguous.

        Raises:
            ShapeError: the layout does not cover the tile, or its values are not contiguous.
        """
        if layout.rank != 2 or layout.size != self.size or not layout.is_bijective:
            raise ShapeError(f"layout {layout} does not cover a tile of {self.size} elements")
        values = Layout(cast("tuple[Shape, ...]", layout.shape)[1]).size
        if [layout((0, v)) for v in range(values)] != list(range(values)):
            raise ShapeError(f"values of layout {layout} are not contiguous")
        return Share(self, layout((thread, 0)), values)


@dataclass(frozen=True)
class Share:
    """A thread's contiguous `length` elements of a tile, from `first` on."""

    tile: Tile
    first: Value
    length: int

    def _address(self, element: int = 0) -> Pointer:
        return self.tile.pointer.offset((self.first + element) * self.tile.dtype.bytes)

    @property
    def _align(self) -> int:
        bytes_ = self.length * self.tile.dtype.bytes
        return min(self.tile.alignment, bytes_ & -bytes_)

    def load(self) -> Value:
        """A vector; elements past the end of the tensor are zero."""
        dtype = self.tile.dtype

        def one(element: int) -> Value:
            return cond(
                self.first + element < self.tile.remaining,
                lambda: memory.load(self._address(element), dtype),
                lambda: constant(0, dtype),
            )

        return cond(
            self.first + self.length <= self.tile.remaining,
            lambda: memory.load(self._address(), dtype, self.length, align=self._align),
            lambda: from_elements([one(e) for e in range(self.length)]),
        )

    def store(self, value: Any) -> None:
        """Store a vector of the tile's dtype, or a number everywhere; elements past the tensor's end are dropped."""
        if isinstance(value, Number):
            value = constant(value, self.tile.dtype, self.length)
        if not isinstance(value, Value) or value.dtype is not self.tile.dtype or value.length != self.length:
            raise ShapeError(f"cannot store {value!r} into a share of {self.length} x {self.tile.dtype}")
        whole = self.first + self.length <= self.tile.remaining
        with when(whole):
            memory.store(value, self._address(), align=self._align)
        with when(~whole):
            for element in range(self.length):
                with when(self.first + element < self.tile.remaining):
                    memory.store(value[element], self._address(element))


@dataclass(frozen=True)
class RowView:
    """A matrix of `count` rows of `columns` (static) contiguous elements, `stride` elements apart."""

    pointer: Pointer
    dtype: DType
    count: Value | int
    stride: Value | int
    columns: int
    alignment: int

    @property
    def pitch(self) -> Value | int:
        """Bytes from one row to the next, i32 or static."""
        stride = self.stride.to(i32) if isinstance(self.stride, Value) else self.stride
        return stride * self.dtype.bytes

    def row(self, index: Any) -> Pointer:
        """The address of a row, in 64-bit arithmetic."""
        return self.pointer.offset(wide(index) * self.stride * self.dtype.bytes)

    def beside(self, index: Any) -> RowView:
        """The view moved to the right by `index` times its columns.

        Where that reaches past the end of the rows, a window's bound does not tell one row from the next: such
        columns, and rows from `rows_left` on, are for the caller to mask.
        """
        step = self.columns * self.dtype.bytes
        alignment = min(self.alignment, step & -step)
        return replace(self, pointer=self.pointer.offset(wide(index) * step), alignment=alignment)

    def tile(self, index: Any, rows: int) -> Window:
        """Tile number `index` of `rows` rows, counted from the first row."""
        return self.window(index * rows, rows)

    def window(self, first: Any, rows: int | None) -> Window:
        """Rows [first, first + rows), or all from `first` on; rows that do not exist read as zero, drop stores."""
        # not a clamp to [0, rows]: LLVM makes that a vector instruction on AMD, and the bound is scalar
        valid = self.count - minimum(self.count, first)
        if rows is not None:
            valid = minimum(valid, rows)
        pitch = self.pitch
        bound = (valid - 1) * pitch + self.columns * self.dtype.bytes
        return Window(self.row(first), pitch, (valid > 0).to(i32) * bound, valid, self)


@dataclass(frozen=True)
class Panel:
    """Rows of a matrix from `first` on, cut along its `width` columns into tiles of `view.columns`.

    Columns past the last whole tile are not read: a width that is no multiple needs them padded.
    """

    view: RowView
    first: Value | int
    width: Value | int

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    @property
    def columns(self) -> int:
        """Columns of one tile."""
        return self.view.columns

    @property
    def pitch(self) -> Value | int:
        """Bytes from one row to the next, i32 or static."""
        return self.view.pitch

    @property
    def alignment(self) -> int:
        """Bytes that divide the address of every row of every tile."""
        return self.view.beside(0).alignment

    def tile(self, index: Any, rows: int) -> Window:
        """Tile number `index`, `rows` rows high; zeros past the last row and past the last whole tile."""
        window = self.view.beside(index).window(self.first, rows)
        exists = wide(index) * self.columns + self.columns <= wide(self.width)
        return replace(window, bound=select(exists, window.bound, 0), rows_left=select(exists, window.rows_left, 0))


@dataclass(frozen=True)
class Window:
    """Some rows of a matrix as a bounded buffer: byte offsets of 32 bits from `base`, `bound` bytes long.

    Rows within a window are less than 2**31 bytes apart.
    """

    base: Pointer
    pitch: Value | int
    bound: Value
    rows_left: Value
    view: RowView

    def load_inside(self, row: Any, column: Any, length: int) -> Value:
        """`length` contiguous elements of a row that exists."""
        bytes_ = self.view.dtype.bytes
        align = min(self.view.alignment, length * bytes_)
        offset = row * self.pitch + column * bytes_
        return memory.load(self.base.offset(offset), self.view.dtype, length, align=align)

    def load(self, row: Any, column: Any, length: int) -> Value:
        """`length` contiguous elements of a row (relative to the window); zeros past the last row."""
        bytes_ = self.view.dtype.bytes
        offset = row * self.pitch + column * bytes_
        align = min(self.view.alignment, length * bytes_)
        return memory.load_bounded(self.base, offset, self.bound, self.view.dtype, length, align=align)

    def store(self, value: Value, row: Any, column: Any) -> None:
        """Store a vector at a row and column; rows past the last are dropped."""
        bytes_ = self.view.dtype.bytes
        align = min(self.view.alignment, (value.length or 1) * bytes_)
        memory.store_bounded(value, self.base, row * self.pitch + column * bytes_, self.bound, align=align)

    def atomic_add(self, value: Value, row: Any, column: Any) -> None:
        """Add a scalar or vector to what is at a row and column; past the last row nothing. See `fly.atomic_add`."""
        bytes_ = self.view.dtype.bytes
        align = max(4, min(self.view.alignment, (value.length or 1) * bytes_))
        atomic_add_bounded(value, self.base, row * self.pitch + column * bytes_, self.bound, align=align)
