"""The shape of the code base: who may import whom, what `import fly` costs, and that what is public is there."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fly
from fly import config

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 600

BASE = ("fly.errors", "fly.locks", "fly.config", "fly.int_tuple", "fly.swizzle", "fly.layout")
COMPILER = ("fly.ir", "fly.lang", "fly.passes", "fly.backends")
# What each part may import besides itself; `fly` alone is the package's front, which loads the rest on first use.
ALLOWED: dict[str, tuple[str, ...]] = {
    "fly.errors": (),
    "fly.locks": (),
    "fly.config": ("fly.errors",),
    "fly.int_tuple": ("fly.errors",),
    "fly.swizzle": ("fly.errors", "fly.int_tuple"),
    "fly.layout": ("fly.errors", "fly.int_tuple", "fly.swizzle"),
    "fly.ir": BASE,
    "fly.lang": (*BASE, "fly.ir"),
    "fly.passes": (*BASE, "fly.ir"),
    "fly.backends": (*BASE, "fly.ir", "fly.lang", "fly.passes"),
    "fly.emulator": (*BASE, *COMPILER),
    "fly.simulator": (*BASE, *COMPILER),
    "fly.runtime": ("fly", *BASE, *COMPILER, "fly.emulator", "fly.simulator"),
    "fly.__init__": (*BASE, *COMPILER, "fly.runtime"),
    "fly.__main__": ("fly.runtime", "fly_attention.commands"),
    "kernels": ("fly",),
}
# The kernel library's rooms, folders and the files that users name, from the ground up. What is in one may load what
# is on the floors below, and what is in the same folder.
FLOORS = (
    ("arguments", "second_name"),
    ("problem",),
    ("work",),
    ("generic", "gfx950", "sm90"),
    ("gfx942",),
    (
        "flash_attn_generic",
        "flash_attn_generic_bwd",
        "flash_attn_generic_probabilities",
        "flash_attn_gfx942_bwd",
        "flash_attn_gfx950",
        "flash_attn_gfx950_bwd",
        "flash_attn_sm90",
        "flash_attn_sm90_bwd",
    ),
    (
        "flash_attn_gfx942",
        "flash_attn_gfx950_fp8",
        "flash_attn_sm90_bwd_wide",
        "flash_attn_sm90_fp8",
        "flash_attn_sm90_fp8_cache",
    ),
    ("flash_attn_gfx942_fp8",),
    ("needs",),
    ("dispatch",),
    ("call",),
    ("cache", "merging"),
    ("flash_attn_interface",),
    ("api", "attention", "cascade"),
    ("flash_attn_api", "flash_attn_backward", "flex"),
    ("integrations", "profiled", "described", "inspection", "call_flags", "receipts"),
    ("prebuild",),
    ("commands",),
)
# Where third-party packages that are heavy or not always there may be imported.
EXTERNAL: dict[str, tuple[str, ...]] = {
    "mlir": (*COMPILER, "fly.simulator"),
    "llvmlite": ("fly.backends", "fly.emulator"),
    "torch": ("fly.runtime", "kernels"),
    "cuda": ("fly.runtime",),
    "tinygrad": ("fly.emulator",),
    "matplotlib": ("fly.emulator",),
}


def modules() -> Iterator[tuple[str, Path]]:
    """(dotted name, path) of every module of the package and the kernels."""
    for top in ("fly", "kernels"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name if name == "fly.__init__" else name.removesuffix(".__init__"), path


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        yield node
        yield from executed(node)


def imports(name: str, path: Path) -> Iterator[str]:
    """Dotted names that a module imports, anywhere in it: statements, and `import_module` of a constant."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from fly import config` imports a module, `from fly.errors import FlyError` a name of one
                inner = ROOT.joinpath(*module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").exists()
                yield f"{module}.{alias.name}" if is_module else module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function == "import_module" and isinstance(node.args[0].value, str):
                loaded = node.args[0].value
                yield ".".join(package) + loaded if loaded.startswith(".") else loaded


def within(module: str, part: str) -> bool:
    return module == part or (part != "fly" and module.startswith(part + "."))


def part_of(module: str) -> str:
    return next(part for part in ALLOWED if within(module, part))


def violations(name: str, path: Path) -> list[str]:
    """Imports of a module that the order does not allow."""
    own = part_of(name)
    found = []
    for imported in imports(name, path):
        top = imported.split(".")[0]
        if top in EXTERNAL and own not in EXTERNAL[top]:
            found.append(f"{name} imports {imported}")
        if top not in ("fly", "fly_attention", "kernels", "tests", "benchmarks", "examples"):
            continue
        everything = own == "kernels" and top == "fly"
        if not everything and not any(within(imported, part) for part in (own, *ALLOWED[own])):
            found.append(f"{name} imports {imported}")
    return found


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_import_order(name, path):
    assert violations(name, path) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("fly.ir.math", "from fly.lang import tensor"),
        ("fly.ir.math", "import fly"),
        ("fly.lang.tensor", "def f():\n    import fly.backends.target"),
        ("fly.lang.tensor", "from ..passes.walk import build"),
        ("fly.passes.walk", "from fly.lang.signature import Field"),
        ("fly.backends.target", "import importlib\nimportlib.import_module('fly.runtime.cuda')"),
        ("fly.runtime.launch", "from kernels import mask"),
        ("fly.emulator.wave", "from fly.runtime.device import Device"),
        ("fly.lang.tensor", "import llvmlite.binding"),
        ("fly.ir.math", "def f():\n    import torch"),
        ("kernels.problem.mask", "from tests.kernels import reference"),
        ("fly.config", "from fly import layout"),
        ("fly.config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fly.ir\nimport fly.lang"),
    ],
)
def test_the_order_has_teeth(name, source, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert len(violations(name, path)) == 1


def kernel_graph() -> dict[str, set[str]]:
    """Which modules of the kernel library each of them loads: imports, and modules that it has the names of.

    Without its front, which loads what is asked for.
    """
    inside = {name: path for name, path in modules() if within(name, "kernels") and path.name != "__init__.py"}
    graph = {}
    for name, path in inside.items():
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        by_name = {
            name.rpartition(".")[0] + text for text in strings if isinstance(text, str) and text.startswith(".")
        }
        graph[name] = (set(inside) & (by_name | set(imports(name, path)))) - {name}
    return graph


def test_no_kernel_module_loads_itself_by_way_of_others():
    graph = kernel_graph()
    assert graph["kernels.dispatch"] >= {"kernels.problem.contract", "kernels.flash_attn_sm90"}
    list(graphlib.TopologicalSorter(graph).static_order())  # CycleError names a circle


FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def room_of(module: str) -> str:
    return module.split(".")[1]


def climbs(graph: dict[str, set[str]]) -> list[str]:
    """What loads something of another room that is not on a lower floor."""
    return [
        f"{name} loads {other}"
        for name, loaded in graph.items()
        for other in sorted(loaded)
        if room_of(name) != room_of(other) and FLOOR_OF[room_of(name)] <= FLOOR_OF[room_of(other)]
    ]


def test_rooms_of_the_kernel_library_load_what_is_below_them():
    graph = kernel_graph()
    assert {room_of(name) for name in graph} == set(FLOOR_OF)
    assert climbs(graph) == []


def test_the_floors_have_teeth():
    assert climbs({"kernels.problem.mask": {"kernels.work.launch", "kernels.problem.features"}}) == [
        "kernels.problem.mask loads kernels.work.launch"
    ]
    assert climbs({"kernels.sm90.builds": {"kernels.generic.tiles", "kernels.work.launch"}}) == [
        "kernels.sm90.builds loads kernels.generic.tiles"
    ]


def known_by(package: str) -> dict[str, set[str]]:
    """What each module of a package, but its front, imports of it, for a type checker's eyes too."""
    inside = {name: path for name, path in modules() if within(name, package) and path.name != "__init__.py"}
    graph: dict[str, set[str]] = {}
    for name, path in inside.items():
        found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        named = {
            text for node in found for alias in node.names for text in (node.module, f"{node.module}.{alias.name}")
        }
        graph[name] = (named & set(inside)) - {name}
    return graph


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What is known by way of others."""
    found: set[str] = set()
    open_ = set(graph[start])
    while open_:
        found |= open_
        open_ = {other for name in open_ for other in graph[name]} - found
    return found


def test_semantics_of_instructions_know_no_machine():
    """They know `Executing`; a machine is made of them."""
    graph = known_by("fly.emulator")
    assert graph["fly.emulator.machine"] >= {"fly.emulator.valu", "fly.emulator.lds", "fly.emulator.vmem"}
    assert graph["fly.emulator.valu"] >= {"fly.emulator.executing"}
    assert "fly.emulator.machine" not in reached(graph, "fly.emulator.machine")


def absolute_imports(source: str) -> set[str]:
    """Top-level names that a module imports, but for what is relative to it."""
    tops = set()
    for node in executed(ast.parse(source)):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            tops.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function == "import_module":
                tops.add(node.args[0].value.partition(".")[0])
    return tops


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_kernel_library_is_imported_by_the_name_that_a_wheel_gives_it(name, path):
    refused = {"kernels", "fly_attention"} if within(name, "kernels") else {"kernels"}
    assert not absolute_imports(path.read_text()) & refused


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name
)
def test_documents_import_the_kernel_library_by_that_name_too(path):
    assert re.findall(r"^ *(?:from|import) kernels\b.*", path.read_text(), re.M) == []


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: value if isinstance(value, str) else "")
def test_messages_and_docstrings_name_its_modules_by_that_name_too(name, path):
    assert re.findall(r"(?<![-\w/.])kernels\.[a-z_0-9]+", path.read_text()) == []


def test_absolute_imports_are_found():
    source = "import kernels.problem.mask\nfrom .mask import x\nfrom fly import y\nf = importlib.import_module('a.b')"
    assert absolute_imports(source) == {"kernels", "fly", "a"}


def loaded_by(program: str) -> set[str]:
    """Top-level modules that a program leaves loaded, in a fresh interpreter."""
    program += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_import_fly_is_light():
    assert not loaded_by("import fly; fly.Layout; fly.TensorSpec") & {"mlir", "llvmlite", "torch", "numpy", *EXTERNAL}


def test_an_exported_kernel_needs_no_compiler(tmp_path):
    @fly.kernel
    def fill(x: fly.Tensor):
        x.store(fly.f32(1.0), fly.thread_id.x)

    vector = fly.TensorSpec("f32", rank=1, alignment=16, unit_stride=True)
    path = tmp_path / "fill.fly"
    fly.compile(fill, vector, block=64, target="gfx950").save(path)
    assert not loaded_by(f"import fly; fly.load({str(path)!r})") & {"mlir", "llvmlite", "torch", "tinygrad", "cuda"}


@pytest.mark.parametrize("name", fly.__all__)
def test_public_names_are_there(name):
    assert getattr(fly, name) is not None


def test_type_checkers_see_the_same_names():
    """`import fly` finds names when they are used; the stub says the same where nothing is run."""
    lines = ast.parse((ROOT / "fly" / "__init__.pyi").read_text()).body
    imports = [node for node in lines if isinstance(node, ast.ImportFrom)]
    assert all(name.asname == name.name for node in imports for name in node.names)
    assert {name.name: node.module for node in imports for name in node.names} == fly._EXPORTS


def test_no_other_names_are_public():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = fly.nothing


@pytest.mark.parametrize("variable", config.VARIABLES, ids=lambda variable: variable.name)
def test_environment_variables_are_documented(variable):
    assert f"`{variable.name}`" in (ROOT / "docs/environment.md").read_text()


def test_files_are_short_enough_to_read():
    tops = ("fly", "kernels", "tests", "benchmarks", "examples", "hub")
    lengths = {path: len(path.read_text().splitlines()) for top in tops for path in (ROOT / top).rglob("*.py")}
    assert lengths
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_LINES} == {}
