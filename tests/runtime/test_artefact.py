import os
import struct

import pytest

from fly.backends.artefact import VERSION, Artefact, Resources
from fly.errors import ArtefactError
from fly.lang.signature import Field

ARTEFACT = Artefact(
    kernel="attend",
    target="gfx950",
    binary=bytes(range(256)),
    isa="v_add_f32 ; müß\n",
    fields=(Field("q", "ptr"), Field("scale", "f32")),
    block=(256, 1, 1),
    dynamic_shared=65536,
    resources=Resources(registers=128, spills=0),
    metadata={"seconds: isa": "0.1"},
)


def test_the_file_holds_everything(tmp_path):
    path = tmp_path / "attend.fly"
    ARTEFACT.save(path)
    assert Artefact.load(path) == ARTEFACT


def test_equal_artefacts_have_equal_bytes():
    assert ARTEFACT.to_bytes() == Artefact.from_bytes(ARTEFACT.to_bytes()).to_bytes()


def test_what_is_unknown_stays_unknown():
    assert Artefact.from_bytes(ARTEFACT.to_bytes()).resources.occupancy is None


@pytest.mark.parametrize("position", [0, 9, 13, 40, -40, -1])
def test_one_changed_byte_is_found(position):
    data = bytearray(ARTEFACT.to_bytes())
    data[position] ^= 1
    with pytest.raises(ArtefactError):
        Artefact.from_bytes(bytes(data))


@pytest.mark.parametrize("size", [0, 5, 19, 100, -1])
def test_a_file_cut_short_is_found(size):
    with pytest.raises(ArtefactError):
        Artefact.from_bytes(ARTEFACT.to_bytes()[:size])


def test_another_version_is_named():
    data = bytearray(ARTEFACT.to_bytes())
    struct.pack_into("<I", data, 8, VERSION + 1)
    with pytest.raises(ArtefactError, match=f"version {VERSION + 1}; this fly reads version {VERSION}"):
        Artefact.from_bytes(bytes(data))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ArtefactError, match=r"absent\.fly: cannot be read: No such file"):
        Artefact.load(tmp_path / "absent.fly")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_read_without_waiting_for_anyone(tmp_path, make):
    make(tmp_path / "kernel.fly")
    with pytest.raises(ArtefactError, match=r"kernel\.fly: not a regular file"):
        Artefact.load(tmp_path / "kernel.fly")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "kernel.fly").touch()
    os.truncate(tmp_path / "kernel.fly", 1 << 40)
    with pytest.raises(ArtefactError, match=f"kernel.fly: {1 << 40} bytes; accepted: at most {1 << 30}"):
        Artefact.load(tmp_path / "kernel.fly")


def test_another_file_is_no_artefact(tmp_path):
    path = tmp_path / "text"
    path.write_text("something else, long enough to hold a header and a checksum of it")
    with pytest.raises(ArtefactError, match="not a fly artefact"):
        Artefact.load(path)
