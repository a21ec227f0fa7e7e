"""Loads, stores and atomics: LDS, global, flat, scratch, buffer and scalar memory, and direct-to-LDS loads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fly.errors import EmulatorError
from tests.emulator.machine_code import ARCHS, Case, bench

WAIT = "\ns_waitcnt vmcnt(0) lgkmcnt(0)"
LDS = 8192
U32 = 0xFFFFFFFF


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


# integer read-modify-write: name in ds_* and global_*, and the function of (old, operand)
ATOMICS: dict[tuple[str, str], Callable[[int, int], int]] = {
    ("add_u32", "add"): lambda o, x: o + x,
    ("sub_u32", "sub"): lambda o, x: o - x,
    ("min_i32", "smin"): lambda o, x: min(o, x, key=s32),
    ("max_i32", "smax"): lambda o, x: max(o, x, key=s32),
    ("min_u32", "umin"): min,
    ("max_u32", "umax"): max,
    ("and_b32", "and"): lambda o, x: o & x,
    ("or_b32", "or"): lambda o, x: o | x,
    ("xor_b32", "xor"): lambda o, x: o ^ x,
    ("inc_u32", "inc"): lambda o, x: 0 if o >= x else o + 1,
    ("dec_u32", "dec"): lambda o, x: x if o == 0 or o > x else o - 1,
    ("wrxchg", "swap"): lambda o, x: x,
}
_SIZES = {"b32": 1, "b64": 2, "b96": 3, "b128": 4}
# suffix of a narrow load: (bits, signed, half that is written or None)
_NARROW = {"u8": (8, False, None), "i8": (8, True, None), "u16": (16, False, None), "i16": (16, True, None),
           "u8_d16": (8, False, 0), "u8_d16_hi": (8, False, 1), "i8_d16": (8, True, 0), "i8_d16_hi": (8, True, 1),
           "u16_d16": (16, False, 0), "u16_d16_hi": (16, False, 1)}  # fmt: skip
_GLOBAL = {"ubyte": "u8", "sbyte": "i8", "ushort": "u16", "sshort": "i16", "ubyte_d16": "u8_d16",
           "ubyte_d16_hi": "u8_d16_hi", "sbyte_d16": "i8_d16", "sbyte_d16_hi": "i8_d16_hi", "short_d16": "u16_d16",
           "short_d16_hi": "u16_d16_hi"}  # fmt: skip
_DWORDS = {1: "dword", 2: "dwordx2", 3: "dwordx3", 4: "dwordx4"}


def _v(n: int) -> str:
    return "v" if n == 1 else f"v{n}"


def _fill(address: str, data: str) -> str:
    """Write 16 bytes a lane at LDS address 16·lane."""
    return f"ds_write_b128 {address}, {data}{WAIT}\n"


def returning(name: str) -> str:
    """The form of an LDS atomic that gives the old value."""
    operation, _, kind = name.partition("_")
    return f"{operation}_rtn_{kind or 'b32'}"


def _cases() -> tuple[Case, ...]:
    c = [
        *(
            Case(f"ds.{n}", _fill("$1", "$2") + f"ds_read_{n} $0, $3 offset:16{WAIT}", _v(k), "v v4 v", lds=LDS)
            for n, k in _SIZES.items()
        ),
        *(
            Case(
                f"ds.w{n}",
                f"ds_write_{n} $1, $2 offset:32{WAIT}\nds_read_b128 $0, $1 offset:32{WAIT}",
                "v4",
                f"v {_v(k)}",
                lds=LDS,
            )
            for n, k in _SIZES.items()
        ),
        *(
            Case(
                f"ds.{n}", _fill("$1", "$2") + f"v_mov_b32 $0, $4\nds_read_{n} $0, $3{WAIT}", "v", "v v4 v v", lds=LDS
            )
            for n in _NARROW
        ),
        *(
            Case(
                f"ds.wn{n}",
                _fill("$1", "$2") + f"ds_write_{n} $3, $4{WAIT}\nds_read_b128 $0, $1{WAIT}",
                "v4",
                "v v4 v v",
                lds=LDS,
            )
            for n in ("b8", "b16", "b8_d16_hi", "b16_d16_hi")
        ),
        Case(
            "ds.two",
            "ds_write2_b32 $2, $3, $4 offset0:3 offset1:1"
            + WAIT
            + "\nds_read2_b32 $0, $2 offset0:1 offset1:3"
            + WAIT
            + "\nds_write2st64_b64 $2, $0, $5 offset0:1 offset1:2"
            + WAIT
            + "\nds_read2st64_b64 $1, $2 offset0:1 offset1:2"
            + WAIT,
            "v2 v4",
            "v v v v2",
            lds=LDS,
        ),
        *(
            Case(
                f"ds.tr{n}",
                _fill("$1", "$2") + f"ds_read_b64_tr_b{n} $0, $3{WAIT}",
                "v2",
                "v v4 v",
                lds=LDS,
                archs=("gfx950",),
            )
            for n in (8, 16)
        ),
        *(
            Case(
                f"ds.atomic.{d}",
                f"ds_write_b32 $2, $3{WAIT}\nds_{returning(d)} $0, $4, $5{WAIT}\nds_read_b32 $1, $2{WAIT}",
                "v v",
                "v v v v",
                lds=LDS,
            )
            for d, _ in ATOMICS
        ),
        Case(
            "ds.cmpst",
            "ds_write_b32 $2, $3" + WAIT + "\nds_cmpst_rtn_b32 $0, $2, $4, $5" + WAIT + "\nds_read_b32 $1, $2" + WAIT,
            "v v",
            "v v v v",
            lds=LDS,
        ),
        Case(
            "ds.add_f32",
            "ds_write_b32 $2, $3" + WAIT + "\nds_add_rtn_f32 $0, $2, $4" + WAIT + "\nds_read_b32 $1, $2" + WAIT,
            "v v",
            "v v v",
            lds=LDS,
        ),
        *(
            Case(f"global.{n}", f"global_load_{_DWORDS[n]} $0, $1, off offset:-16{WAIT}", _v(n), "v2")
            for n in _DWORDS
        ),
        *(Case(f"saddr.{n}", f"global_load_{_DWORDS[n]} $0, $1, $2 offset:8{WAIT}", _v(n), "v s2") for n in _DWORDS),
        *(Case(f"flat.{n}", f"flat_load_{_DWORDS[n]} $0, $1 offset:16{WAIT}", _v(n), "v2") for n in _DWORDS),
        *(
            Case(f"store.{n}", f"global_store_{_DWORDS[n]} $0, $1, off offset:4{WAIT}", "", f"v2 {_v(n)}")
            for n in _DWORDS
        ),
        *(Case(f"flatstore.{n}", f"flat_store_{_DWORDS[n]} $0, $1{WAIT}", "", f"v2 {_v(n)}") for n in _DWORDS),
        *(Case(f"global.{n}", f"v_mov_b32 $0, $2\nglobal_load_{n} $0, $1, off{WAIT}", "v", "v2 v") for n in _GLOBAL),
        *(
            Case(f"store.{n}", f"global_store_{n} $0, $1, off{WAIT}", "", "v2 v")
            for n in ("byte", "short", "byte_d16_hi", "short_d16_hi")
        ),
        *(
            Case(f"global.atomic.{g}", f"global_atomic_{g} $0, $1, $2, off sc0{WAIT}", "v", "v2 v")
            for _, g in ATOMICS
        ),
        Case("global.cmpswap", f"global_atomic_cmpswap $0, $1, $2, off sc0{WAIT}", "v", "v2 v2"),
        Case("global.add_f32", f"global_atomic_add_f32 $0, $1, off{WAIT}", "", "v2 v"),
        Case("global.pk_add_f16", f"global_atomic_pk_add_f16 $0, $1, off{WAIT}", "", "v2 v"),
        Case("global.add_f64", f"global_atomic_add_f64 $0, $1, off{WAIT}", "", "v2 v2"),
        Case("global.add_x2", f"global_atomic_add_x2 $0, $1, $2, off sc0{WAIT}", "v2", "v2 v2"),
        *(
            Case(f"buffer.{n}", f"buffer_load_{_DWORDS[n]} $0, $1, $2, $3 offen offset:4{WAIT}", _v(n), "v s4 s")
            for n in _DWORDS
        ),
        *(
            Case(f"buffer.{n}", f"buffer_load_{n} $0, $1, $2, 0 offen{WAIT}", "v", "v s4")
            for n in ("ubyte", "sbyte", "ushort", "sshort")
        ),
        *(
            Case(f"bufstore.{n}", f"buffer_store_{_DWORDS[n]} $0, $1, $2, 0 offen{WAIT}", "", f"{_v(n)} v s4")
            for n in _DWORDS
        ),
        Case("buffer.idxen", f"buffer_load_dword $0, $1, $2, 0 idxen{WAIT}", "v", "v s4"),
        Case("buffer.atomic", f"v_mov_b32 $0, $1\nbuffer_atomic_add $0, $2, $3, 0 offen sc0{WAIT}", "v", "v v s4"),
        Case(
            "sload",
            "s_load_dword $0, $4, 0x8\ns_load_dwordx2 $1, $4, $5\ns_load_dwordx4 $2, $4, 0x10\n"
            "s_load_dwordx8 $3, $4, 0x20" + WAIT,
            "s s2 s4 s8",
            "s2 s",
        ),
        Case(
            "sbuffer", "s_buffer_load_dwordx4 $0, $2, 0x8\ns_buffer_load_dwordx2 $1, $2, $3" + WAIT, "s4 s2", "s4 s"
        ),
        Case(
            "lds.dword",
            "s_mov_b32 m0, $2\ns_nop 4\nglobal_load_lds_dword $1, off offset:64"
            + WAIT
            + "\nds_read_b32 $0, $3"
            + WAIT,
            "v",
            "v2 s v",
            lds=LDS,
        ),
        Case(
            "lds.x4",
            "s_mov_b32 m0, $2\ns_nop 4\nglobal_load_lds_dwordx4 $1, off" + WAIT + "\nds_read_b128 $0, $3" + WAIT,
            "v4",
            "v2 s v",
            lds=LDS,
            archs=("gfx950",),
        ),
        Case(
            "lds.buffer",
            "s_mov_b32 m0, $3\ns_nop 4\nbuffer_load_dword $1, $2, 0 offen offset:16 lds"
            + WAIT
            + "\nds_read_b32 $0, $4"
            + WAIT,
            "v",
            "v s4 s v",
            lds=LDS,
        ),
        Case(
            "lds.buffer.x4",
            "s_mov_b32 m0, $3\ns_nop 4\nbuffer_load_dwordx4 $1, $2, 0 offen lds"
            + WAIT
            + "\nds_read_b128 $0, $4"
            + WAIT,
            "v4",
            "v s4 s v",
            lds=LDS,
            archs=("gfx950",),
        ),
        Case(
            "scratch",
            "scratch_store_dwordx4 $2, $3, off offset:16"
            + WAIT
            + "\nscratch_load_dwordx2 $0, $2, off offset:20"
            + WAIT
            + "\nscratch_store_byte $2, $4, off offset:3"
            + WAIT
            + "\nscratch_load_dword $1, $2, off"
            + WAIT,
            "v2 v",
            "v v4 v",
            setup="  %room = alloca [64 x i32], align 16, addrspace(5)\n"
            "  %spot = getelementptr i32, ptr addrspace(5) %room, i32 %lane\n"
            "  store volatile i32 0, ptr addrspace(5) %spot",
        ),
        Case("unknown", "s_nop 4\nv_mqsad_u32_u8 $0, $1, $2, $3" + WAIT, "v4", "v2 v v4"),
    ]
    return tuple(c)


CASES = _cases()


class Setup:
    """Random memory, and addresses into it."""

    def __init__(self, arch: str, seed: int = 0):
        self.bench, self.rng = bench(CASES, arch), np.random.default_rng(seed)
        self.memory = self.rng.integers(0, 1 << 32, 2048, dtype=np.uint32)
        self.lane = np.arange(64, dtype=np.uint32)

    def bits(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 1 << 32, shape, dtype=np.uint32)

    def at(self, offsets: np.ndarray) -> np.ndarray:
        """64-bit addresses of byte offsets."""
        return np.uint64(self.memory.ctypes.data) + np.asarray(offsets).astype(np.uint64)

    def descriptor(self, records: int, stride: int = 0) -> np.ndarray:
        base = self.memory.ctypes.data
        return np.array([base & U32, base >> 32 | stride << 16, records, 0x00020000], np.uint32)

    def run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        return self.bench.run(name, *inputs, memory=self.memory)


def narrow(data: np.ndarray, offset: np.ndarray, kind: str, old: np.ndarray) -> np.ndarray:
    """What a narrow load gives: `data` is bytes."""
    bits, signed, half = _NARROW[kind]
    out = []
    for o, before in zip(offset.tolist(), old.tolist()):
        x = int.from_bytes(data[o : o + bits // 8].tobytes(), "little", signed=signed)
        if half is None:
            out.append(x & U32)
        else:
            x &= 0xFFFF
            out.append(before & 0xFFFF0000 | x if half == 0 else before & 0xFFFF | x << 16)
    return np.array(out, np.uint32)


@pytest.mark.parametrize("arch", ARCHS)
def test_lds_reads_and_writes(arch: str) -> None:
    t = Setup(arch)
    data, own = t.bits(4, 64), t.lane * 16
    flat = np.ascontiguousarray(data.T).reshape(-1)
    for name, count in _SIZES.items():
        words = t.rng.permutation(60).astype(np.uint32) if count == 4 else t.rng.integers(0, 60, 64).astype(np.uint32)
        words = np.resize(words, 64)
        (got,) = t.run(f"ds.{name}", own, data, words * 16)
        want = np.array([flat[w * 4 + 4 : w * 4 + 4 + count] for w in words]).T
        np.testing.assert_array_equal(np.atleast_2d(got), want, err_msg=name)
        (got,) = t.run(f"ds.w{name}", own, data[:count])
        np.testing.assert_array_equal(got[:count], data[:count], err_msg=name)
    old = t.bits(64)
    for name, (bits, _, _) in _NARROW.items():
        offset = t.rng.integers(0, 1000, 64).astype(np.uint32) // (bits // 8) * (bits // 8)
        (got,) = t.run(f"ds.{name}", own, data, offset, old)
        np.testing.assert_array_equal(got, narrow(flat.view(np.uint8), offset, name, old), err_msg=name)
    for name in ("b8", "b16", "b8_d16_hi", "b16_d16_hi"):
        size = 1 if "b8" in name else 2
        offset = t.lane * 16 + t.rng.integers(0, 16 // size, 64).astype(np.uint32) * size
        (got,) = t.run(f"ds.wn{name}", own, data, offset, old)
        want = flat.view(np.uint8).copy()
        for o, x in zip(offset.tolist(), old.tolist()):
            want[o : o + size] = np.frombuffer(
                (x >> (16 if "hi" in name else 0)).to_bytes(4, "little")[:size], np.uint8
            )
        np.testing.assert_array_equal(got, want.view(np.uint32).reshape(64, 4).T, err_msg=name)


@pytest.mark.parametrize("arch", ARCHS)
def test_lds_pairs_and_transposes(arch: str) -> None:
    t = Setup(arch, 1)
    x, y, z = t.bits(64), t.bits(64), t.bits(2, 64)
    two, four = t.run("ds.two", t.lane * 16, x, y, z)
    np.testing.assert_array_equal(two, np.stack([y, x]))
    np.testing.assert_array_equal(four[2:], z)
    if arch == "gfx942":
        return
    data = t.bits(4, 64)
    rows = np.ascontiguousarray(data.T).view(np.uint16).reshape(-1, 4)  # 64-bit rows of four
    where = t.rng.permutation(128)[:64]
    (got,) = t.run("ds.tr16", t.lane * 16, data, where.astype(np.uint32) * 8)
    want = [[rows[where[(i & ~15) + (i >> 2 & 3) + 4 * n]][i & 3] for n in range(4)] for i in range(64)]
    np.testing.assert_array_equal(np.ascontiguousarray(got.T).view(np.uint16), want)
    rows = np.ascontiguousarray(data.T).view(np.uint8).reshape(-1, 8)
    (got,) = t.run("ds.tr8", t.lane * 16, data, where.astype(np.uint32) * 8)
    want = [[rows[where[(i & ~15) + (i >> 3 & 1) + 2 * n]][i & 7] for n in range(8)] for i in range(64)]
    np.testing.assert_array_equal(np.ascontiguousarray(got.T).view(np.uint8), want)


def in_order(
    start: list[int], slots: list[int], operands: list[int], function: Callable
) -> tuple[list[int], list[int]]:
    """(old values, memory) of read-modify-writes in lane order."""
    memory, old = list(start), []
    for slot, x in zip(slots, operands):
        old.append(memory[slot])
        memory[slot] = function(memory[slot], x) & U32
    return old, memory


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics(arch: str) -> None:
    """Four lanes meet at every fourth location; hardware keeps an order, here it is that of the lanes."""
    t = Setup(arch, 2)
    slots = (t.lane // 4 * 4).tolist()
    for (ds, name), function in ATOMICS.items():
        start, x = t.bits(64), t.bits(64)
        start[::8], x[::5] = 3, 7
        before, after = in_order(start.tolist(), slots, x.tolist(), function)
        old, new = t.run(f"ds.atomic.{ds}", t.lane * 4, start, np.array(slots, np.uint32) * 4, x)
        assert (old.tolist(), new.tolist()) == (before, after), ds
        t.memory[:64] = start
        (old,) = t.run(f"global.atomic.{name}", t.at(np.array(slots) * 4), x)
        assert (old.tolist(), t.memory[:64].tolist()) == (before, after), name
    start, compare, new = t.bits(64), t.bits(64), t.bits(64)
    compare[::2] = start[::2]
    want = np.where(compare == start, new, start)
    old, after = t.run("ds.cmpst", t.lane * 4, start, compare, new)
    assert (old == start).all() and (after == want).all()
    t.memory[:64] = start
    (old,) = t.run("global.cmpswap", t.at(t.lane * 4), np.stack([new, compare]))
    assert (old == start).all() and (t.memory[:64] == want).all()
    a, b = t.rng.integers(-99, 99, (2, 64)).astype(np.float32)
    old, after = t.run("ds.add_f32", t.lane * 4, a, b)
    assert (old.view(np.float32) == a).all() and (after.view(np.float32) == a + b).all()
    t.memory[:64] = a.view(np.uint32)
    t.run("global.add_f32", t.at(0 * t.lane), b)
    assert t.memory[:1].view(np.float32)[0] == a[0] + b.sum()
    pairs = t.rng.integers(-9, 9, (2, 64, 2)).astype(np.float16)
    t.memory[:64] = pairs[0].view(np.uint32)[:, 0]
    t.run("global.pk_add_f16", t.at(t.lane * 4), np.ascontiguousarray(pairs[1]).view(np.uint32)[:, 0])
    assert (t.memory[:64].view(np.float16).reshape(64, 2) == pairs[0] + pairs[1]).all()
    doubles = t.rng.standard_normal((2, 64))
    t.memory[:128] = doubles[0].view(np.uint32)
    t.run("global.add_f64", t.at(t.lane * 8), doubles[1])
    assert (t.memory[:128].view(np.float64) == doubles[0] + doubles[1]).all()
    wide = t.rng.integers(0, 1 << 63, (2, 64)).astype(np.uint64)
    t.memory[:128] = wide[0].view(np.uint32)
    t.run("global.add_x2", t.at(t.lane * 8), wide[1])
    assert (t.memory[:128].view(np.uint64) == wide[0] + wide[1]).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_global_flat_and_scratch(arch: str) -> None:
    t = Setup(arch, 3)
    slots = t.rng.integers(8, 500, 64)
    base = np.array([t.memory.ctypes.data], np.uint64)
    for n in _DWORDS:
        want = np.array([t.memory[i : i + n] for i in slots]).T
        for name, x in ((f"global.{n}", [t.at(slots * 4 + 16)]), (f"flat.{n}", [t.at(slots * 4 - 16)]),
                        (f"saddr.{n}", [(slots * 4 - 8).astype(np.uint32), base])):  # fmt: skip
            np.testing.assert_array_equal(np.atleast_2d(t.run(name, *x)[0]), want, err_msg=name)
        data = t.bits(n, 64)
        places = t.rng.permutation(400)[:64] * 4
        for name, shift in ((f"store.{n}", 4), (f"flatstore.{n}", 0)):
            want = t.memory.copy()
            for i, p in enumerate(places):
                want[p + shift // 4 : p + shift // 4 + n] = data[:, i]
            t.run(name, t.at(places * 4), data)
            np.testing.assert_array_equal(t.memory, want, err_msg=name)
    old, flat = t.bits(64), t.memory.view(np.uint8)
    for name, kind in _GLOBAL.items():
        offset = t.rng.integers(0, 1000, 64) * (_NARROW[kind][0] // 8)
        np.testing.assert_array_equal(
            t.run(f"global.{name}", t.at(offset), old)[0], narrow(flat, offset, kind, old), name
        )
    for name in ("byte", "short", "byte_d16_hi", "short_d16_hi"):
        size, want = 1 if "byte" in name else 2, flat.copy()
        offset = t.rng.permutation(2000)[:64] * size
        for o, x in zip(offset, (old >> np.uint32(16 if "hi" in name else 0)).tolist()):
            want[o : o + size] = np.frombuffer(x.to_bytes(4, "little")[:size], np.uint8)
        t.run(f"store.{name}", t.at(offset), old)
        np.testing.assert_array_equal(flat, want, err_msg=name)
    data = t.bits(4, 64)
    pair, word = t.run("scratch", np.full(64, 32, np.uint32), data, old)
    np.testing.assert_array_equal(pair, data[1:3])
    np.testing.assert_array_equal(word >> np.uint32(24), old & np.uint32(255))


@pytest.mark.parametrize("arch", ARCHS)
def test_buffers(arch: str) -> None:
    """A component beyond num_records reads 0 and is not stored."""
    t = Setup(arch, 4)
    records = 1024
    resource = t.descriptor(records)
    offset = t.rng.integers(0, records // 4 + 60, 64).astype(np.uint32) * 4
    offset[:4] = [records - 24, records - 20, records - 16, 0xFFFFFF00]
    for n in _DWORDS:
        (got,) = t.run(f"buffer.{n}", offset, resource, np.array([8], np.uint32))
        at = offset.astype(np.int64)[None, :] + 12 + 4 * np.arange(n)[:, None]
        want = np.where(at + 4 <= records, t.memory[np.minimum(at // 4, 2047)], 0)
        np.testing.assert_array_equal(np.atleast_2d(got), want, err_msg=str(n))
        data, places = t.bits(n, 64), (t.rng.permutation(80)[:64] * 16).astype(np.uint32)
        want = t.memory.copy()
        for i, p in enumerate(places // 4):
            for j in range(n):
                if (p + j + 1) * 4 <= records:
                    want[p + j] = data[j, i]
        t.run(f"bufstore.{n}", data, places, resource)
        np.testing.assert_array_equal(t.memory, want)
    for name in ("ubyte", "sbyte", "ushort", "sshort"):
        kind, size = _GLOBAL[name], 1 if "byte" in name else 2
        offset = t.rng.integers(records - 40, records + 40, 64).astype(np.uint32) // size * size
        (got,) = t.run(f"buffer.{name}", offset, resource)
        want = np.where(offset + size <= records, narrow(t.memory.view(np.uint8), offset, kind, offset), 0)
        np.testing.assert_array_equal(got, want, err_msg=name)
    (got,) = t.run("buffer.idxen", t.lane, t.descriptor(40, stride=12))  # records are strides
    np.testing.assert_array_equal(got, np.where(t.lane < 40, t.memory[t.lane * 3], 0))
    start, x = t.memory.copy(), t.bits(64)
    (old,) = t.run("buffer.atomic", x, t.lane * 4, t.descriptor(128))
    np.testing.assert_array_equal(old[:32], start[:32])
    np.testing.assert_array_equal(t.memory[:64], np.where(t.lane < 32, start[:64] + x, start[:64]))


@pytest.mark.parametrize("arch", ARCHS)
def test_scalar_loads(arch: str) -> None:
    t = Setup(arch, 5)
    base = np.array([t.memory.ctypes.data & U32, t.memory.ctypes.data >> 32], np.uint32)
    one, two, four, eight = t.run("sload", base, np.array([0x44], np.uint32))
    assert one[0] == t.memory[2] and two[:, 0].tolist() == t.memory[17:19].tolist()
    assert four[:, 0].tolist() == t.memory[4:8].tolist() and eight[:, 0].tolist() == t.memory[8:16].tolist()
    four, two = t.run("sbuffer", t.descriptor(16), np.array([4], np.uint32))
    assert four[:, 0].tolist() == [*t.memory[2:4].tolist(), 0, 0] and two[:, 0].tolist() == t.memory[1:3].tolist()


@pytest.mark.parametrize("arch", ARCHS)
def test_direct_to_lds(arch: str) -> None:
    """LDS address = M0 + instruction offset + lane·size, whatever the lanes' global addresses."""
    t = Setup(arch, 6)
    slots = t.rng.integers(0, 400, 64)
    m0 = np.array([256], np.uint32)
    (got,) = t.run("lds.dword", t.at(slots * 4), m0, t.lane * 4 + 256 + 64)
    np.testing.assert_array_equal(got, t.memory[slots + 16])
    offset = (slots * 4).astype(np.uint32)
    (got,) = t.run("lds.buffer", offset, t.descriptor(1024), m0, t.lane * 4 + 256 + 16)
    np.testing.assert_array_equal(got, np.where(offset + 20 <= 1024, t.memory[slots + 4], 0))
    if arch == "gfx950":
        want = np.array([t.memory[i * 4 : i * 4 + 4] for i in slots]).T
        (got,) = t.run("lds.x4", t.at(slots * 16), m0, t.lane * 16 + 256)
        np.testing.assert_array_equal(got, want)
        (got,) = t.run("lds.buffer.x4", (slots * 16).astype(np.uint32), t.descriptor(8192), m0, t.lane * 16 + 256)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("arch", ARCHS)
def test_errors_name_instruction_address_and_kernel(arch: str) -> None:
    t = Setup(arch, 7)
    with pytest.raises(EmulatorError, match=r"unknown: .*`v_mqsad_u32_u8 .*` .*at 0x[0-9a-f]+ "):
        t.run("unknown", t.bits(2, 64), t.bits(64), t.bits(4, 64))
    outside = t.at(t.lane * 4)
    outside[9] = 64
    with pytest.raises(EmulatorError, match=r"`global_load_dword .*` at 0x[0-9a-f]+.*lane 9"):
        t.run("global.1", outside + np.uint64(16))
