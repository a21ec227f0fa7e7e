"""Builds that were made ahead: a folder from which launches take their code, so that nothing is traced or compiled.

A folder holds `manifest.json`, which says what the builds were made of, and artefacts in
`<kernel>-<digest>/<digest>.fly`: the first digest is of the kernel, its static parameters, target and block, the
second of what its arguments are. `FLY_PREBUILT` names the one that launches use, `python -m fly prebuild` fills it.

The disk cache is keyed by what was traced, which takes a compiler to find out. A folder instead is trusted as long as
the sources of fly and of the kernels' package are those that it was made from, which their digests tell.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fly import __version__, config
from fly.backends import records
from fly.backends.artefact import Artefact
from fly.errors import ArtefactError, ConfigError, MissingBuildError
from fly.lang.signature import ScalarSpec, Spec, TensorSpec
from fly.runtime.cache import cache_key, try_lock, write_whole
from fly.runtime.device import Dim3
from fly.runtime.exported import assumptions, meets
from fly.runtime.identity import identity_of, place_of

if TYPE_CHECKING:
    from fly.runtime.launch import Binding

# the folder of a package that this is a part of, and that brings its builds along
own_folder: Path | None = None

MANIFEST = "manifest.json"
SCHEMA = 1
_MOST_BYTES = 1 << 20  # of a manifest
_DIGITS = 20
_RUNNING = ("emulator", "simulator")  # of fly
_READABLE = 0o644  # files that other users take


@dataclass(frozen=True)
class Build:
    """One configuration of a kernel for a target, an architecture; two are equal where `key` is."""

    kernel: Any
    specs: tuple[Spec, ...]
    statics: Mapping[str, Any]
    target: str
    block: Dim3

    @classmethod
    def of(cls, binding: Binding, target: str) -> Build:
        """What a launch that was bound takes on a target."""
        kernel: Any = binding.kernel
        return cls(kernel, binding.specs, kernel.bind_statics(binding.statics), target, binding.block)

    @functools.cached_property
    def family(self) -> str:
        """What builds share that differ in what they assume of their arguments; a folder's name.

        Raises:
            ArgumentError: a static value that has no identity outside of this process.
        """
        parts = {
            "kernel": identity_of(self.kernel, f"kernel {self.kernel.name}"),
            "target": self.target,
            "block": repr(self.block),
        }
        for name, value in self.statics.items():
            parts[f"static {name}"] = identity_of(value, f"static parameter {name!r} of kernel {self.kernel.name}")
        return f"{self.kernel.name}-{cache_key(parts)[:_DIGITS]}"

    @functools.cached_property
    def key(self) -> str:
        """The build's file, relative to a folder, without its suffix; raises as `family` does."""
        described = [None if spec is None else [type(spec).__name__, asdict(spec)] for spec in self.specs]
        return f"{self.family}/{cache_key({'arguments': json.dumps(described)})[:_DIGITS]}"

    @property
    def package(self) -> str:
        """The package that the kernel belongs to."""
        return place_of(self.kernel.function).partition(".")[0]

    def __str__(self) -> str:
        statics = ", ".join(f"{name}={_told(value)}" for name, value in self.statics.items())
        arguments = ", ".join(map(_argument, self.specs))
        return f"{self.kernel.name} for {self.target}, block {self.block}, ({statics}), arguments ({arguments})"


def _told(value: Any) -> str:
    """A static value for people: of a dataclass, the fields that have not their defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    own = ((f.name, getattr(value, f.name), f.default) for f in fields(value))
    told = ", ".join(f"{name}={_told(of)}" for name, of, default in own if default is MISSING or of != default)
    return f"{type(value).__name__}({told})"


def _argument(spec: Spec) -> str:
    """An argument for people: f32, bf16[4] with the bytes that divide its address and strides, a tensor map's box."""
    if spec is None:
        return "none"
    if isinstance(spec, TensorSpec):
        strided = "" if spec.unit_stride else ", strided"
        return f"{spec.dtype}[{spec.rank}] aligned to {spec.alignment}{strided}"
    return spec.dtype if isinstance(spec, ScalarSpec) else f"map of {spec.dtype} {spec.box}, swizzle {spec.swizzle}"


@functools.cache
def source_digest(package: str) -> str:
    """The SHA-256 of the source files of a package, or of a module, that is loaded; `place_of` names it."""
    module = sys.modules[_prefix() + package]
    paths = getattr(module, "__path__", None)
    if paths is None:
        return hashlib.sha256(_read(module)).hexdigest()
    return digest_of(Path(next(iter(paths))))


