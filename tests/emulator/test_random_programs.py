"""Random LLVM IR: the same programs compiled for the host and for the emulated GPUs agree to the bit."""

from __future__ import annotations

import ctypes
import os
import struct

import numpy as np
import pytest

from fly.backends.rocdl.codegen import link
from fly.emulator import Program, Region
from fly.emulator.host import available, compiled
from tests.emulator import toolchain
from tests.emulator.random_programs import GPU, HOST, IN_BYTES, OUT_BYTES, programs
from tests.host_level import host_level

LANES = 64
CHUNKS, EACH, KERNEL = 20, 105, 7  # programs in all: CHUNKS·EACH; KERNEL of them make one kernel
SIZE = 9
# another seed may find more of LLVM's bugs, too: `random_programs.py` names those that it avoids
SEED = int(os.environ.get("FLY_TEST_SEED", "2026"))


def inputs(seed: int) -> np.ndarray:
    """uint8 (64, IN_BYTES): random bits, with small numbers and the edges of the float formats among them."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, (LANES, IN_BYTES // 4), dtype=np.uint32)
    kinds = rng.integers(0, 8, words.shape)
    floats = (rng.standard_normal(words.shape) * 10.0 ** rng.integers(-3, 4, words.shape)).astype(np.float32)
    words = np.where(kinds < 2, floats.view(np.uint32), words)
    words = np.where(kinds == 2, rng.integers(-20, 20, words.shape).astype(np.int32).view(np.uint32), words)
    halves = rng.standard_normal((*words.shape, 2)).astype(np.float16).view(np.uint32)[..., 0]
    words = np.where(kinds == 3, halves, words)
    edges = np.array([0, 0x80000000, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x807FFFFF, 0x7F7FFFFF,
                      0xFFFFFFFF, 0x7FFFFFFF, 0x7C003C00, 0x00013C00, 0xFBFF8001, 0x4F000000, 0xCF000000],
                     np.uint32)  # fmt: skip
    words = np.where(kinds == 4, rng.choice(edges, words.shape), words)
    doubles = rng.standard_normal((LANES, IN_BYTES // 8)) * 10.0 ** rng.integers(-8, 9, (LANES, IN_BYTES // 8))
    pairs = words.reshape(LANES, -1, 2)
    pairs[:, ::4] = doubles.view(np.uint32).reshape(LANES, -1, 2)[:, ::4]
    return np.ascontiguousarray(pairs).view(np.uint8).reshape(LANES, IN_BYTES)


def host_results(seed: int, first: int, number: int, data: np.ndarray, level: str) -> np.ndarray:
    """uint8 (programs, 64, OUT_BYTES) of the host's machine code for an instruction set."""
    head, functions = programs(seed, first, number, HOST, SIZE)
    text = [head, *functions, "attributes #1 = { noinline }"]
    for i in range(first, first + number):
        text.append(f"define void @run{i}(ptr %in, ptr %out) {{ call void @p{i}(ptr %in, ptr %out) ret void }}")
    engine = compiled("\n".join(text), level)
    out = np.zeros((number, LANES, OUT_BYTES), np.uint8)
    for i in range(number):
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
            engine.get_function_address(f"run{first + i}")
        )
        for lane in range(LANES):
            call(data[lane].ctypes.data, out[i, lane].ctypes.data)
    return out


