"""The disk cache of compiled kernels: safe under many processes, verified on read, bounded in size.

An entry is `<directory>/<first two digits of the key>/<key>.fly`: its key in hex, then an artefact file. Entries are
written beside their place and renamed into it, so a reader sees a whole entry or none. The key finds an entry that
was copied over another; the artefact's checksum, and a check of every value that it holds, find any other damage.
Whatever is in doubt is built again. Only the building of an entry takes a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fly import config
from fly.backends.artefact import MAX_BYTES, Artefact
from fly.backends.records import read_regular
from fly.errors import ArgumentError, ArtefactError

_KEY_BYTES = 64
_STALE_SECONDS = 3600  # a temporary file this old was left by a process that died

_warned: set[Path] = set()


def cache_key(parts: Mapping[str, bytes | str]) -> str:
    """The hex SHA-256 of named parts, whatever their order; text and bytes never give the same key."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        value = parts[name]
        tag, data = (b"s", value.encode()) if isinstance(value, str) else (b"b", bytes(value))
        for piece in (name.encode(), tag, data):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    return digest.hexdigest()


class DiskCache:
    """Artefacts under `directory`, at most `max_bytes` of them; the least recently used go first.

    A directory that cannot be written to is used for reading only, with one warning a process.
    """

    def __init__(self, directory: str | os.PathLike[str], max_bytes: int):
        self.directory = Path(directory)
        self.max_bytes = max_bytes

    @classmethod
    def from_environment(cls) -> DiskCache | None:
        """The cache that `FLY_CACHE_DIR` and `FLY_CACHE_SIZE_MB` describe; None when `FLY_CACHE=0`."""
        return cls(config.CACHE_DIR.get(), config.CACHE_SIZE.get()) if config.CACHE.get() else None

    def get(self, key: str) -> Artefact | None:
        """The artefact stored under `key`, or None; anything but an intact entry of that key is removed.

        Raises:
            ArgumentError: the key is not a SHA-256 in lower-case hex.
        """
        path = self._path(key)
        try:
            data = read_regular(path, MAX_BYTES + _KEY_BYTES, follow=False)
            if data[:_KEY_BYTES] != key.encode():
                raise ArtefactError(f"{path}: an entry of another key")
            artefact = Artefact.from_bytes(data[_KEY_BYTES:], str(path))
        except OSError:
            return None
        except (ArgumentError, ArtefactError):
            _remove(path)
            return None
        with contextlib.suppress(OSError):  # evicted meanwhile, or a read-only cache
            os.utime(path)
        return artefact

    def put(self, key: str, artefact: Artefact) -> None:
        """Store an artefact under `key`, then evict down to the bound.

        Raises:
            ArgumentError: the key is not a SHA-256 in lower-case hex.
        """
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, key.encode() + artefact.to_bytes())
        except OSError as error:
            self._warn(error)
            return
        self._evict()

    def get_or_build(
        self, key: str, build: Callable[[], Artefact], fits: Callable[[Artefact], bool] = lambda _: True
    ) -> Artefact:
        """The artefact under `key`; where there is none that `fits`, one process builds it while the others wait.

        Raises:
            ArgumentError: the key is not a SHA-256 in lower-case hex.
            Exception: whatever `build` raises; the next caller then builds.
        """
        artefact = self.get(key)
        if artefact is not None and fits(artefact):
            return artefact
        with self._building(key):
            artefact = self.get(key)
            if artefact is None or not fits(artefact):
                artefact = build()
                self.put(key, artefact)
            return artefact

    def _path(self, key: str) -> Path:
        if len(key) != 64 or not set(key) <= set("0123456789abcdef"):
            raise ArgumentError(f"cache key {key!r}; accepted: a SHA-256 in lower-case hex")
        return self.directory / key[:2] / f"{key}.fly"

    @contextlib.contextmanager
    def _building(self, key: str) -> Iterator[None]:
        """Hold the key's advisory lock; where there are no locks, work may be repeated."""
        path = self._path(key).with_suffix(".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = _lock(path)
        except OSError as error:
            self._warn(error)
            yield
            return
        try:
            yield
        finally:
            _unlock(path, handle)

    def _evict(self) -> None:
        entries = []
        for path in self.directory.glob("??/*"):
            try:
                status = path.lstat()
            except OSError:
                continue  # another process evicted it
            if path.suffix == ".fly":
                entries.append((status.st_mtime_ns, status.st_size, path))
            elif time.time() - status.st_mtime > _STALE_SECONDS and path.suffix == ".tmp":
                with contextlib.suppress(OSError):
                    path.unlink()
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _warn(self, error: OSError) -> None:
        if self.directory in _warned:
            return
        _warned.add(self.directory)
        warnings.warn(
            f"compiled kernels are not kept: the cache directory {self.directory} cannot be written to "
            f"({error.strerror or error}); set FLY_CACHE_DIR to another directory, or FLY_CACHE=0",
            RuntimeWarning,
            stacklevel=4,
        )


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file, so that whoever reads it finds what was there before or all of this."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove(path: Path) -> None:
    """What is in an entry's place, if it can be removed: a file, a link, a pipe, or an empty directory."""
    with contextlib.suppress(OSError):
        try:
            path.unlink()
        except IsADirectoryError:
            path.rmdir()


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Hold a file's advisory lock, if nobody else does: whether it is held. It goes with a process that dies."""
    try:
        handle = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        _unlock(path, handle)


def _unlock(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()  # while locked: whoever waits on it sees the file gone and takes a new one
    fcntl.flock(handle, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too
    os.close(handle)


def _lock(path: Path, how: int = fcntl.LOCK_EX) -> int:
    """Open and lock `path`; its previous holder may have removed it while we waited, then try again."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, how)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def get_or_build(
    key: str, build: Callable[[], Artefact], fits: Callable[[Artefact], bool] = lambda _: True
) -> Artefact:
    """`DiskCache.get_or_build` on the cache that the environment describes; just `build()` when it is off."""
    cache = DiskCache.from_environment()
    return build() if cache is None else cache.get_or_build(key, build, fits)
