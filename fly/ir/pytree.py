"""Flattening of what loops and branches carry: values, tokens, and containers of them.

Containers are tuples, lists, dicts and dataclass instances. Everything else (numbers, strings, and dataclasses
with a true class attribute `is_static`) is static: it must come back equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fly.errors import CarryError
from fly.ir.value import Traced


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """Named children of a container, or None for a leaf."""
    if isinstance(tree, tuple | list):
        return [(f"[{i}]", child) for i, child in enumerate(tree)]
    if isinstance(tree, dict):
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not getattr(tree, "is_static", False):
        return [(f".{f.name}", getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return None


def _rebuild(tree: Any, children: list[Any]) -> Any:
    if isinstance(tree, tuple):
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    if isinstance(tree, list):
        return children
    if isinstance(tree, dict):
        return dict(zip(tree, children, strict=True))
    new = object.__new__(type(tree))
    for field, child in zip(dataclasses.fields(tree), children, strict=True):
        object.__setattr__(new, field.name, child)
    return new


def leaves(tree: Any) -> list[Traced]:
    """The traced values of a tree, in order."""
    if isinstance(tree, Traced):
        return [tree]
    children = _children(tree)
    return [] if children is None else [leaf for _, child in children for leaf in leaves(child)]


def unflatten(tree: Any, values: list[Any]) -> Any:
    """The tree with its traced values replaced, in order, by ones around the given SSA values."""
    remaining = iter(values)

    def walk(node: Any) -> Any:
        if isinstance(node, Traced):
            return node.with_ir(next(remaining))
        children = _children(node)
        return node if children is None else _rebuild(node, [walk(child) for _, child in children])

    return walk(tree)


def match(expected: Any, got: Any, what: str, at: str | None = None, path: str = "") -> Any:
    """`got` with literals turned into values where `expected` has values; the structures must agree.

    Raises:
        CarryError: names the path at which structure, type or static value differ.
    """

    def fail(detail: str) -> CarryError:
        return CarryError(f"{what}{path} {detail}", at=at)

    if isinstance(expected, Traced):
        dtype = getattr(expected, "dtype", None)
        if isinstance(got, bool | int | float) and dtype is not None and getattr(expected, "length", 1) is None:
            return dtype(got)
        if not isinstance(got, Traced):
            raise fail(f"was {expected!r} and becomes {got!r}")
        if got.ir.type != expected.ir.type:
            raise fail(f"was {expected!r} and becomes {got!r}; a carried value keeps its type: convert with .to(...)")
        return got
    children = _children(expected)
    if children is None:
        if isinstance(got, Traced):
            raise fail(
                f"was the static value {expected!r} and becomes {got!r}; carry a traced value from the start, "
                "for example fly.f32(0.0)"
            )
        if type(got) is not type(expected) or got != expected:
            raise fail(f"was the static value {expected!r} and becomes {got!r}; only traced values may change")
        return got
    if type(got) is not type(expected):
        raise fail(f"was a {type(expected).__name__} and becomes a {type(got).__name__}")
    if isinstance(expected, dict):
        if set(got) != set(expected):
            raise fail(f"had the keys {', '.join(map(str, expected))} and has {', '.join(map(str, got)) or 'none'}")
        got = {key: got[key] for key in expected}
    got_children = _children(got) or []
    if len(children) != len(got_children):
        raise fail(f"had {len(children)} parts and has {len(got_children)}")
    return _rebuild(
        expected,
        [match(e, g, what, at, path + name) for (name, e), (_, g) in zip(children, got_children, strict=True)],
    )
