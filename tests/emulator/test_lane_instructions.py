"""Exchange between lanes: DPP, SDWA, readlane and writelane, permlane swaps, ds_bpermute, ds_permute, ds_swizzle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulator.machine_code import ARCHS, Case, bench

# control: source lane of a lane, None where there is none
DPP: dict[str, Callable[[int], int | None]] = {
    "quad_perm:[3,1,0,2]": lambda i: i // 4 * 4 + (3, 1, 0, 2)[i % 4],
    "row_shl:1": lambda i: i + 1 if i % 16 < 15 else None,
    "row_shl:7": lambda i: i + 7 if i % 16 < 9 else None,
    "row_shr:1": lambda i: i - 1 if i % 16 else None,
    "row_shr:15": lambda i: i - 15 if i % 16 == 15 else None,
    "row_ror:1": lambda i: i // 16 * 16 + (i % 16 - 1) % 16,
    "row_ror:13": lambda i: i // 16 * 16 + (i % 16 - 13) % 16,
    "row_mirror": lambda i: i // 16 * 16 + 15 - i % 16,
    "row_half_mirror": lambda i: i // 8 * 8 + 7 - i % 8,
    "row_bcast:15": lambda i: i // 16 * 16 - 1 if i >= 16 else None,
    "row_bcast:31": lambda i: 31 if i >= 32 else None,
    "row_newbcast:5": lambda i: i // 16 * 16 + 5,
    "wave_shl:1": lambda i: i + 1 if i < 63 else None,
    "wave_shr:1": lambda i: i - 1 if i else None,
    "wave_rol:1": lambda i: (i + 1) % 64,
    "wave_ror:1": lambda i: (i - 1) % 64,
}
# encoded offset of ds_swizzle_b32: source lane of a lane
SWIZZLE: dict[str, tuple[str, Callable[[int], int]]] = {
    "quad": ("swizzle(QUAD_PERM,2,0,3,1)", lambda i: i // 4 * 4 + (2, 0, 3, 1)[i % 4]),
    "broadcast": ("swizzle(BROADCAST,8,3)", lambda i: i // 8 * 8 + 3),
    "swap": ("swizzle(SWAP,16)", lambda i: i ^ 16),
    "reverse": ("swizzle(REVERSE,8)", lambda i: i // 8 * 8 + 7 - i % 8),
    "bitmask": ("0x1423", lambda i: i & 32 | ((i & 31 & 3) | 1) ^ 5),
    "rotate": ("0xc060", lambda i: i & 32 | (i + 3) % 32),
    "rotate.back": ("0xc460", lambda i: i & 32 | (i - 3) % 32),
    "rotate.keep": ("0xc061", lambda i: i & 32 | (i & 1) | ((i + 3) % 32 & 30)),
}
_SELECT = ["BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD"]
_SHIFT = {n: (8 * i, 8) if i < 4 else (16 * (i - 4), 16) if i < 6 else (0, 32) for i, n in enumerate(_SELECT)}
EVEN = 0x5555555555555555


def _name(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


def _exec(mask: int, text: str) -> str:
    """The assembly with some lanes switched off."""
    return (
        f"s_mov_b32 exec_lo, {mask & 0xFFFFFFFF:#x}\ns_mov_b32 exec_hi, {mask >> 32:#x}\n{text}\ns_mov_b64 exec, -1"
    )


_DPP = "v_mov_b32 $0, $2\ns_nop 4\nv_mov_b32_dpp $0, $1 {} row_mask:{} bank_mask:{}{}"
CASES = (
    *(Case(f"dpp.{_name(c)}", _DPP.format(c, "0xf", "0xf", ""), "v", "v v") for c in DPP),
    *(Case(f"bound.{_name(c)}", _DPP.format(c, "0xf", "0xf", " bound_ctrl:0"), "v", "v v") for c in DPP),
    Case("dpp.masks", _DPP.format("row_ror:1", "0xa", "0x6", ""), "v", "v v"),
    *(
        Case(
            f"dpp.exec{i}",
            "v_mov_b32 $0, $2\ns_nop 4\n"
            + _exec(EVEN, f"s_nop 4\nv_mov_b32_dpp $0, $1 row_shl:1 row_mask:0xf bank_mask:0xf{bound}"),
            "v",
            "v v",
        )
        for i, bound in enumerate(("", " bound_ctrl:0"))
    ),
    Case("dpp.modifiers", "s_nop 4\nv_add_f32_dpp $0, -|$1|, $2 row_ror:2 row_mask:0xf bank_mask:0xf", "v", "v v"),
    *(
        Case(f"sdwa.{a}.{b}", f"v_add_u32_sdwa $0, $1, sext($2) dst_sel:DWORD src0_sel:{a} src1_sel:{b}", "v", "v v")
        for a in _SELECT
        for b in ("BYTE_1", "WORD_1")
    ),
    *(
        Case(
            f"sdwa.dst.{d}.{u}",
            f"v_mov_b32 $0, $3\nv_add_u32_sdwa $0, $1, $2 dst_sel:{d} dst_unused:UNUSED_{u} "
            "src0_sel:DWORD src1_sel:DWORD",
            "v",
            "v v v",
        )
        for d in _SELECT
        for u in ("PAD", "SEXT", "PRESERVE")
    ),
    Case(
        "sdwa.float",
        "v_mul_f16_sdwa $0, -$1, |$2| dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:WORD_0",
        "v",
        "v v",
    ),
    Case("sdwa.compare", "v_cmp_lt_i16_sdwa $0, $1, $2 src0_sel:WORD_1 src1_sel:WORD_0", "s2", "v v"),
    Case("readlane", "s_nop 4\nv_readlane_b32 $0, $2, 37\nv_readlane_b32 $1, $2, $3", "s s", "v s"),
    Case("readfirst", _exec(0xFF00 << 32, "v_readfirstlane_b32 $0, $1"), "s", "v"),
    Case("writelane", "v_mov_b32 $0, $1\ns_nop 4\n" + _exec(1, "v_writelane_b32 $0, $2, 41"), "v", "v s"),
    *(
        Case(
            f"permlane{n}",
            f"v_mov_b32 $0, $2\nv_mov_b32 $1, $3\ns_nop 4\nv_permlane{n}_swap_b32 $0, $1\ns_nop 4",
            "v v",
            "v v",
            archs=("gfx950",),
        )
        for n in (16, 32)
    ),
    *(
        Case(
            f"permlane{n}.exec",
            "v_mov_b32 $0, $2\nv_mov_b32 $1, $3\ns_nop 4\n"
            + _exec(EVEN, f"s_nop 4\nv_permlane{n}_swap_b32 $0, $1\ns_nop 4"),
            "v v",
            "v v",
            archs=("gfx950",),
        )
        for n in (16, 32)
    ),
    *(
        Case(f"bpermute{o}", f"ds_bpermute_b32 $0, $1, $2 offset:{o}\ns_waitcnt lgkmcnt(0)", "v", "v v")
        for o in (0, 8)
    ),
    Case("bpermute.exec", _exec(EVEN, "ds_bpermute_b32 $0, $1, $2\ns_waitcnt lgkmcnt(0)"), "v", "v v"),
    Case("permute", "ds_permute_b32 $0, $1, $2\ns_waitcnt lgkmcnt(0)", "v", "v v"),
    *(
        Case(f"swizzle.{n}", f"ds_swizzle_b32 $0, $1 offset:{o}\ns_waitcnt lgkmcnt(0)", "v", "v")
        for n, (o, _) in SWIZZLE.items()
    ),
)


def values(seed: int = 0, count: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1 << 32, 64, dtype=np.uint32) for _ in range(count)]


@pytest.mark.parametrize("arch", ARCHS)
def test_dpp(arch: str) -> None:
    """Lanes without a source keep the old value, or read 0 with bound_ctrl."""
    shared, (x, old) = bench(CASES, arch), values(1, 2)
    for control, source in DPP.items():
        want = [(old[i] if source(i) is None else x[source(i)]) for i in range(64)]
        np.testing.assert_array_equal(shared.run(f"dpp.{_name(control)}", x, old)[0], want, err_msg=control)
        want = [(0 if source(i) is None else x[source(i)]) for i in range(64)]
        np.testing.assert_array_equal(shared.run(f"bound.{_name(control)}", x, old)[0], want, err_msg=control)


@pytest.mark.parametrize("arch", ARCHS)
def test_dpp_masks(arch: str) -> None:
    shared, (x, old) = bench(CASES, arch), values(2, 2)
    source = DPP["row_ror:1"]
    want = [x[source(i)] if 0xA >> i // 16 & 1 and 0x6 >> i // 4 % 4 & 1 else old[i] for i in range(64)]
    np.testing.assert_array_equal(shared.run("dpp.masks", x, old)[0], want)
    # row_shl:1 reads an odd lane, which is off
    np.testing.assert_array_equal(shared.run("dpp.exec0", x, old)[0], old)
    np.testing.assert_array_equal(
        shared.run("dpp.exec1", x, old)[0], [0 if i % 2 == 0 else old[i] for i in range(64)]
    )
    a, b = np.random.default_rng(3).integers(-9, 9, (2, 64)).astype(np.float32)
    (out,) = shared.run("dpp.modifiers", a, b)
    moved = a[[i // 16 * 16 + (i % 16 - 2) % 16 for i in range(64)]]
    np.testing.assert_array_equal(out.view(np.float32), b - np.abs(moved))


def select(x: int, name: str, signed: bool) -> int:
    at, width = _SHIFT[name]
    x = x >> at & (1 << width) - 1
    return x - (1 << width) if signed and x >> (width - 1) else x


@pytest.mark.parametrize("arch", ARCHS)
def test_sdwa(arch: str) -> None:
    shared, (x, y, old) = bench(CASES, arch), values(4, 3)
    for a in _SELECT:
        for b in ("BYTE_1", "WORD_1"):
            want = [select(int(p), a, False) + select(int(q), b, True) & 0xFFFFFFFF for p, q in zip(x, y)]
            np.testing.assert_array_equal(shared.run(f"sdwa.{a}.{b}", x, y)[0], want, err_msg=f"{a} {b}")
    for d in _SELECT:
        at, width = _SHIFT[d]
        field = ((1 << width) - 1) << at
        for unused in ("PAD", "SEXT", "PRESERVE"):
            want = []
            for p, q, o in zip(x.tolist(), y.tolist(), old.tolist()):
                total = p + q & (1 << width) - 1
                rest = o & ~field if unused == "PRESERVE" else 0
                if unused == "SEXT" and total >> (width - 1):
                    rest = 0xFFFFFFFF << (at + width)
                want.append((total << at | rest) & 0xFFFFFFFF)
            (got,) = shared.run(f"sdwa.dst.{d}.{unused}", x, y, old)
            np.testing.assert_array_equal(got, want, err_msg=f"{d} {unused}")
    pairs = np.random.default_rng(5).integers(-9, 9, (2, 64, 2)).astype(np.float16)
    (out,) = shared.run("sdwa.float", *(np.ascontiguousarray(p).view(np.uint32)[:, 0] for p in pairs))
    want = (-pairs[0, :, 1] * np.abs(pairs[1, :, 0])).view(np.uint16).astype(np.uint32) << np.uint32(16)
    np.testing.assert_array_equal(out, want)
    (out,) = shared.run("sdwa.compare", x, y)
    flags = np.unpackbits(out[:, 0].copy().view(np.uint8), bitorder="little").astype(bool)
    np.testing.assert_array_equal(flags, (x >> 16).astype(np.int16) < (y & 0xFFFF).astype(np.int16))


@pytest.mark.parametrize("arch", ARCHS)
def test_single_lanes(arch: str) -> None:
    shared, (x,) = bench(CASES, arch), values(6)
    fixed, indexed = shared.run("readlane", x, np.array([64 + 9], np.uint32))
    assert (fixed == x[37]).all() and (indexed == x[9]).all()
    assert (shared.run("readfirst", x)[0] == x[40]).all()
    want = x.copy()
    want[41] = 12345
    np.testing.assert_array_equal(shared.run("writelane", x, np.array([12345], np.uint32))[0], want)


@pytest.mark.parametrize("distance", [16, 32])
def test_permlane_swap(distance: int) -> None:
    """The odd rows (the upper half) of the first trade places with the even rows (the lower half) of the second."""
    shared, (x, y) = bench(CASES, "gfx950"), values(7, 2)
    upper = np.arange(64) & distance != 0
    want_x, want_y = x.copy(), y.copy()
    want_x[upper], want_y[~upper] = y[~upper], x[upper]
    first, second = shared.run(f"permlane{distance}", x, y)
    np.testing.assert_array_equal(first, want_x)
    np.testing.assert_array_equal(second, want_y)
    even = np.arange(64) % 2 == 0
    first, second = shared.run(f"permlane{distance}.exec", x, y)
    np.testing.assert_array_equal(first, np.where(even, want_x, x))
    np.testing.assert_array_equal(second, np.where(even, want_y, y))


@pytest.mark.parametrize("arch", ARCHS)
def test_permutes_through_lds(arch: str) -> None:
    shared, (address, x) = bench(CASES, arch), values(8, 2)
    for offset in (0, 8):  # any address: bits above lane 63 and below the dword are ignored
        want = [x[(int(a) + offset >> 2) % 64] for a in address]
        np.testing.assert_array_equal(shared.run(f"bpermute{offset}", address, x)[0], want)
    want = [x[s] if (s := (int(a) >> 2) % 64) % 2 == 0 else 0 for a in address]
    (out,) = shared.run("bpermute.exec", address, x)
    np.testing.assert_array_equal(out[::2], want[::2])
    target = np.random.default_rng(9).permutation(64).astype(np.uint32)
    want = np.zeros(64, np.uint32)
    want[target] = x
    np.testing.assert_array_equal(shared.run("permute", target * 4 + 256, x)[0], want)
    few = np.minimum(target, 40)  # lanes without a writer get 0; the highest lane wins
    want = np.zeros(64, np.uint32)
    for i in range(64):
        want[few[i]] = x[i]
    np.testing.assert_array_equal(shared.run("permute", few * 4, x)[0], want)
    for name, (_, source) in SWIZZLE.items():
        (out,) = shared.run(f"swizzle.{name}", x)
        np.testing.assert_array_equal(out, [x[source(i)] for i in range(64)], err_msg=name)
