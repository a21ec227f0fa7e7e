"""What `fly.print` and `fly.check` say: the texts of a kernel's messages, and the log that it writes their values to.

No MLIR here: an exported kernel is launched with this module, which holds the log's format for both sides.

The log is a header of four 64-bit words, then records of 32-bit words, one a line: the message's number plus one, the
block's index along x, y and z, the thread's linear index in its block, and the values, element after element.
"""

from __future__ import annotations

import json
import string
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fly.errors import ArtefactError, FlyError
from fly.lang.signature import Field

LOG_FIELD = Field("fly.log", "ptr")
"""The last flat argument of a kernel with messages: the log's address."""

METADATA_KEY = "messages"
# byte offsets in the header: words that records took, lines that did not fit, checks that failed, words there are
USED, DROPPED, FAILED, CAPACITY, HEADER_BYTES = 0, 8, 16, 24, 32
RECORD_WORDS = 5  # before the values
KINDS = ("print", "check")


def _bf16(x: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    rounded: float = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]
    return rounded


def _rounded(code: str) -> Callable[[float], float]:
    return lambda x: struct.unpack(code, struct.pack(code, x))[0]


@dataclass(frozen=True)
class _Kind:
    """How values of one element type are logged: struct code, and what rounds a number to it (floats)."""

    code: str
    round: Callable[[float], float] | None = None


LOGGED: Mapping[str, _Kind] = {
    **{name: _Kind("<i") for name in ("i8", "i16", "i32")},
    "i1": _Kind("<?xxx"),
    "i64": _Kind("<q"),
    "f64": _Kind("<d", float),
    "f32": _Kind("<f", _rounded("<f")),
    "f16": _Kind("<f", _rounded("<e")),
    "bf16": _Kind("<f", _bf16),
    "f8e4m3": _Kind("<f", _bf16),
    "f8e5m2": _Kind("<f", _bf16),
    "f8e4m3fnuz": _Kind("<f", _bf16),
}


class ShownFloat(float):
    """A float that shows itself with as few digits as tell it from its neighbours of its own type."""

    dtype = "f64"

    @classmethod
    def of(cls, value: float, dtype: str) -> ShownFloat:
        shown = cls(value)
        shown.dtype = dtype
        return shown

    def __str__(self) -> str:
        round_ = LOGGED[self.dtype].round
        assert round_ is not None
        for digits in range(1, 17):
            text = f"{float(self):.{digits}g}"
            try:
                if round_(float(text)) == self:
                    break
            except (OverflowError, struct.error):  # the digits are of a number past the largest
                continue
        else:
            text = repr(float(self))
        return repr(float(text))

    __repr__ = __str__

    def __format__(self, specification: str) -> str:
        return format(float(self), specification) if specification else str(self)


class ShownVector(tuple[Any, ...]):
    """Elements that are formatted one by one: `{:.2f}` gives [1.00, 2.00]."""

    def __format__(self, specification: str) -> str:
        return "[" + ", ".join(format(element, specification) for element in self) + "]"

    def __str__(self) -> str:
        return format(self, "")

    __repr__ = __str__


@dataclass(frozen=True)
class Logged:
    """A run-time value of a message: its element type, and its length if it is a vector."""

    dtype: str
    length: int | None = None

    @property
    def words(self) -> int:
        """32-bit words in a record."""
        return struct.calcsize(LOGGED[self.dtype].code) // 4 * (self.length or 1)

    def read(self, data: bytes) -> Any:
        """The value that `words` words hold."""
        kind = LOGGED[self.dtype]
        found = [x for (x,) in struct.iter_unpack(kind.code, data)]
        if kind.round is not None:
            found = [ShownFloat.of(x, self.dtype) for x in found]
        return found[0] if self.length is None else ShownVector(found)


@dataclass(frozen=True)
class Message:
    """One call of `fly.print` or `fly.check`: where it stands, its text, and its values.

    A value is a `Logged`, or a bool, int, float or string that was known when the kernel was compiled.
    """

    kind: str
    at: str
    text: str
    values: tuple[Any, ...]

    @property
    def words(self) -> int:
        """Words of its records, values included."""
        return RECORD_WORDS + sum(value.words for value in self.values if isinstance(value, Logged))

    def line(self, data: bytes) -> str:
        """The text with the values that a record holds after its first words."""
        values, at = [], 0
        for value in self.values:
            if isinstance(value, Logged):
                values.append(value.read(data[at : at + 4 * value.words]))
                at += 4 * value.words
            else:
                values.append(value)
        return self.text.format(*values)

    def problem(self) -> str | None:
        """What is wrong with the text for these values, None where nothing is."""
        try:
            places = [name for _, name, _, _ in string.Formatter().parse(self.text) if name is not None]
            self.line(bytes(4 * self.words))
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        if len(places) < len(self.values):
            return f"{len(places)} places for {len(self.values)} values"
        return None


def to_text(messages: Sequence[Message]) -> str:
    """The messages of a kernel as an artefact keeps them."""
    rows = [[m.kind, m.at, m.text, [asdict(v) if isinstance(v, Logged) else v for v in m.values]] for m in messages]
    return json.dumps(rows)


def from_text(text: str, kernel: str) -> tuple[Message, ...]:
    """What `to_text` wrote.

    Raises:
        ArtefactError: it did not write this.
    """
    try:
        return tuple(_read(*row) for row in json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError, FlyError) as error:
        raise ArtefactError(f"{kernel}: malformed messages: {error}") from None


def _read(kind: str, at: str, text: str, values: list[Any]) -> Message:
    read = tuple(Logged(**v) if isinstance(v, dict) else v for v in values)
    lengths = [v.length for v in read if isinstance(v, Logged)]
    whole = all(n is None or (type(n) is int and 0 < n <= 1 << 16) for n in lengths)
    message = Message(kind, at, text, read)
    if kind not in KINDS or not (type(at) is type(text) is str) or not whole or message.problem() is not None:
        raise ValueError(f"{[kind, at, text]}")
    return message
