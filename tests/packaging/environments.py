"""Environments outside of the checkout, without downloading again what the running one has."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import importlib.metadata
import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).with_name("peers.txt")
CONSTRAINTS = ROOT / "constraints.txt"


def distributions(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """The named distributions of the running environment and what they require, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = [Requirement(name) for name in names]
    while wanted:
        requirement = wanted.pop()
        if requirement.name in found and not requirement.extras:
            continue
        distribution = found[requirement.name] = importlib.metadata.distribution(requirement.name)
        for text in distribution.requires or ():
            needed = Requirement(text)
            extras = ("", *requirement.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                wanted.append(needed)
    return found


def requirements_of(*extras: str) -> list[str]:
    """What `pyproject.toml` requires, with some extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for text in itertools.chain.from_iterable(project["optional-dependencies"][extra] for extra in extras):
        requirement = Requirement(text)
        found += (
            requirements_of(*requirement.extras)[len(project["dependencies"]) :] if requirement.extras else [text]
        )
    return found


def link_packages(directory: Path, names: Iterable[str]) -> Path:
    """A directory of links to distributions of the running environment and to what they require."""
    directory.mkdir(parents=True)
    for distribution in distributions(names).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            source, link = Path(str(distribution.locate_file(top))), directory / top
            if source.exists() and not link.exists():
                link.symlink_to(source.absolute())
    return directory


@dataclass(frozen=True)
class Environment:
    """A virtual environment; programs run in `home`, which is outside of the checkout."""

    path: Path
    home: Path

    @classmethod
    def make(cls, path: Path, *packages: Path) -> Environment:
        """A new one, which also sees the packages of some directories."""
        venv.create(path, symlinks=True)
        made = cls(path, path / "home")
        made.home.mkdir()
        (made.packages / "seen.pth").write_text("\n".join(map(str, packages)))
        return made

    @property
    def packages(self) -> Path:
        """Its own site-packages."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.path), "platbase": str(self.path)}))

    def _run(self, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        environment |= {"PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.home / "hf"), **variables}
        return subprocess.run(
            command, cwd=self.home, env=environment, capture_output=True, text=True, check=False, timeout=900
        )

    def pip(self, *arguments: str) -> None:
        """Run the running environment's pip on this one."""
        done = self._run([sys.executable, "-m", "pip", "--python", str(self.path), *arguments])
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, wheel: Path) -> None:
        """Install a wheel without what it requires."""
        self.pip("install", "--quiet", "--no-deps", "--no-compile", str(wheel))

    def uninstall(self, name: str) -> None:
        """Uninstall a distribution."""
        self.pip("uninstall", "--quiet", "--yes", name)

    def python(self, program: str, **variables: str) -> str:
        """What a program prints; fails if the program does."""
        done = self._run([str(self.path / "bin" / "python"), "-c", program], **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def damage(self, name: str) -> list[str]:
        """Files of an installed distribution that are missing or have changed; the distribution must be there."""
        (found,) = importlib.metadata.distributions(name=name, path=[str(self.packages)])
        damaged = []
        for file in found.files:
            path = Path(str(found.locate_file(file)))
            if not path.exists():
                damaged.append(str(file))
            elif file.hash is not None:
                digest = hashlib.new(file.hash.mode, path.read_bytes()).digest()
                if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                    damaged.append(str(file))
        return damaged


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def peers(cache: Path) -> tuple[Path, Path, Path]:
    """Hugging Face's packages, kept in `cache` until their requirements or the running environment's packages change.

    The first call on a machine takes them from the package index.

    Returns:
        (packages with all that `peers.txt` requires but for `kernels`, packages that fly requires, kernels' wheel).
    """
    needed = ["torch", *requirements_of("emulator")]
    versions = sorted(f"{name}=={found.version}" for name, found in distributions(needed).items())
    stamp = "\n".join([sys.version, sys.prefix, PEERS.read_text(), CONSTRAINTS.read_text(), *versions])
    root, stamped = cache / "environment", cache / "environment" / "complete"
    with _locked(cache / "lock"):
        if not stamped.exists() or stamped.read_text() != stamp:
            shutil.rmtree(root, ignore_errors=True)
            linked = link_packages(root / "linked", needed)
            made = Environment.make(root / "venv", linked)
            limits = ("--quiet", "-c", str(CONSTRAINTS))
            made.pip("install", *limits, "--no-compile", "-r", str(PEERS))
            (pinned,) = (line for line in PEERS.read_text().splitlines() if line.startswith("kernels"))
            made.pip("download", *limits, "--no-deps", "-d", str(root / "wheels"), pinned)
            made.uninstall("kernels")
            stamped.write_text(stamp)
    (wheel,) = (root / "wheels").glob("*.whl")
    return Environment(root / "venv", root).packages, root / "linked", wheel
