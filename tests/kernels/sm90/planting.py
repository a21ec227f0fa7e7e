"""Planting bugs: a function of the product with one piece of its text changed, for as long as a test runs."""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Bug:
    """`edit`, "old => new", of the text of `owner`'s function `name`; old must be there once.

    `found`: the kinds of reports, or "wrong" for results, any of which shows it in the call of `case`.
    """

    what: str
    owner: Any
    name: str
    edit: str
    case: str
    found: str

    def __str__(self) -> str:
        return self.what

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Change the function, where kernels look it up."""
        static = inspect.getattr_static(self.owner, self.name)
        kind = type(static) if isinstance(static, staticmethod | property) else None
        function = static.fget if kind is property else static.__func__ if kind is staticmethod else static
        changed = _changed(function, *self.edit.split(" => "))
        monkeypatch.setattr(self.owner, self.name, kind(changed) if kind else changed)


def _changed(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """A function with other text, at the same lines of its file."""
    lines, first = inspect.getsourcelines(function)
    text = textwrap.dedent("".join(lines))
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {function.__qualname__}"
    tree = ast.parse(text.replace(old, new))
    (definition,) = tree.body
    definition.decorator_list = []
    ast.increment_lineno(tree, first - 1)
    flags = __future__.annotations.compiler_flag
    scope: dict[str, Any] = {}
    exec(
        compile(tree, inspect.getsourcefile(function), "exec", flags, dont_inherit=True), function.__globals__, scope
    )
    return scope[definition.name]
