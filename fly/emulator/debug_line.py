"""Source lines of instructions: the DWARF version 5 (and 2 to 4) line table of a code object."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fly.emulator.elf import CodeObject


@dataclass
class LineTable:
    """Rows (address, file, line), ascending by address."""

    addresses: list[int] = field(default_factory=list)
    rows: list[tuple[str, int]] = field(default_factory=list)

    def find(self, address: int) -> str:
        """`file:line` of the row that covers an address, or an empty string."""
        at = bisect.bisect_right(self.addresses, address) - 1
        if at < 0 or not self.rows[at][1]:
            return ""
        return f"{self.rows[at][0]}:{self.rows[at][1]}"


class _Cursor:
    def __init__(self, data: bytes, at: int = 0):
        self.data, self.at = data, at

    def take(self, size: int, signed: bool = False) -> int:
        value = int.from_bytes(self.data[self.at : self.at + size], "little", signed=signed)
        self.at += size
        return value

    def uleb(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end + 1
        return text


def _section(code: CodeObject, name: str) -> bytes:
    offset, size, _ = code.sections.get(name, (0, 0, 0))
    return code.data[offset : offset + size]


def _entries(cursor: _Cursor, strings: bytes, line_strings: bytes) -> list[str]:
    """A version 5 directory or file table: the path of each entry."""
    formats = [(cursor.uleb(), cursor.uleb()) for _ in range(cursor.take(1))]
    names = []
    for _ in range(cursor.uleb()):
        name = ""
        for content, form in formats:
            if form == 0x08:
                value: object = cursor.string()
            elif form in (0x0E, 0x1F):
                value = _Cursor(line_strings if form == 0x1F else strings, cursor.take(4)).string()
            elif form == 0x1E:
                value = cursor.take(16)
            else:
                value = cursor.uleb() if form == 0x0F else cursor.take({0x0B: 1, 0x05: 2, 0x06: 4}[form])
            if content == 1:
                name = str(value)
        names.append(name)
    return names


def read_lines(code: CodeObject) -> LineTable:
    """The line table of a code object; empty without `.debug_line`."""
    data = _section(code, ".debug_line")
    strings, line_strings = _section(code, ".debug_str"), _section(code, ".debug_line_str")
    rows: list[tuple[int, str, int]] = []
    cursor = _Cursor(data)
    while cursor.at + 4 < len(data):
        length = cursor.take(4)
        end = cursor.at + length
        _unit(cursor, end, strings, line_strings, rows)
        cursor.at = end
    rows.sort(key=lambda r: r[0])
    return LineTable([r[0] for r in rows], [(r[1], r[2]) for r in rows])


def _unit(cursor: _Cursor, end: int, strings: bytes, line_strings: bytes, rows: list[tuple[int, str, int]]) -> None:
    version = cursor.take(2)
    if version >= 5:
        cursor.at += 2
    header = cursor.take(4)
    program = cursor.at + header
    minimum = cursor.take(1)
    if version >= 4:
        cursor.at += 1
    cursor.take(1)
    base, span, first = cursor.take(1, True), cursor.take(1), cursor.take(1)
    lengths = [cursor.take(1) for _ in range(first - 1)]
    if version >= 5:
        _entries(cursor, strings, line_strings)
        files = _entries(cursor, strings, line_strings)
    else:
        while cursor.data[cursor.at]:
            cursor.string()
        cursor.at += 1
        files = [""]
        while cursor.data[cursor.at]:
            files.append(cursor.string())
            cursor.uleb(), cursor.uleb(), cursor.uleb()
    cursor.at = program
    address, file, line = 0, 1, 1

    def emit() -> None:
        rows.append((address, files[file] if file < len(files) else "", line))

    while cursor.at < end:
        op = cursor.take(1)
        if op >= first:
            address += (op - first) // span * minimum
            line += base + (op - first) % span
            emit()
        elif op == 0:
            size = cursor.uleb()
            after = cursor.at + size
            extended = cursor.take(1)
            if extended == 1:
                rows.append((address, "", 0))
                address, file, line = 0, 1, 1
            elif extended == 2:
                address = cursor.take(size - 1)
            cursor.at = after
        elif op == 1:
            emit()
        elif op == 2:
            address += cursor.uleb() * minimum
        elif op == 3:
            line += cursor.sleb()
        elif op == 4:
            file = cursor.uleb()
        elif op == 8:
            address += (255 - first) // span * minimum
        elif op == 9:
            address += cursor.take(2)
        else:
            for _ in range(lengths[op - 1]):
                cursor.uleb()
