"""Run-time strides and coordinates: values that may be added, multiplied and divided, and nothing else."""

import operator

import pytest
from hypothesis import strategies as st

from fly.errors import LayoutError
from fly.layout import Layout, crd2idx, idx2crd
from tests.layout.strategies import coordinates, extents, forall, layouts, power_layouts


class Symbol:
    """A number that is not known before run time; `log` collects the operations on all symbols."""

    log: list[str] = []  # noqa: RUF012

    def __init__(self, value: int):
        self.value = value

    def __repr__(self) -> str:
        return "<symbol>"

    def _apply(self, name: str, other: "Symbol | int") -> "Symbol":
        Symbol.log.append(name)
        number = other.value if isinstance(other, Symbol) else other
        return Symbol(getattr(operator, name)(self.value, number))

    def __add__(self, other):
        return self._apply("add", other)

    def __mul__(self, other):
        return self._apply("mul", other)

    def __floordiv__(self, other):
        return self._apply("floordiv", other)

    def __mod__(self, other):
        return self._apply("mod", other)

    def _refuse(self, *other):
        raise AssertionError("a run-time value was compared, or asked for its truth or number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __hash__ = None


def number(value) -> int:
    return value.value if isinstance(value, Symbol) else value


def symbolic(tree):
    """The tree with every number made a symbol."""
    return tuple(map(symbolic, tree)) if isinstance(tree, tuple) else Symbol(tree)


@pytest.fixture
def log():
    Symbol.log.clear()
    return Symbol.log


@forall(layouts(low=-3))
def test_runtime_strides(layout):
    traced = Layout(layout.shape, symbolic(layout.stride))
    for coordinate in coordinates(layout.shape):
        assert number(traced(coordinate)) == layout(coordinate)
    for i in range(layout.size):
        assert number(traced(i)) == layout(i)


@forall(layouts(low=-3))
def test_runtime_coordinates(layout):
    traced = Layout(layout.shape, symbolic(layout.stride))
    for coordinate in coordinates(layout.shape):
        assert number(layout(symbolic(coordinate))) == layout(coordinate)
        assert number(traced(symbolic(coordinate))) == layout(coordinate)


@forall(layouts(low=-3))
def test_runtime_linear_index(layout):
    for i in range(layout.size):
        assert number(layout(Symbol(i))) == layout(i)
        assert number(Layout(layout.shape, symbolic(layout.stride))(Symbol(i))) == layout(i)
        assert number(crd2idx(idx2crd(Symbol(i), layout.shape), layout.shape, layout.stride)) == layout(i)


@forall(layouts((1, 2, 4, 8), low=-3), power_layouts())
def test_tiling_runtime_strides(layout, tile):
    """compose and the divides treat run-time strides as they would static ones."""
    traced = Layout(layout.shape, symbolic(layout.stride))
    for operation in (Layout.compose, Layout.logical_divide, Layout.tiled_divide):
        tiled, static = operation(traced, tile), operation(layout, tile)
        assert [number(tiled(i)) for i in range(static.size)] == static.table()


@forall(layouts(), st.integers(1, 6))
def test_forms_of_runtime_strides(layout, extent):
    traced = Layout(layout.shape, symbolic(layout.stride))
    flat = Layout.of(traced, Layout(extent, Symbol(7))).group().flatten()
    assert [number(stride) for stride in flat.stride] == [*(mode.stride for mode in layout.flatten()), 7]
    assert list(flat.shape) == [*extents(layout), extent]
    assert (traced.size, traced.rank, traced.depth) == (layout.size, layout.rank, layout.depth)


def test_tile_of_a_tensor_with_a_runtime_stride():
    """A (seqlen, dim) tensor, rows `pitch` apart, in tiles of (32, 16)."""
    pitch = Symbol(1000)
    tensor = Layout((128, 64), (pitch, 1))
    (_, columns), (row_tiles, column_tiles) = tiles = tensor.zipped_divide((32, 16))
    assert str(tiles) == "((32,16),(4,4)):((?,1),(?,16))"
    assert columns == Layout(16, 1) and column_tiles == Layout(4, 16)
    assert row_tiles.stride.value == 32 * 1000
    assert tiles((Symbol(5), Symbol(6)), (Symbol(2), Symbol(3))).value == (2 * 32 + 5) * 1000 + 3 * 16 + 6


@pytest.mark.parametrize(
    ("layout", "coordinate", "operations"),
    [
        (Layout((4, 8)), lambda: Symbol(9), []),
        (Layout((4, 8), (0, 1)), lambda: Symbol(9), ["floordiv"]),
        (Layout((4, 8), (1, 0)), lambda: Symbol(9), ["mod"]),
        (Layout((4, 8), (8, 1)), lambda: Symbol(9), ["mod", "mul", "floordiv", "add"]),
        (Layout((1, 8), (3, 2)), lambda: Symbol(9), ["mul"]),
        (Layout((4, 8), (1, 4)), lambda: (Symbol(1), 3), ["add"]),
        (Layout((4, 8), (1, 4)), lambda: (Symbol(1), 0), []),
        (Layout((4, 8), (0, 4)), lambda: (Symbol(1), Symbol(2)), ["mul"]),
        (Layout((4, 8, 3), (5, 4, 7)), lambda: (1, Symbol(2), 2), ["mul", "add"]),
    ],
)
def test_operations_spent(layout, coordinate, operations, log):
    """Nothing is spent on zeros, ones, and digits that the layout puts together again."""
    symbol = coordinate()
    result = layout(symbol)
    assert log == operations
    assert isinstance(result, Symbol)


def test_operations_spent_on_runtime_strides(log):
    traced = Layout((4, 8), (Symbol(10), 1))
    assert traced(0, 3) == 3
    assert traced(1, 0).value == 10 and log == []
    assert traced(2, 3).value == 23 and log == ["mul", "add"]


def test_equal_if_the_strides_are_the_same_objects():
    stride = Symbol(3)
    layout = Layout((4, 8), (stride, 1))
    assert layout == Layout((4, 8), (stride, 1)) and hash(layout) == hash(Layout((4, 8), (stride, 1)))
    assert layout != Layout((4, 8), (Symbol(3), 1)) and layout != Layout((4, 8), (3, 1))


def test_text_hides_runtime_strides():
    assert str(Layout(((4, 2), 8), ((Symbol(3), 1), 2))) == "((4,2),8):((?,1),2)"


RUNTIME = Layout((4, 8), (Symbol(8), 1))


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        (lambda: RUNTIME.cosize, "cosize of"),
        (lambda: RUNTIME.table(), "table of"),
        (lambda: RUNTIME.is_injective, "table of"),
        (lambda: RUNTIME.is_compact, "table of"),
        (lambda: RUNTIME.is_bijective, "table of"),
        (lambda: RUNTIME.coalesce(), "coalesce of"),
        (lambda: RUNTIME.complement(), "complement of"),
        (lambda: RUNTIME.complement(64), "complement of"),
        (lambda: RUNTIME.right_inverse(), "right_inverse of"),
        (lambda: RUNTIME.left_inverse(), "left_inverse of"),
        (lambda: Layout(32).compose(RUNTIME), "composition with"),
        (lambda: Layout(32).logical_divide(RUNTIME), "complement of"),
        (lambda: RUNTIME.logical_product(2), "complement of"),
        (lambda: Layout(2).logical_product(RUNTIME), "cosize of"),
        (lambda: RUNTIME.blocked_product(Layout(2)), "complement of"),
    ],
)
def test_static_algebra_refuses_runtime_strides(operation, what):
    message = rf"{what} \(4,8\):\(\?,1\): needs static strides, and <symbol> is a run-time value"
    with pytest.raises(LayoutError, match=message):
        operation()


def test_extents_must_be_static():
    with pytest.raises(LayoutError, match="shape <symbol>: an extent is an int of at least 1"):
        Layout((4, Symbol(8)))