def gpu_module(seed: int, first: int, number: int) -> str:
    """Kernels `@k<j>` that run KERNEL programs each, lane by lane on its own input and output."""
    head, functions = programs(seed, first, number, GPU, SIZE)
    text = [head, "declare i32 @llvm.amdgcn.workitem.id.x()", *functions]
    for j, start in enumerate(range(first, first + number, KERNEL)):
        calls = []
        for i in range(start, min(start + KERNEL, first + number)):
            offset = (i - first) * LANES * OUT_BYTES
            calls.append(
                f"  %o{i} = getelementptr i8, ptr addrspace(1) %mine, i64 {offset}\n"
                f"  call void @p{i}(ptr addrspace(1) %lane.in, ptr addrspace(1) %o{i})"
            )
        text.append(f"""define amdgpu_kernel void @k{j}(ptr addrspace(1) %in, ptr addrspace(1) %out) #0 {{
  %lane = call i32 @llvm.amdgcn.workitem.id.x()
  %wide = zext i32 %lane to i64
  %a = mul i64 %wide, {IN_BYTES}
  %b = mul i64 %wide, {OUT_BYTES}
  %lane.in = getelementptr i8, ptr addrspace(1) %in, i64 %a
  %mine = getelementptr i8, ptr addrspace(1) %out, i64 %b
{chr(10).join(calls)}
  ret void
}}""")
    # without unaligned accesses, which the checks report
    features = '"target-features"="-unaligned-access-mode"'
    text.append(f'attributes #0 = {{ "amdgpu-flat-work-group-size"="64,64" {features} }}')
    text.append("attributes #1 = { alwaysinline }")
    return "\n".join(text)


def gpu_results(seed: int, first: int, number: int, data: np.ndarray, arch: str, checks: bool) -> np.ndarray:
    """uint8 (programs, 64, OUT_BYTES) of emulated machine code."""
    program = Program(link(toolchain.emit(gpu_module(seed, first, number), arch)), arch)
    out = np.zeros((number, LANES, OUT_BYTES), np.uint8)
    kernarg = struct.pack("<2Q", data.ctypes.data, out.ctypes.data)
    regions = [Region(data.ctypes.data, data.nbytes, "in"), Region(out.ctypes.data, out.nbytes, "out")]
    for j in range(len(range(0, number, KERNEL))):
        program.launch(f"k{j}", (1,), (LANES,), kernarg, regions, checks=checks)
    return out


def explain(seed: int, index: int, want: np.ndarray, got: np.ndarray) -> str:
    """The first difference of one program, and its IR."""
    lane, byte = (int(x) for x in np.argwhere(want != got)[0])
    at = byte // 8 * 8
    pair = " / ".join(x[lane, at : at + 8].tobytes().hex() for x in (want, got))
    source = programs(seed, index, 1, GPU, SIZE)[1][0]
    return f"program {index} of seed {seed}: lane {lane}, bytes {at}..{at + 7} host/emulated {pair}\n{source}"


@pytest.mark.sample(5)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_programs_agree(chunk: int) -> None:
    print(f"seed {SEED}; repeat with FLY_TEST_SEED={SEED}")
    data = inputs(SEED + chunk)
    first = chunk * EACH
    want = host_results(SEED, first, EACH, data, host_level())
    for arch in ("gfx942", "gfx950"):
        # some with the checks on: they cost time, and must have nothing to say about compiled code
        got = gpu_results(SEED, first, EACH, data, arch, checks=chunk % 10 == 0)
        different = np.flatnonzero((want != got).any((1, 2)))
        assert not different.size, f"{arch}: {different.size} of {EACH} programs differ\n" + explain(
            SEED, first + int(different[0]), want[different[0]], got[different[0]]
        )


def test_programs_do_something() -> None:
    """The host's results vary between lanes in nearly every program: equal constants would prove nothing."""
    data = inputs(SEED)
    results = host_results(SEED, 0, 50, data, host_level())
    varied = (results != results[:, :1]).any((1, 2))
    assert varied.sum() >= 45


@pytest.mark.parametrize("level", available())
def test_instruction_sets_of_the_host_agree(level: str) -> None:
    """Fresh programs, and two in which LLVM's own minimumnum and maximumnum are wrong with AVX-512."""
    fresh = int.from_bytes(os.urandom(4), "little")
    for seed, first, number in ((fresh, 0, EACH), (2026, 1585, 1), (2026, 1847, 1)):
        data = inputs(seed + first // EACH)
        want, got = (host_results(seed, first, number, data, each) for each in ("baseline", level))
        different = np.flatnonzero((want != got).any((1, 2)))
        assert not different.size, f"baseline and {level} differ: " + explain(
            seed, first + int(different[0]), want[different[0]], got[different[0]]
        )
