"""LDS instructions (CDNA3 ISA, sections 11 and 12.11; ds_read_*_tr_*: CDNA4 ISA, section 11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.decode import M0, Instruction
from fly.emulator.memory import ATOMICS, packed_add, rounds
from fly.emulator.native import gather, gather_transposed
from fly.emulator.operands import store, unknown, vector_row
from fly.emulator.state import Group

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

Run = Callable[[Group], None]
_LANE = np.arange(64)


def place(
    g: Group,
    inst: Instruction,
    address: np.ndarray,
    size: int,
    mask: np.ndarray | None,
    write: bool,
    dma: bool = False,
) -> tuple[np.ndarray, np.ndarray | None]:
    """(byte index in the batch's LDS, active lanes in bounds) of LDS addresses uint32 (W, 64).

    Lanes beyond the workgroup's allocation read 0 and write nothing, as on hardware, and are reported.
    """
    machine = g.machine
    if machine.lds_observer is not None:
        machine.lds_observer(inst, address, size, mask, write)
    limit = machine.lds_bytes
    if limit < size or int(address.max()) > limit - size:
        inside = (address.astype(np.int64) + size) <= limit
        bad = ~inside if mask is None else ~inside & mask
        if bad.any():
            machine.report_lds_bounds(g, inst, address, bad, size)
        mask = inside if mask is None else inside & mask
        address = np.where(inside, address, np.uint32(0))
        if not limit:
            address = np.zeros_like(address)
    index = address.astype(np.int64) + (g.wg * machine.lds_stride)[:, None]
    if machine.checker is not None:
        machine.checker.lds(g, inst, index, size, mask, write, dma)
    return index, mask


def read_words(machine: Executing, index: np.ndarray, size: int, mask: np.ndarray | None) -> list[np.ndarray]:
    """Words at byte indices; 1 and 2 byte reads are zero-extended; inactive lanes give 0."""
    if size < 4:
        if size == 2 and (index & 1).any():
            low, high = (machine.lds_views[1][index + i].astype(np.uint32) for i in (0, 1))
            words = [low | high << np.uint32(8)]
        else:
            words = [machine.lds_views[size][index >> (size - 1)].astype(np.uint32)]
    elif (index & 3).any():
        byte = machine.lds_views[1]
        words = []
        for at in range(0, size, 4):
            word = np.zeros(index.shape, np.uint32)
            for i in range(4):
                word |= byte[index + at + i].astype(np.uint32) << np.uint32(8 * i)
            words.append(word)
    else:
        slot = index >> 2
        view = machine.lds_views[4]
        words = [view[slot + i if i else slot] for i in range(size // 4)]
    if mask is not None:
        words = [np.where(mask, w, np.uint32(0)) for w in words]
    return words


def write_words(
    machine: Executing, index: np.ndarray, words: list[np.ndarray], size: int, mask: np.ndarray | None
) -> None:
    """Write `size` bytes a lane at byte indices."""
    if mask is not None:
        index, words = index[mask], [np.broadcast_to(w, mask.shape)[mask] for w in words]
    unit = min(size, 4)
    if (index & (unit - 1)).any():
        for i in range(size):
            machine.lds_views[1][index + i] = (words[i // 4] >> np.uint32(8 * (i % 4))).astype(np.uint8)
        return
    slot, view = index >> (unit.bit_length() - 1), machine.lds_views[unit]
    for i, word in enumerate(words):
        view[slot + i if i else slot] = word if unit == 4 else word.astype(view.dtype)


def _mask(g: Group) -> np.ndarray | None:
    return None if g.full else g.mask


_WIDTHS = {"b32": 4, "b64": 8, "b96": 12, "b128": 16, "u8": 1, "i8": 1, "b8": 1, "u16": 2, "i16": 2, "b16": 2}


def sign_extend(word: np.ndarray, bits: int) -> np.ndarray:
    """Low `bits` of uint32 sign-extended."""
    shift = np.uint32(32 - bits)
    return ((word << shift).view(np.int32) >> np.int32(32 - bits)).view(np.uint32)


def put_loaded(g: Group, row: int, words: list[np.ndarray], signed: int, half: str) -> None:
    """Write loaded words to registers: `signed` 8 or 16 sign-extends, `half` d16 or d16_hi keeps the other half."""
    if signed:
        words = [sign_extend(words[0], signed)]
    if half:
        target = g.half(row, 1 if half == "d16_hi" else 0)
        np.copyto(target, words[0].astype(np.uint16), where=g.mask)
        return
    for i, word in enumerate(words):
        store(g, row + i, word)


def _split(name: str) -> tuple[str, str]:
    """(width name, d16 part) of a load or store name such as `ds_read_u8_d16_hi`."""
    for suffix in ("_d16_hi", "_d16"):
        if name.endswith(suffix):
            return name[: -len(suffix)].rsplit("_", 1)[1], suffix[1:]
    return name.rsplit("_", 1)[1], ""


def _read(inst: Instruction, machine: Executing) -> Run:
    width, half = _split(inst.name)
    size = _WIDTHS[width]
    offset = np.uint32(inst.get("offset1") << 8 | inst.get("offset0"))
    address = vector_row(machine, inst.get("addr"), False)
    row = vector_row(machine, inst.get("vdst"), bool(inst.get("acc")), (size + 3) // 4)
    signed = 8 * size if width[0] == "i" else 0
    call = gather(size // 4) if size >= 4 else None

    def run(g: Group) -> None:
        index, mask = place(g, inst, g.vu[address] + offset, size, _mask(g), False)
        if mask is None and call is not None and not (index & 3).any():
            index = np.ascontiguousarray(index)
            call(machine.lds_address, index.ctypes.data, index.size, g.address + row * g.stride, g.stride)
            return
        put_loaded(g, row, read_words(machine, index, size, mask), signed, half)

    return run


def _write(inst: Instruction, machine: Executing) -> Run:
    width, half = _split(inst.name)
    size = _WIDTHS[width]
    offset = np.uint32(inst.get("offset1") << 8 | inst.get("offset0"))
    address = vector_row(machine, inst.get("addr"), False)
    row = vector_row(machine, inst.get("data0"), bool(inst.get("acc")), (size + 3) // 4)
    shift = np.uint32(16 if half == "d16_hi" else 0)

    def run(g: Group) -> None:
        index, mask = place(g, inst, g.vu[address] + offset, size, _mask(g), True)
        words = [g.vu[row + i] for i in range((size + 3) // 4)]
        write_words(machine, index, [words[0] >> shift] if half else words, size, mask)

    return run


def _two(inst: Instruction, machine: Executing) -> Run:
    """read2 / write2 [st64]: two locations, offsets in units of the element (times 64)."""
    size = 8 if inst.name.endswith("b64") else 4
    unit = size * (64 if "st64" in inst.name else 1)
    offsets = [np.uint32(inst.get(f"offset{i}") * unit) for i in (0, 1)]
    address, acc, count = vector_row(machine, inst.get("addr"), False), bool(inst.get("acc")), size // 4
    if "read" in inst.name:
        row = vector_row(machine, inst.get("vdst"), acc, 2 * count)

        def read(g: Group) -> None:
            base, words = g.vu[address].copy(), []
            for offset in offsets:
                index, mask = place(g, inst, base + offset, size, _mask(g), False)
                words += read_words(machine, index, size, mask)
            put_loaded(g, row, words, 0, "")

        return read
    rows = [vector_row(machine, inst.get(f"data{i}"), acc, count) for i in (0, 1)]

    def write(g: Group) -> None:
        for offset, row in zip(offsets, rows):
            index, mask = place(g, inst, g.vu[address] + offset, size, _mask(g), True)
            write_words(machine, index, [g.vu[row + i] for i in range(count)], size, mask)

    return write


def _transpose(bits: int) -> Callable[[Instruction, Any], Run]:
    """ds_read_b64_tr_b16 / b8: 16 lanes load a (4 or 8) x 16 tile row by row; lane l gets column l.

    dst[l][n] = src[(l & ~15) + (l % 16) / e + n·16 / e][l % e], with e = 64 / bits elements in a lane.
    """
    each = 64 // bits
    kind = np.dtype(f"u{bits // 8}")
    # as axes: (16-lane group, n, (l % 16) / e, l % e) of the source becomes (group, (l % 16) / e, l % e, n)
    axes = (-1, 4, each, 16 // each, each)
    call = gather_transposed(bits)

    def build(inst: Instruction, machine: Executing) -> Run:
        offset = np.uint32(inst.get("offset1") << 8 | inst.get("offset0"))
        address = vector_row(machine, inst.get("addr"), False)
        row = vector_row(machine, inst.get("vdst"), bool(inst.get("acc")), 2)

        def run(g: Group) -> None:
            index, mask = place(g, inst, g.vu[address] + offset, 8, _mask(g), False)
            if mask is None:
                index = np.ascontiguousarray(index)
                call(machine.lds_address, index.ctypes.data, index.size, g.address + row * g.stride, g.stride)
                return
            words = read_words(machine, index, 8, mask)
            loaded = np.stack(words, -1).view(kind)  # (W, 64, each)
            turned = np.ascontiguousarray(loaded.reshape(axes).transpose(0, 1, 3, 4, 2))
            turned = turned.reshape(loaded.shape).view(np.uint32)
            store(g, row, turned[..., 0])
            store(g, row + 1, turned[..., 1])

        return run

    return build


def _transpose16(inst: Instruction, machine: Executing) -> Run:
    return _transpose(16)(inst, machine)


def _transpose8(inst: Instruction, machine: Executing) -> Run:
    return _transpose(8)(inst, machine)


def _bpermute(inst: Instruction, machine: Executing) -> Run:
    address = vector_row(machine, inst.get("addr"), False)
    data, row = vector_row(machine, inst.get("data0"), False), vector_row(machine, inst.get("vdst"), False)
    offset = np.uint32(inst.get("offset1") << 8 | inst.get("offset0"))
    gather = inst.name == "ds_bpermute_b32"

    def run(g: Group) -> None:
        lane = ((g.vu[address] + offset) >> np.uint32(2) & np.uint32(63)).astype(np.int64)
        if gather:
            value = np.take_along_axis(np.where(g.mask, g.vu[data], np.uint32(0)), lane, 1)
        else:
            value = np.zeros_like(g.vu[data])
            for i in range(64):  # the highest lane wins where several write one target
                active = g.mask[:, i]
                value[np.flatnonzero(active), lane[active, i]] = g.vu[data][active, i]
        store(g, row, value)

    return run


def _swizzle(inst: Instruction, machine: Executing) -> Run:
    code = inst.get("offset1") << 8 | inst.get("offset0")
    if code >> 13 == 7:
        raise unknown(inst, machine, "in FFT mode is not modelled")
    if code >> 13 == 6:
        amount, keep = code >> 5 & 31, code & 31
        step = -amount if code >> 10 & 1 else amount
        index = (_LANE & 32) | (_LANE & keep) | ((_LANE + step) & 31 & ~keep)
    elif code >> 15:
        index = (_LANE & ~3) + np.array([code >> 2 * i & 3 for i in range(4)])[_LANE & 3]
    else:
        index = (_LANE & 32) | ((_LANE & 31 & (code & 31)) | (code >> 5 & 31)) ^ (code >> 10 & 31)
    row = vector_row(machine, inst.get("vdst"), False)
    source = vector_row(machine, inst.get("addr"), False)

    def run(g: Group) -> None:
        value = g.vu[source]
        if not g.full:
            value = np.where(g.mask, value, np.uint32(0))
        store(g, row, value[:, index])

    return run


_KINDS: dict[str, type[np.generic]] = {
    "u32": np.uint32, "i32": np.int32, "b32": np.uint32, "f32": np.float32, "u64": np.uint64, "i64": np.int64,
    "b64": np.uint64, "f64": np.float64,
}  # fmt: skip


def _compare_and_swap(old: np.ndarray, compare: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where(old == compare, new, old)


def _atomic(inst: Instruction, machine: Executing) -> Run:
    parts = inst.name.split("_")
    operation, kind = parts[1], parts[-1]
    returns = "rtn" in parts
    function: Callable[..., np.ndarray]
    dtype: type[np.generic]
    if operation == "pk":
        function, dtype = packed_add(kind), np.uint32
    elif operation == "cmpst":
        function, dtype = _compare_and_swap, _KINDS[kind]
    elif operation == "mskor":
        function, dtype = (lambda old, keep, bits: (old & ~keep) | bits), _KINDS[kind]
    elif operation == "wrxchg":
        function, dtype = ATOMICS["swap"], _KINDS[kind]
    elif operation in ATOMICS and kind in _KINDS:
        function, dtype = ATOMICS[operation], _KINDS[kind]
    else:
        raise unknown(inst, machine)
    count = np.dtype(dtype).itemsize // 4
    offset = np.uint32(inst.get("offset1") << 8 | inst.get("offset0"))
    address, acc = vector_row(machine, inst.get("addr"), False), bool(inst.get("acc"))
    operands = [inst.get("data0")] + ([inst.get("data1")] if operation in ("cmpst", "mskor") else [])
    rows = [vector_row(machine, x, acc, count) for x in operands]
    target = vector_row(machine, inst.get("vdst"), acc, count) if returns else None

    def run(g: Group) -> None:
        index, mask = place(g, inst, g.vu[address] + offset, 4 * count, g.mask, True)
        view = machine.lds_views[4 * count].view(dtype)
        values = [join_words([g.vu[r + i] for i in range(count)], dtype) for r in rows]
        old = rounds(view, index >> (count + 1), values, function, np.asarray(mask))
        if target is not None:
            for i, word in enumerate(split_words(old)):
                store(g, target + i, word)

    return run


def join_words(words: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """One or two uint32 arrays as values of `dtype`."""
    if len(words) == 1:
        return words[0].view(dtype)
    bits: np.ndarray = words[0] | words[1].astype(np.uint64) << np.uint64(32)
    return bits.view(dtype)


def split_words(values: np.ndarray) -> list[np.ndarray]:
    """The inverse of `join_words`."""
    if values.dtype.itemsize == 4:
        return [values.view(np.uint32)]
    bits = values.view(np.uint64)
    return [bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)]


def _addtid(inst: Instruction, machine: Executing) -> Run:
    """ds_{read,write}_addtid_b32: address = M0[15:0] + offset + lane·4."""
    offset = np.uint32(inst.get("offset1") << 8 | inst.get("offset0"))
    reading = "read" in inst.name
    row = vector_row(machine, inst.get("vdst" if reading else "data0"), bool(inst.get("acc")))
    lanes = (_LANE * 4).astype(np.uint32)

    def run(g: Group) -> None:
        address = (g.su[M0] & np.uint32(0xFFFF)) + offset + lanes
        index, mask = place(g, inst, address, 4, _mask(g), not reading)
        if reading:
            store(g, row, read_words(machine, index, 4, mask)[0])
        else:
            write_words(machine, index, [g.vu[row]], 4, mask)

    return run


def compile_ds(inst: Instruction, machine: Executing) -> Run:
    """Every implemented `ds_*` instruction.

    Raises:
        EmulatorError: GDS, and operations that are not implemented.
    """
    name = inst.name
    if inst.get("gds"):
        raise unknown(inst, machine, "uses the global data share, which is not modelled")
    fixed = {
        "ds_nop": lambda i, m: lambda g: None, "ds_bpermute_b32": _bpermute, "ds_permute_b32": _bpermute,
        "ds_swizzle_b32": _swizzle, "ds_read_b64_tr_b16": _transpose16, "ds_read_b64_tr_b8": _transpose8,
        "ds_read_addtid_b32": _addtid, "ds_write_addtid_b32": _addtid,
    }  # fmt: skip
    if name in fixed:
        return fixed[name](inst, machine)
    if name.startswith(("ds_read2", "ds_write2")):
        return _two(inst, machine)
    if name.startswith("ds_read_") and _split(name)[0] in _WIDTHS and "_tr_" not in name:
        return _read(inst, machine)
    if name.startswith("ds_write_"):
        return _write(inst, machine)
    return _atomic(inst, machine)
