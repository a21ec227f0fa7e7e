"""Filling a folder of builds (`fly.runtime.prebuilt`), by any number of processes that share the work.

Every process goes through all builds. What another one is making it passes over and looks at again later, so that
each build is made once however many come, and what a process that died has left is made by the others.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fly.backends.artefact import Artefact
from fly.errors import FlyError
from fly.runtime.cache import try_lock
from fly.runtime.prebuilt import Build, Folder

_WAIT_SECONDS = 0.05  # between looks at what others make
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Failure:
    """A build that does not compile, and why."""

    build: Build
    error: FlyError


def unique(builds: Sequence[Build]) -> tuple[Build, ...]:
    """One of each, in order."""
    return tuple({build.key: build for build in builds}.values())


def fill(
    folder: Folder,
    builds: Sequence[Build],
    make: Callable[[Build], Artefact],
    advance: Advance = lambda done: None,
    start: int | None = None,
) -> list[Failure]:
    """Return when the folder has all of these builds, or they have failed; `make` compiles one.

    `advance` is told how many are done, every time that there are more; `start`: the place in the row where this
    process begins, by default one of its own.
    """
    pending, failed, done = deque(enumerate(builds)), [], 0
    pending.rotate(-(os.getpid() if start is None else start) % max(len(builds), 1))
    while pending:
        waited = True
        for _ in range(len(pending)):
            place, build = pending.popleft()
            try:
                if not folder.has(build) and not folder.add(build, partial(make, build)):
                    pending.append((place, build))
                    continue
            except FlyError as error:
                failed.append((place, Failure(build, error)))
            waited, done = False, done + 1
            advance(done)
        if waited and pending:
            time.sleep(_WAIT_SECONDS)
    return [failure for _, failure in sorted(failed, key=lambda found: found[0])]


def compiled(build: Build, *, cubin: bool = False) -> Artefact:
    """A build's code as launches take it, from the disk cache or compiled: for NVIDIA PTX, or a cubin by ptxas.

    Raises:
        AuthorError, CompileError, SharedMemoryError: it does not compile.
        DeviceError: ptxas is not installed.
    """
    from fly.runtime.compile import compile_kernel

    artefact = compile_kernel(build.kernel, build.specs, build.statics, build.target, build.block, assembly=False)
    if cubin and artefact.target.startswith("sm_"):
        from fly.backends.nvvm.codegen import assemble

        return replace(artefact, binary=assemble(artefact.binary.decode(), artefact.target), isa="")
    return replace(artefact, isa="")


@contextmanager
def progress_bar(folder: Folder, builds: Sequence[Build]) -> Iterator[Advance]:
    """A function that shows how many of these are done, in the first process that comes to a folder which lacks some.

    On a terminal where tqdm is installed, a bar; else a line for every tenth of them, on stderr.
    """
    total = len(builds)
    with try_lock(folder.path / ".progress.lock") as first:
        if not first or all(map(folder.has, builds)):
            yield lambda done: None
            return
        try:
            from tqdm import tqdm
        except ImportError:
            yield _lines(total)
            return
        if not sys.stderr.isatty():
            yield _lines(total)
            return
        with tqdm(total=total, unit="build", file=sys.stderr) as bar:

            def advance(done: int) -> None:
                bar.update(done - bar.n)

            yield advance


def _lines(total: int) -> Advance:
    shown: set[int] = set()

    def advance(done: int) -> None:
        tenth = done * 10 // total
        if tenth not in shown:
            shown.add(tenth)
            print(f"{done} of {total} builds", file=sys.stderr, flush=True)

    return advance


def settings_of(build: Build) -> Mapping[str, Any]:
    """A build for people: kernel, target, block, and static parameters as text."""
    return {
        "kernel": build.kernel.name,
        "target": build.target,
        "block": list(build.block),
        "statics": {name: repr(value) for name, value in build.statics.items()},
        "file": f"{build.key}.fly",
    }