def digest_of(directory: Path) -> str:
    """The SHA-256 of a package's source files, by their names and contents; without those that run what was built."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        if directory.name == "fly" and path.relative_to(directory).parts[0] in _RUNNING:
            continue
        name, data = path.relative_to(directory).as_posix().encode(), path.read_bytes()
        digest.update(len(name).to_bytes(8, "little") + name + len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _read(module: ModuleType) -> bytes:
    file = getattr(module, "__file__", None)
    return Path(file).read_bytes() if file else b""


def _prefix() -> str:
    """What stands before `fly` where it is a part of another package."""
    return __name__.removesuffix("fly.runtime.prebuilt")


class Folder:
    """A folder of builds.

    Raises:
        ConfigError: its manifest is damaged, or of another version.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._manifest = self._read_manifest()
        self._checked: set[str] = set()

    def find(self, build: Build) -> Artefact:
        """The code of a build, or of one that assumes less of its arguments.

        Raises:
            MissingBuildError: there is none.
            ConfigError: there is no such folder, or it was made from other sources.
            ArtefactError: the file is damaged.
        """
        self._check(build.package)
        exact = self.path / f"{build.key}.fly"
        candidates = [exact] if exact.exists() else sorted((self.path / build.family).glob("*.fly"))
        fitting = []
        for path in candidates:
            artefact = Artefact.load(path)
            assumed = assumptions(artefact)
            if len(assumed) == len(build.specs) and all(map(meets, build.specs, assumed)):
                fitting.append((sum(getattr(spec, "alignment", 0) for spec in assumed), path.name, artefact))
        if not fitting:
            instead = ", or unset FLY_PREBUILT" if self.path != own_folder else ""
            raise MissingBuildError(
                f"{self.path}, which has builds that were made ahead, has none of {build}; nothing is compiled: "
                f"describe the call in a file and run python -m fly prebuild --spec FILE --into {self.path}{instead}"
            )
        _, _, artefact = max(fitting, key=lambda found: found[:2])
        if (artefact.kernel, artefact.target, tuple(artefact.block)) != (
            build.kernel.name,
            build.target,
            build.block,
        ):
            raise ArtefactError(f"{exact.parent}: holds a build of {artefact.kernel} for {artefact.target}")
        return artefact

    def has(self, build: Build) -> bool:
        """Whether there is a file of exactly this build."""
        return (self.path / f"{build.key}.fly").exists()

    def add(self, build: Build, make: Callable[[], Artefact]) -> bool:
        """Put a build in, made by `make`; False where another process is making it now, which is not waited for.

        A process that dies leaves nothing that stands in the way: its lock goes with it.

        Raises:
            Exception: whatever `make` raises.
        """
        place = self.path / f"{build.key}.fly"
        place.parent.mkdir(parents=True, exist_ok=True)
        with try_lock(place.with_suffix(".lock")) as locked:
            if locked and not place.exists():
                write_whole(place, make().to_bytes(), _READABLE)
            return locked

    def begin(self, sources: Mapping[str, str], toolchain: str, command: str) -> None:
        """Make the folder, or empty one that was made from other sources, before builds are added.

        `sources`: digests of fly and of the packages whose kernels are built, by name (`source_digest`); `command`:
        the command line that makes these builds.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self._read_manifest() or {"sources": {}, "commands": [], "toolchain": toolchain}
            stale = {name for name, digest in known["sources"].items() if sources.get(name, digest) != digest}
            if stale or known["toolchain"] != toolchain:
                for path in self.path.glob("*/*.fly"):
                    path.unlink(missing_ok=True)
                known = {"sources": {}, "commands": []}
            self._manifest = {
                "schema": SCHEMA,
                "fly": __version__,
                "toolchain": toolchain,
                "sources": dict(sorted((known["sources"] | sources).items())),
                "commands": [*dict.fromkeys([*known["commands"], command])],
            }
            write_whole(self.path / MANIFEST, json.dumps(self._manifest, indent=2).encode(), _READABLE)

    def _read_manifest(self) -> Any:
        """What the manifest says; None where there is none."""
        path = self.path / MANIFEST
        try:
            data = records.parse(records.read_regular(path, _MOST_BYTES))
            found = records.record("manifest", data, ("schema", "fly", "toolchain", "sources", "commands"))
            records.record("sources", found["sources"])
            records.array("commands", found["commands"], 0, _MOST_BYTES)
        except OSError:
            return None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; remove the folder, and make it again") from None
        if found["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {found['schema']}; this fly reads {SCHEMA}: make the folder again")
        return found

    def _check(self, package: str) -> None:
        """Raise unless the builds of a package were made from the sources that are here."""
        if package in self._checked:
            return
        if self._manifest is None:
            raise ConfigError(
                f"FLY_PREBUILT={self.path}: there is no {MANIFEST} in it; accepted: a folder made by "
                "python -m fly prebuild --into FOLDER"
            )
        for name in ("fly", package):
            digest = self._manifest["sources"].get(name)
            if digest is not None and digest != source_digest(name):
                again = "; ".join(map(str, self._manifest["commands"]))
                raise ConfigError(
                    f"FLY_PREBUILT={self.path} was made by fly {self._manifest['fly']} from other sources of {name} "
                    f"than those that are installed; make it again where the compiler is: {again}"
                )
        self._checked.add(package)


def folder_in_use() -> Folder | None:
    """The folder that launches take their code from; None where they compile.

    Raises:
        ConfigError: its manifest is damaged, or of another version.
    """
    path = own_folder or config.PREBUILT.get()
    return None if path is None else _folder_at(path)


@functools.lru_cache(maxsize=4)
def _folder_at(path: Path) -> Folder:
    return Folder(path)
