import ctypes
import struct
import threading

import numpy as np
import pytest

from fly.errors import LaunchError
from fly.lang.signature import Field
from fly.runtime.packing import ArgumentSlot, check_block, dim3, offsets, packer

KINDS = {"ptr": "P", "i32": "i", "i64": "q", "f32": "f", "f64": "d"}


@pytest.mark.parametrize(
    "kinds",
    [
        ("ptr", "i32", "i32", "i32", "i64"),
        ("i32", "ptr", "f32", "f64", "f32"),
        ("f32", "i64", "i32"),
        ("i32",),
        ("ptr", "f32", "ptr"),
    ],
)
def test_arguments_lie_where_the_c_compiler_puts_them(kinds):
    fields = [Field(f"x{i}", kind) for i, kind in enumerate(kinds)]
    values = [float(i) if kind[0] == "f" else i + 1 for i, kind in enumerate(kinds)]
    native = "@" + "".join(KINDS[kind] for kind in kinds)
    assert packer(fields).pack(*values) == struct.pack(native, *values)
    ends = [struct.calcsize(native[: i + 2]) for i in range(len(kinds))]
    assert offsets(fields)[-1] == packer(fields).size == ends[-1]
    assert offsets(fields)[0] == 0
    for field, offset, end in zip(fields, offsets(fields), ends):
        assert end - offset == struct.calcsize(KINDS[field.kind])


@pytest.mark.parametrize(
    ("kinds", "places"),
    [
        (("map",), [0, 128]),
        (("map", "map", "i32"), [0, 128, 256, 260]),
        (("i32", "map", "f64"), [0, 64, 192, 200]),
        (("ptr", "i32", "i32", "map", "i32", "map"), [0, 8, 12, 64, 192, 256, 384]),
    ],
)
def test_tensor_maps_are_128_bytes_at_multiples_of_64(kinds, places):
    fields = [Field(f"x{i}", kind) for i, kind in enumerate(kinds)]
    assert offsets(fields) == places
    values = [bytes([i]) * 128 if kind == "map" else i for i, kind in enumerate(kinds)]
    packed = packer(fields).pack(*values)
    assert len(packed) == places[-1]
    for kind, value, place in zip(kinds, values, places):
        size = struct.calcsize({**KINDS, "map": "128s"}[kind])
        assert packed[place : place + size] == (value if kind == "map" else struct.pack(KINDS[kind], value))
        packed = packed[:place] + bytes(size) + packed[place + size :]
    assert packed == bytes(len(packed))  # zeros between them


def test_drivers_are_pointed_to_the_buffer_or_to_each_argument():
    slot = ArgumentSlot([0, 64, 192, 200])
    slot.view[:] = bytes(range(200))
    start, *rest = (ctypes.c_void_p * 3).from_address(slot.parameters)
    assert [place - start for place in rest] == [64, 192]
    assert ctypes.string_at(start, 200) == bytes(slot.view)
    words = (ctypes.c_size_t * 5).from_address(slot.extra)
    assert (words[0], words[2], words[4]) == (1, 2, 3)  # HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
    assert words[1] == start
    assert ctypes.c_size_t.from_address(words[3]).value == 200


def test_every_thread_starts_with_what_is_packed():
    packed = bytes(range(20))
    slot = ArgumentSlot([0, 8, 16, 20], packed)
    slot.view[:] = bytes(20)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((bytes(slot.view), list(slot.words))))
    thread.start()
    thread.join()
    assert seen == [(packed, list(struct.unpack("<2Q", packed[:16])))]


def test_words_are_the_buffers():
    slot = ArgumentSlot([0, 4, 8, 16, 28])
    slot.words[1] = 0x1234
    assert bytes(slot.view) == bytes(8) + (0x1234).to_bytes(8, "little") + bytes(12)


def test_a_kernel_without_arguments():
    slot = ArgumentSlot([0])
    assert (
        len(slot.view) == ctypes.c_size_t.from_address((ctypes.c_size_t * 5).from_address(slot.extra)[3]).value == 0
    )


@pytest.mark.parametrize(
    ("value", "sizes"),
    [
        (7, (7, 1, 1)),
        ((7,), (7, 1, 1)),
        ([7, 2], (7, 2, 1)),
        ((7, 2, 3), (7, 2, 3)),
        (np.int64(7), (7, 1, 1)),
        ((7, np.int32(2), 3), (7, 2, 3)),
    ],
)
def test_sizes(value, sizes):
    result = dim3(value, "grid")
    assert result == sizes
    assert all(type(size) is int for size in result)


@pytest.mark.parametrize(
    "value",
    [0, -1, (4, 0), (4, 4, -4), (), (1, 2, 3, 4), 1.0, (1, 2.0, 3), True, (1, True), None, "12", (1, "2", 3)],
)
def test_bad_sizes_are_named(value):
    with pytest.raises(LaunchError, match=r"grid is .*; accepted: one to three positive ints"):
        dim3(value, "grid")


def test_a_block_has_at_most_1024_threads():
    check_block((32, 32, 1))
    with pytest.raises(LaunchError, match=r"block is \(32, 33, 1\), 1056 threads; accepted: at most 1024"):
        check_block((32, 33, 1))


def test_each_thread_has_its_own_argument_buffer():
    slot = ArgumentSlot([0, 8])
    seen = {}

    def work(name):
        slot.view[:] = name.encode() * 8
        seen[name] = (slot.extra, slot.parameters)
        barrier.wait()
        assert bytes(slot.view) == name.encode() * 8

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not set(seen["a"]) & set(seen["b"])
