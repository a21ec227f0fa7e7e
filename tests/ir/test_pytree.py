"""What loops carry: flattening, rebuilding, and matching of nested containers."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.errors import CarryError
from fly.ir import pytree
from tests.tracing import trace, traced

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Box:
    content: Any
    label: str = "box"


@dataclass(frozen=True)
class Shape:
    rows: int
    is_static: ClassVar[bool] = True


# "v" stands for a traced value until a kernel is traced
leaf = st.sampled_from(["v", 3, "static", None, 2.5, Shape(4)])
trees = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Box, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


def grow(tree: Any, make: Any) -> Any:
    """The tree with `make()` for every "v"."""
    if isinstance(tree, str) and tree == "v":
        return make()
    if isinstance(tree, Pair):
        return Pair(*(grow(t, make) for t in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(grow(t, make) for t in tree)
    if isinstance(tree, dict):
        return {k: grow(t, make) for k, t in tree.items()}
    return Box(grow(tree.content, make), tree.label) if isinstance(tree, Box) else tree


def shape_of(tree: Any) -> Any:
    """The tree with dtypes in the place of values, so that trees compare."""
    return grow_back(tree, lambda value: ("value", value.dtype.name))


def grow_back(tree: Any, name: Any) -> Any:
    if isinstance(tree, fly.Value):
        return name(tree)
    if isinstance(tree, Pair):
        return ("Pair", *(grow_back(t, name) for t in tree))
    if isinstance(tree, list | tuple):
        return (type(tree).__name__, *(grow_back(t, name) for t in tree))
    if isinstance(tree, dict):
        return {k: grow_back(t, name) for k, t in tree.items()}
    return ("Box", grow_back(tree.content, name), tree.label) if isinstance(tree, Box) else tree


@settings(max_examples=50, deadline=None)
@given(trees)
def test_unflatten_inverts_leaves_and_match_accepts_its_like(tree):
    def body():
        first, second = grow(tree, lambda: fly.i32(1)), grow(tree, lambda: fly.i32(2))
        values = pytree.leaves(second)
        assert len(values) == plain_leaves(tree).count("v")
        rebuilt = pytree.unflatten(first, [v.ir for v in values])
        assert shape_of(rebuilt) == shape_of(second)
        assert [v.ir for v in pytree.leaves(rebuilt)] == [v.ir for v in values]
        matched = pytree.match(first, second, "carry")
        assert [v.ir for v in pytree.leaves(matched)] == [v.ir for v in values]

    trace(body)


@settings(max_examples=50, deadline=None)
@given(trees, trees)
def test_match_accepts_trees_of_the_same_structure_only(a, b):
    def body():
        x, y = grow(a, lambda: fly.i32(1)), grow(b, lambda: fly.i32(2))
        if shape_of(x) == shape_of(y):
            pytree.match(x, y, "carry")
        elif not differ_by_literals(x, y):
            with pytest.raises(CarryError):
                pytree.match(x, y, "carry")

    trace(body)


def differ_by_literals(x: Any, y: Any) -> bool:
    """Whether a number in `y` may have been taken for a value of `x`."""
    return any(isinstance(leaf_, int | float) for leaf_ in plain_leaves(y)) and bool(pytree.leaves(x))


def plain_leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Box):
        return plain_leaves(tree.content)
    if isinstance(tree, dict):
        return [x for t in tree.values() for x in plain_leaves(t)]
    if isinstance(tree, list | tuple):
        return [x for t in tree for x in plain_leaves(t)]
    return [tree]


@pytest.mark.parametrize(
    ("expected", "got", "message"),
    [
        (("v", "v"), ("v",), r"carry had 2 parts and has 1"),
        (("v", ["v"]), ("v", ("v",)), r"carry\[1\] was a list and becomes a tuple"),
        ({"a": "v"}, {"b": "v"}, r"carry had the keys a and has b"),
        ({"m": Box("v")}, {"m": Box("v", "other")}, r"carry\['m'\]\.label was the static value 'box'"),
        (Box(3), Box(4), r"carry\.content was the static value 3 and becomes 4; only traced values may change"),
        (Box(0.0), Box("v"), r"was the static value 0.0 and becomes <i32>; carry a traced value from the start"),
        (["v"], [None], r"carry\[0\] was <i32> and becomes None"),
    ],
)
def test_messages_name_the_path(expected, got, message):
    def body():
        with pytest.raises(CarryError, match=message):
            pytree.match(grow(expected, lambda: fly.i32(1)), grow(got, lambda: fly.i32(2)), "carry")

    trace(body)


def test_a_changed_type_is_named():
    def body():
        with pytest.raises(
            CarryError, match=r"carry\[0\] was <i32> and becomes <f32>; a carried value keeps its type"
        ):
            pytree.match((fly.i32(0),), (fly.f32(0.0),), "carry")
        with pytest.raises(CarryError, match=r"was <4 x f32> and becomes 1.0"):
            pytree.match(fly.broadcast(0.0, 4), 1.0, "carry")

    trace(body)


def test_literals_become_values_of_the_carried_dtype():
    assert traced(lambda: pytree.match(fly.i64(0), 5, "carry").dtype.name) == "i64"
    assert traced(lambda: pytree.match(fly.bf16(0.0), 5.0, "carry").dtype.name) == "bf16"


def test_the_order_of_a_dicts_keys_does_not_matter():
    def body():
        x, y = fly.i32(1), fly.f32(2.0)
        matched = pytree.match({"x": x, "y": y}, {"y": y, "x": x}, "carry")
        assert list(matched) == ["x", "y"] and matched["x"] is x and matched["y"] is y

    trace(body)
