"""Builds a kernel for Hugging Face's hub: a folder that `kernels.get_local_kernel` loads.

    make hub-kernel                                            # CUDA, Hopper, the receipt `pytorch`
    python -m hub.build --backend rocm --arch gfx950 --receipt aiter --into dist/hub-rocm

The folder holds, for one backend, the library's Python files as one package, without the compiler, and builds that
were made ahead as data (`fly.runtime.prebuilt`). It needs torch and numpy, and no compiler, `cuda-bindings` or
toolkit. A folder for the backend "cpu" runs AMD's builds in the emulator, for tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import fly
from fly.backends.artefact import Artefact
from fly.runtime.prebuilt import MANIFEST, digest_of
from kernels.commands import TARGETS
from kernels.receipts import RECEIPTS

from .vendor import vendor

ROOT = Path(__file__).resolve().parents[1]
NAME = "fly-attention"
PACKAGES = {"fly": ROOT / "fly", "fly_attention": ROOT / "kernels"}
BUILDS = "builds"
_EMULATOR = ("fly/emulator/", "fly/runtime/emulated.py")
# what traces, compiles, describes, or serves another command
_LEFT_OUT = tuple(
    f"{folder}/{name}"
    for folder, names in {
        "fly": ("simulator/", "passes/", "__main__.py"),
        "fly/backends": ("compile.py", "llvm.py", "lowering.py"),
        "fly/backends/nvvm": ("codegen.py", "lower.py", "lower_hopper.py", "pipeline.py"),
        "fly/backends/rocdl": ("assemble.py", "codegen.py", "lower.py", "pipeline.py", "vector_rereads.py"),
        "fly/runtime": (
            *("cli.py", "emulate_cli.py", "emulate_arguments.py", "profile_cli.py", "prebuild.py"),
            *("object_files.py", "simulated.py"),
        ),
        "fly_attention": (
            *("commands.py", "described.py", "prebuild.py", "profiled.py", "receipts.py", "second_name.py"),
        ),
    }.items()
    for name in names
)
_INIT = '''"""Flash attention by fly: builds that were made ahead, and the functions that launch them."""

from pathlib import Path
from typing import Any

from . import fly_attention
from .fly.runtime import prebuilt

prebuilt.own_folder = Path(__file__).resolve().parent / "{builds}"
__all__ = fly_attention.__all__


def __getattr__(name: str) -> Any:
    return getattr(fly_attention, name)


def __dir__() -> list[str]:
    return sorted(__all__)
'''
_CARD = """---
tags:
- kernels
license: apache-2.0
---

# fly-attention {version}

Flash attention, compiled ahead for {archs}.

    from kernels import get_local_kernel

    attention = get_local_kernel(path_of_this_folder)
    out = attention.flash_attn_func(q, k, v, causal=True)

It has `flash_attn_func`, `flash_attn_varlen_func`, `flash_attn_with_kvcache` and the other functions of
`fly_attention`. A call that none of the {count} builds serves raises an error that names the build.
"""


@dataclass(frozen=True)
class Backend:
    """A backend of the hub's: its name there, and the targets it has, with the hub's names of them."""

    name: str
    archs: dict[str, str]


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cuda", {"sm_80": "8.0", "sm_86": "8.6", "sm_89": "8.9", "sm_90a": "9.0a"}),
        Backend("rocm", {"gfx942": "gfx942", "gfx950": "gfx950"}),
        Backend("cpu", {"gfx942": "gfx942", "gfx950": "gfx950"}),
    )
}


def build(into: Path, backend: Backend, prebuild: Sequence[str]) -> Path:
    """Make the folder; `prebuild`: arguments of `python -m fly prebuild` that say what is built. Returns its variant.

    Raises:
        ValueError: what `hub.vendor.vendor` raises.
        CalledProcessError: builds failed; their errors are on stderr.
    """
    variant = into / "build" / f"torch-{backend.name}"
    shutil.rmtree(variant, ignore_errors=True)
    variant.mkdir(parents=True)
    made = variant / BUILDS
    command = [sys.executable, "-m", "fly", "prebuild", "--into", str(made), *prebuild]
    subprocess.run(command, cwd=ROOT, check=True)
    left_out = _LEFT_OUT if backend.name == "cpu" else (*_LEFT_OUT, *_EMULATOR)
    digest = hashlib.sha256("".join(map(digest_of, PACKAGES.values())).encode())
    files = sorted(made.glob("*/*.fly"))
    for file in files:
        digest.update(file.relative_to(made).as_posix().encode() + file.read_bytes())
    unique = f"{NAME.replace('-', '_')}_{backend.name}_{digest.hexdigest()[:12]}"
    vendor(PACKAGES, variant, lambda place: not place.startswith(left_out), unique)
    manifest = json.loads((made / MANIFEST).read_text())
    manifest["sources"] = {name: digest_of(variant / name) for name in PACKAGES}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2))
    (made / ".lock").unlink(missing_ok=True)
    (variant / "__init__.py").write_text(_INIT.format(builds=BUILDS))
    targets = sorted({Artefact.load(file).target for file in files})
    archs = [backend.archs[target] for target in targets]
    metadata = {
        "id": f"_{unique}",
        "name": NAME,
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend.name} | ({"archs": archs} if backend.name != "cpu" else {}),
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2))
    card = _CARD.format(version=fly.__version__, archs=", ".join(targets), count=len(files))
    (into / "README.md").write_text(card)
    return variant


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Build a kernel for Hugging Face's hub.",
        epilog="Other arguments are those of python -m fly prebuild, such as --spec, --head-dim, --dtype, --jobs.",
    )
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="cuda", help="(cuda)")
    parser.add_argument("--arch", action="append", choices=TARGETS, help="targets (sm_90a, or gfx950)")
    parser.add_argument("--receipt", choices=tuple(RECEIPTS), help="which builds, without --spec (pytorch)")
    parser.add_argument("--into", type=Path, default=Path("dist/hub"), metavar="FOLDER", help="(dist/hub)")
    options, more = parser.parse_known_args(argv)
    backend = BACKENDS[options.backend]
    archs = options.arch or [list(backend.archs)[-1]]
    wrong = [arch for arch in archs if arch not in backend.archs]
    if wrong:
        parser.error(f"--arch {wrong[0]} with --backend {backend.name}; accepted: {', '.join(backend.archs)}")
    asked = [f"--arch={arch}" for arch in archs]
    if options.receipt or "--spec" not in more:
        asked.append(f"--receipt={options.receipt or 'pytorch'}")
    try:
        variant = build(options.into.absolute(), backend, [*asked, *more])
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    print(f"{variant}: kernels.get_local_kernel({str(options.into.absolute())!r}) loads it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
