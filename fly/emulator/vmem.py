"""Scalar, global, flat, scratch and buffer memory instructions (CDNA3 ISA, sections 8 to 10 and 12.4 to 12.12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.decode import M0, SADDR_OFF, Instruction
from fly.emulator.lds import join_words, place, put_loaded, read_words, split_words, write_words
from fly.emulator.memory import ATOMICS, packed_add
from fly.emulator.operands import reader, store, unknown, vector_row
from fly.emulator.state import Group
from fly.errors import EmulatorError

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

Run = Callable[[Group], None]
_LANE = np.arange(64)
_WHOLE = 1 << 63  # a limit that holds every access
_U64 = np.uint64

# name suffix -> (bytes, sign-extended bits, half)
_LOADS: dict[str, tuple[int, int, str]] = {
    "ubyte": (1, 0, ""), "sbyte": (1, 8, ""), "ushort": (2, 0, ""), "sshort": (2, 16, ""),
    "dword": (4, 0, ""), "dwordx2": (8, 0, ""), "dwordx3": (12, 0, ""), "dwordx4": (16, 0, ""),
    "ubyte_d16": (1, 0, "d16"), "ubyte_d16_hi": (1, 0, "d16_hi"), "sbyte_d16": (1, 8, "d16"),
    "sbyte_d16_hi": (1, 8, "d16_hi"), "short_d16": (2, 0, "d16"), "short_d16_hi": (2, 0, "d16_hi"),
}  # fmt: skip
_STORES: dict[str, tuple[int, int]] = {
    "byte": (1, 0), "byte_d16_hi": (1, 16), "short": (2, 0), "short_d16_hi": (2, 16),
    "dword": (4, 0), "dwordx2": (8, 0), "dwordx3": (12, 0), "dwordx4": (16, 0),
}  # fmt: skip


# ---- scalar memory ----


def compile_smem(inst: Instruction, machine: Executing) -> Run:
    """s_load_*, s_buffer_load_*, s_memtime and the cache operations."""
    name = inst.name
    if name.startswith("s_dcache"):
        return lambda g: None
    if name in ("s_memtime", "s_memrealtime"):
        target = inst.get("sdata") >> 1

        def clock(g: Group) -> None:
            g.s64[target][...] = _U64(machine.executed)

        return clock
    buffer = name.startswith("s_buffer_load")
    if not (buffer or name.startswith("s_load")):
        raise unknown(inst, machine)
    text = name.rsplit("dword", 1)[1]
    count = int(text[1:]) if text else 1
    base, target = inst.get("sbase"), inst.get("sdata")
    raw = inst.get("offset")
    immediate = raw - (1 << 21) if raw >> 20 & 1 else raw
    registers = []
    if not inst.get("imm"):
        registers.append(raw & 127)
        immediate = 0
    if inst.get("soffset_en"):
        registers.append(inst.get("soffset"))
    steps = 4 * np.arange(count, dtype=np.uint64)

    def run(g: Group) -> None:
        offset = np.full((g.waves, 1), immediate, np.int64)
        for r in registers:
            offset = offset + g.su[r]
        offset = offset.view(_U64)
        if buffer:
            start = g.s64[base] & _U64(0xFFFFFFFFFFFF)
            limit = g.su[2 * base + 2].astype(_U64)
            inside = (offset + steps + _U64(4)) <= limit
            address = start + (offset & ~_U64(3)) + steps
            words = machine.memory.load(address, 4, None if inside.all() else inside)[0]
            words = np.where(inside, words, np.uint32(0))
        else:
            address = ((g.s64[base] + offset) & ~_U64(3)) + steps
            words = machine.memory.load(address, 4, None)[0]
        if count == 1:
            g.su[target][...] = words
        else:
            pairs = words.reshape(g.waves, count // 2, 2).transpose(1, 0, 2)
            g.s[target >> 1 : (target + count) >> 1] = pairs

    return run


# ---- addresses ----


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


Words = Callable[[Group], list[np.ndarray]]
Address = Callable[[Group], tuple[np.ndarray, np.ndarray | None]]
Located = Callable[[Group], tuple[np.ndarray, np.ndarray, np.ndarray]]


def _global_address(inst: Instruction, machine: Executing) -> Address:
    offset = np.array(_signed(inst.get("offset"), 13)).astype(np.int64).astype(_U64)
    row, saddr = vector_row(machine, inst.get("addr"), False), inst.get("saddr")
    if saddr == SADDR_OFF:
        vector_row(machine, inst.get("addr"), False, 2)
        return lambda g: (
            (g.vu[row] | g.vu[row + 1].astype(_U64) << _U64(32)) + offset,
            None if g.full else g.mask,
        )
    base = reader(machine, saddr, "u64")
    return lambda g: (g.vu[row] + (base(g) + offset), None if g.full else g.mask)


def _buffer_offset(inst: Instruction, machine: Executing) -> Located:
    """(address, byte offset, limit) of a MUBUF access.

    Raw range rule: byte offset without the scalar offset against num_records minus the scalar offset (CDNA3 ISA,
    "Buffer range checking"). With an index and a stride, num_records counts strides, and only the index is compared
    (Mesa, ac_descriptors.c, of GFX9): such an access is given as inside a limit that holds it, or outside of none.
    """
    rsrc, immediate = inst.get("srsrc") * 4, np.uint32(inst.get("offset"))
    offen, idxen = inst.get("offen"), inst.get("idxen")
    row = vector_row(machine, inst.get("vaddr"), False, max(offen + idxen, 1)) if offen or idxen else 0
    scalar = reader(machine, inst.get("soffset"), "u32", inst.literal)
    index_row, offset_row = row, row + 1 if offen and idxen else row

    def run(g: Group) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pair = g.s64[rsrc >> 1]
        base, high = pair & _U64(0xFFFFFFFFFFFF), g.su[rsrc + 1]
        stride, swizzled = high >> np.uint32(16) & np.uint32(0x3FFF), (high >> np.uint32(31)).any()
        if swizzled:
            raise EmulatorError(f"`{inst.text}`: swizzled buffer descriptors are not modelled")
        offset = np.zeros((g.waves, 64), _U64) + immediate
        if offen:
            offset = offset + g.vu[offset_row]
        extra = np.asarray(scalar(g)).astype(_U64)
        limit = g.su[rsrc + 2].astype(_U64)
        if idxen:
            index = g.vu[index_row].astype(_U64)
            inside = np.where(index < limit, _U64(_WHOLE), _U64(0))
            offset, limit = offset + index * stride, np.where(stride != 0, inside, limit)
        return base + offset + extra, offset + extra, limit

    return run


def _scratch_address(inst: Instruction, machine: Executing) -> Callable[[Group], np.ndarray]:
    """Byte offset int64 (W, 64) in each lane's own scratch."""
    offset = _signed(inst.get("offset"), 13)
    saddr = inst.get("saddr")
    row = vector_row(machine, inst.get("addr"), False) if inst.get("sve") else None

    def run(g: Group) -> np.ndarray:
        address = np.full((g.waves, 64), offset, np.int64)
        if row is not None:
            address = address + g.vi[row]
        if saddr != SADDR_OFF:
            address = address + g.si[saddr]
        return address

    return run


