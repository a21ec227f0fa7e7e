"""Packages as parts of another one: a copy whose modules import each other by relative names."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

_OPERATIONS = re.compile(r"(?<=[\"'])fly(?=::)|(?<=torch\.ops\.)fly(?=\.)")


def vendor(packages: Mapping[str, Path], into: Path, kept: Callable[[str], bool], operations: str) -> None:
    """Copy the Python files of `packages`, directories by their new names, into the package in the directory `into`.

    `kept` says of a file, by its path there, whether it is copied; `operations`: the namespace of torch's operations,
    whose names exist once in a process.

    Raises:
        ValueError: a file imports one of them in a way that has no relative form; names the line.
    """
    for name, directory in packages.items():
        for source in sorted(directory.rglob("*.py")):
            place = Path(name, source.relative_to(directory))
            if not kept(place.as_posix()):
                continue
            text = _OPERATIONS.sub(operations, source.read_text())
            target = into / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(relative(text, packages, place))


def relative(text: str, packages: Collection[str], place: Path) -> str:
    """A module's text with relative imports of these packages; `place`: its path in the package they are parts of."""
    lines = text.splitlines(keepends=True)
    above = "." * len(place.parts)
    for node, name, at in _imports(ast.parse(text), packages):
        line = node.lineno - 1
        before, after = lines[line][: node.col_offset], lines[line][node.col_offset :]
        if isinstance(node, ast.ImportFrom):
            changed = after.replace(f"from {name}", f"from {above}{name}", 1)
        elif isinstance(node, ast.Import) and at == name and len(node.names) == 1:
            changed = after.replace(f"import {name}", f"from {above} import {name}", 1)
        else:
            raise ValueError(f"{place}:{node.lineno}: {ast.unparse(node)} has no relative form")
        lines[line] = before + changed
    return "".join(lines)


def _imports(tree: ast.AST, packages: Collection[str]) -> Iterator[tuple[ast.stmt | ast.expr, str, str]]:
    """(node, package, module) of what names a module of the packages from the top."""
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            named = [node.module]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            named = [str(node.args[0].value)] if called == "import_module" else []
        for module in named:
            if (top := module.partition(".")[0]) in packages:
                yield node, top, module
