"""Reading what a file says: JSON whose types, ranges and sizes are all checked, and files that are only files."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from fly.errors import ArgumentError

_SURROGATE = re.compile("[\ud800-\udfff]")  # what JSON can spell and UTF-8 cannot
_SHOWN = 60  # characters of a value in a message


def read_regular(path: str | os.PathLike[str], max_bytes: int, *, follow: bool = True) -> bytes:
    """The content of a regular file of at most `max_bytes`; waits for no writer of a pipe.

    `follow`: also of the file that a symbolic link names.

    Raises:
        OSError: the file cannot be read.
        ArgumentError: not a regular file, or a larger one.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ArgumentError("not a regular file")
        if status.st_size > max_bytes:
            raise ArgumentError(f"{status.st_size} bytes; accepted: at most {max_bytes}")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(handle)


def parse(text: bytes | str) -> Any:
    """A JSON text in UTF-8.

    Raises:
        ArgumentError: not JSON, or nested too deep.
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ArgumentError("nested too deep") from None
    except ValueError as error:
        raise ArgumentError(f"not JSON: {error}") from None


def _wrong(what: str, value: object, accepted: str) -> ArgumentError:
    text = repr(value)
    shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
    return ArgumentError(f"{what} is {shown}; accepted: {accepted}")


def text(what: str, value: object) -> str:
    """A string that UTF-8 can spell, without zero characters.

    Raises:
        ArgumentError: anything else.
    """
    if type(value) is not str or "\0" in value or _SURROGATE.search(value):
        raise _wrong(what, value, "text")
    return value


def whole(what: str, value: object, low: int, high: int) -> int:
    """An int from `low` to `high`.

    Raises:
        ArgumentError: anything else.
    """
    if type(value) is not int or not low <= value <= high:
        raise _wrong(what, value, f"an int from {low} to {high}")
    return value


def truth(what: str, value: object) -> bool:
    """True or false.

    Raises:
        ArgumentError: anything else.
    """
    if type(value) is not bool:
        raise _wrong(what, value, "true or false")
    return value


def array(what: str, value: object, low: int, high: int) -> Sequence[Any]:
    """A list of `low` to `high` values.

    Raises:
        ArgumentError: anything else.
    """
    if type(value) is not list or not low <= len(value) <= high:
        raise _wrong(what, value, f"a list of {low} to {high}")
    return value


def record(what: str, value: object, names: Sequence[str] | None = None) -> Mapping[str, Any]:
    """An object with exactly these names; any names where None are given.

    Raises:
        ArgumentError: anything else.
    """
    if type(value) is not dict or (names is not None and set(value) != set(names)):
        raise _wrong(what, value, "an object" if names is None else f"an object with {', '.join(names)}")
    return value