# ---- scratch ----


def _scratch_index(g: Group, inst: Instruction, offset: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
    """Byte index in the batch's scratch, which is stored lane by lane, for an access that follows."""
    machine = g.machine
    bad = mask & ((offset < 0) | (offset + size > machine.scratch_bytes))
    if bad.any():
        raise machine.fault(g, inst, "scratch-bounds", bad, f"scratch offset {int(offset[bad][0])} of "
                            f"{machine.scratch_bytes} bytes")  # fmt: skip
    slot = (g.wg * machine.waves_per_group + g.wave)[:, None] * 64 + _LANE
    index: np.ndarray = np.where(mask, offset, 0) + slot * machine.scratch_bytes
    if machine.checker is not None:
        machine.checker.scratch(g, inst, index, size, mask)
    return index


def _scratch_words(g: Group, index: np.ndarray, size: int) -> list[np.ndarray]:
    views = g.machine.scratch_views
    if size < 4:
        return [views[size][index >> (size - 1)].astype(np.uint32)]
    return [views[4][(index >> 2) + i] for i in range(size // 4)]


def _scratch_store(g: Group, index: np.ndarray, words: list[np.ndarray], size: int, mask: np.ndarray) -> None:
    views = g.machine.scratch_views
    unit = min(size, 4)
    slot = (index >> (unit.bit_length() - 1))[mask]
    for i, word in enumerate(words):
        views[unit][slot + i] = word[mask].astype(views[unit].dtype)


# ---- global, flat, scratch ----


def _access(inst: Instruction, machine: Executing) -> tuple[str, str]:
    """("load" | "store" | "atomic" | "lds", suffix) of a name such as global_load_lds_dwordx4."""
    _, _, rest = inst.name.partition("_")
    kind, _, suffix = rest.partition("_")
    if kind == "load" and suffix.startswith("lds_"):
        return "lds", suffix[4:]
    return kind, suffix


def compile_flat(inst: Instruction, machine: Executing) -> Run:
    """GLOBAL, FLAT and SCRATCH encodings."""
    kind, suffix = _access(inst, machine)
    if inst.form == "SCRATCH":
        return _compile_scratch(inst, machine, kind, suffix)
    address = _global_address(inst, machine) if inst.form == "GLOBAL" else _flat_address(inst, machine)
    if kind == "atomic":
        return _atomic(inst, machine, suffix, address, inst.get("data"), bool(inst.get("sc0")))
    if kind == "lds":
        return _to_lds(inst, machine, suffix, address, _signed(inst.get("offset"), 13))
    if kind == "load" and suffix in _LOADS:
        load = _flat_load if inst.form == "FLAT" else _global_load
        return load(inst, machine, suffix, address)
    if kind == "store" and suffix in _STORES:
        store_ = _flat_store if inst.form == "FLAT" else _global_store
        return store_(inst, machine, suffix, address)
    raise unknown(inst, machine)


def _global_load(inst: Instruction, machine: Executing, suffix: str, address: Address) -> Run:
    size, signed, half = _LOADS[suffix]
    row = vector_row(machine, inst.get("vdst"), bool(inst.get("acc")), (size + 3) // 4)

    def run(g: Group) -> None:
        where, mask = address(g)
        put_loaded(g, row, machine.memory.load(where, size, mask), signed, half)

    return run


def _data_words(inst: Instruction, machine: Executing, size: int, shift: int, field: str) -> Words:
    count = (size + 3) // 4
    row = vector_row(machine, inst.get(field), bool(inst.get("acc")), count)
    if shift:
        return lambda g: [g.vu[row] >> np.uint32(shift)]
    return lambda g: [g.vu[row + i] for i in range(count)]


def _global_store(inst: Instruction, machine: Executing, suffix: str, address: Address) -> Run:
    size, shift = _STORES[suffix]
    words = _data_words(inst, machine, size, shift, "data")

    def run(g: Group) -> None:
        where, mask = address(g)
        machine.memory.store(where, words(g), size, mask)

    return run


def _flat_address(inst: Instruction, machine: Executing) -> Address:
    row, offset = vector_row(machine, inst.get("addr"), False, 2), _U64(inst.get("offset"))
    return lambda g: ((g.vu[row] | g.vu[row + 1].astype(_U64) << _U64(32)) + offset, g.mask)


def _apertures(machine: Executing, where: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    high = (where >> _U64(32)).astype(np.uint32)
    shared = mask & (high == np.uint32(machine.apertures[235] >> 32))
    private = mask & (high == np.uint32(machine.apertures[237] >> 32))
    return shared, private, mask & ~shared & ~private


def _flat_load(inst: Instruction, machine: Executing, suffix: str, address: Address) -> Run:
    size, signed, half = _LOADS[suffix]
    row = vector_row(machine, inst.get("vdst"), bool(inst.get("acc")), (size + 3) // 4)

    def run(g: Group) -> None:
        where, mask = address(g)
        shared, private, plain = _apertures(machine, where, np.asarray(mask))
        words = machine.memory.load(where, size, plain)
        low = where.astype(np.uint32)
        if shared.any():
            index, inside = place(g, inst, np.where(shared, low, 0).astype(np.uint32), size, shared, False)
            words = [np.where(shared, x, w) for x, w in zip(read_words(machine, index, size, inside), words)]
        if private.any():
            index = _scratch_index(g, inst, low.astype(np.int64), size, private)
            words = [np.where(private, x, w) for x, w in zip(_scratch_words(g, index, size), words)]
        put_loaded(g, row, words, signed, half)

    return run


def _flat_store(inst: Instruction, machine: Executing, suffix: str, address: Address) -> Run:
    size, shift = _STORES[suffix]
    words = _data_words(inst, machine, size, shift, "data")

    def run(g: Group) -> None:
        where, mask = address(g)
        shared, private, plain = _apertures(machine, where, np.asarray(mask))
        values, low = words(g), where.astype(np.uint32)
        machine.memory.store(where, values, size, plain)
        if shared.any():
            index, inside = place(g, inst, np.where(shared, low, 0).astype(np.uint32), size, shared, True)
            write_words(machine, index, values, size, inside)
        if private.any():
            index = _scratch_index(g, inst, low.astype(np.int64), size, private)
            _scratch_store(g, index, values, size, private)

    return run


def _compile_scratch(inst: Instruction, machine: Executing, kind: str, suffix: str) -> Run:
    offset = _scratch_address(inst, machine)
    if kind == "load" and suffix in _LOADS:
        size, signed, half = _LOADS[suffix]
        row = vector_row(machine, inst.get("vdst"), bool(inst.get("acc")), (size + 3) // 4)

        def load(g: Group) -> None:
            index = _scratch_index(g, inst, offset(g), size, g.mask)
            put_loaded(g, row, _scratch_words(g, index, size), signed, half)

        return load
    if kind == "store" and suffix in _STORES:
        width, shift = _STORES[suffix]
        words = _data_words(inst, machine, width, shift, "data")

        def save(g: Group) -> None:
            index = _scratch_index(g, inst, offset(g), width, g.mask)
            _scratch_store(g, index, words(g), width, g.mask)

        return save
    raise unknown(inst, machine)


def _to_lds(inst: Instruction, machine: Executing, suffix: str, address: Address, offset: int) -> Run:
    """Load straight into LDS: LDS address = M0 + instruction offset + lane·size (16 for x4, 12 for x3)."""
    if suffix not in _LOADS:
        raise unknown(inst, machine)
    size, signed, _ = _LOADS[suffix]
    if size > 4 and machine.arch == "gfx942":
        raise unknown(inst, machine, "needs gfx950: direct-to-LDS loads wider than 4 bytes do not exist")
    step = max(size, 4)
    lanes = (_LANE * step + offset).astype(np.uint32)

    def run(g: Group) -> None:
        where, mask = address(g)
        values = machine.memory.load(where, size, mask)
        deposit(g, inst, lanes, values, step, signed, mask)

    return run


def deposit(
    g: Group,
    inst: Instruction,
    lanes: np.ndarray,
    values: list[np.ndarray],
    step: int,
    signed: int,
    mask: np.ndarray | None,
) -> None:
    """The LDS side of a direct-to-LDS load; sub-dword loads are extended to a dword."""
    from fly.emulator.lds import sign_extend

    if signed:
        values = [sign_extend(values[0], signed)]
    index, inside = place(g, inst, g.su[M0] + lanes, step, mask, True, True)
    write_words(g.machine, index, values, step, inside)


# ---- buffers ----


def compile_mubuf(inst: Instruction, machine: Executing) -> Run:
    """buffer_load, buffer_store, buffer_atomic; out-of-range components read 0 and store nothing."""
    kind, suffix = _access(inst, machine)
    if inst.name in ("buffer_inv", "buffer_wbl2"):
        return lambda g: None
    locate = _buffer_offset(inst, machine)
    if kind == "load" and suffix in _LOADS:
        return _buffer_load(inst, machine, suffix, locate)
    if kind == "store" and suffix in _STORES:
        return _buffer_store(inst, machine, suffix, locate)
    if kind == "atomic":

        def address(g: Group) -> tuple[np.ndarray, np.ndarray]:
            where, offset, limit = locate(g)
            return where, g.mask & (offset < limit)

        return _atomic(inst, machine, suffix, address, inst.get("vdata"), bool(inst.get("sc0")))
    raise unknown(inst, machine)


def _buffer_load(inst: Instruction, machine: Executing, suffix: str, locate: Located) -> Run:
    size, signed, half = _LOADS[suffix]
    to_lds = bool(inst.get("lds"))
    step = max(size, 4)
    lanes = (_LANE * step + inst.get("offset")).astype(np.uint32)
    if to_lds and size > 4 and machine.arch == "gfx942":
        raise unknown(inst, machine, "needs gfx950: direct-to-LDS loads wider than 4 bytes do not exist")
    row = 0 if to_lds else vector_row(machine, inst.get("vdata"), bool(inst.get("acc")), (size + 3) // 4)

    def run(g: Group) -> None:
        memory = machine.memory
        where, offset, limit = locate(g)
        end = offset + _U64(size)
        if bool((end <= limit).all()):
            words = memory.load(where, size, None if g.full else g.mask)
        else:
            words = []
            unit = min(size, 4)
            for i in range(0, size, 4):
                inside = (offset + _U64(i + unit)) <= limit
                loaded = memory.load(where + _U64(i), unit, inside if g.full else inside & g.mask)[0]
                words.append(np.where(inside, loaded, np.uint32(0)))
        if to_lds:
            deposit(g, inst, lanes, words, step, signed, None if g.full else g.mask)
        else:
            put_loaded(g, row, words, signed, half)

    return run


def _buffer_store(inst: Instruction, machine: Executing, suffix: str, locate: Located) -> Run:
    size, shift = _STORES[suffix]
    words = _data_words(inst, machine, size, shift, "vdata")

    def run(g: Group) -> None:
        memory = machine.memory
        where, offset, limit = locate(g)
        values = words(g)
        if bool((offset + _U64(size) <= limit).all()):
            memory.store(where, values, size, None if g.full else g.mask)
            return
        unit = min(size, 4)
        for i, value in enumerate(values):
            inside = (offset + _U64(4 * i + unit)) <= limit
            memory.store(where + _U64(4 * i), [value], unit, g.mask & inside)

    return run


def _atomic(inst: Instruction, machine: Executing, suffix: str, address: Address, data: int, returns: bool) -> Run:
    operation, _, rest = suffix.partition("_")
    wide = rest in ("x2", "f64")
    function: Callable[..., Any]
    dtype: type[np.generic]
    if operation == "pk":
        function, dtype = packed_add(rest.rsplit("_", 1)[1]), np.uint32
    elif operation in ATOMICS:
        function = ATOMICS[operation]
        if rest in ("f32", "f64"):
            dtype = np.float32 if rest == "f32" else np.float64
        else:
            signed = operation in ("smin", "smax")
            dtype = np.dtype(f"{'i' if signed else 'u'}{8 if wide else 4}").type
    else:
        raise unknown(inst, machine)
    count, acc = (2 if wide else 1), bool(inst.get("acc"))
    operands = 2 if operation == "cmpswap" else 1
    source = vector_row(machine, data, acc, count * operands)
    target_field = "vdata" if inst.form == "MUBUF" else "vdst"
    target = vector_row(machine, inst.get(target_field), acc, count) if returns else None

    def run(g: Group) -> None:
        where, mask = address(g)
        mask = np.ones((g.waves, 64), bool) if mask is None else mask
        values = [join_words([g.vu[source + i * count + j] for j in range(count)], dtype) for i in range(operands)]
        where = np.broadcast_to(where, mask.shape)
        old = machine.memory.atomic(where, values, dtype, function, mask)
        if target is not None:
            for i, word in enumerate(split_words(old)):
                store(g, target + i, word)

    return run
