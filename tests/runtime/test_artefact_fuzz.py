"""Artefact files whose checksum is right and whose content is anything: read, refused by name, or built again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import secrets
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fly
from fly.backends.artefact import MAGIC, VERSION, Artefact, Resources
from fly.errors import ArtefactError, FlyError
from fly.lang.signature import Field, Parameter, ScalarSpec, Signature, TensorMapSpec, TensorSpec
from fly.runtime.cache import DiskCache, cache_key
from fly.runtime.exported import Launchable, export_metadata, load

SIGNATURE = Signature(
    (
        Parameter("x", "tensor"),
        Parameter("mask", "tensor", optional=True),
        Parameter("s", "scalar", dtype="f32"),
        Parameter("m", "map"),
    )
)
SPECS = (TensorSpec("f32", 2, 8, True), None, ScalarSpec("f32"), TensorMapSpec("bf16", (64, 64), 128))
ARTEFACT = Artefact(
    "scale",
    "gfx950",
    b"code" * 8,
    "s_endpgm\n",
    SIGNATURE.flatten(SPECS),
    (64, 1, 1),
    1024,
    Resources(registers=32, spills=0),
    export_metadata(SIGNATURE, SPECS),
    ("x",),
)
KEY = cache_key({"kernel": "scale"})
PREFIX = 20  # magic, version, length of the header
DIGEST = 32

numbers = st.integers() | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400]) | st.floats()
leaves = st.none() | st.booleans() | numbers | st.text(max_size=6) | st.sampled_from(["\ud800", "\0", "ptr", "f32"])
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def with_header(header: bytes, rest: bytes = ARTEFACT.binary + ARTEFACT.isa.encode()) -> bytes:
    return sealed(struct.pack("<8sIQ", MAGIC, VERSION, len(header)) + header + rest)


def header() -> dict:
    data = ARTEFACT.to_bytes()
    (size,) = struct.unpack_from("<Q", data, 12)
    return json.loads(data[PREFIX : PREFIX + size])


def places(value, path=()):
    """Every place in a JSON value, as the steps that lead there."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in inner:
        yield from places(below, (*path, step))


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


def is_well_formed(artefact: Artefact) -> bool:
    """Whether every value has the type that it is declared with."""
    counts = [value for value in dataclasses.astuple(artefact.resources) if value is not None]
    return (
        all(type(text) is str for text in (artefact.kernel, artefact.target, artefact.isa))
        and type(artefact.binary) is bytes
        and all(type(field) is Field and type(field.name) is str for field in artefact.fields)
        and len(artefact.block) == 3
        and all(type(n) is int and n >= 0 for n in (*artefact.block, artefact.dynamic_shared, *counts))
        and (artefact.written is None or all(type(name) is str for name in artefact.written))
        and all(type(text) is str for pair in artefact.metadata.items() for text in pair)
    )


def read_every_way(data: bytes, directory) -> None:
    """As an entry of the cache, and as an exported kernel: never an error that is not fly's."""
    cache = DiskCache(directory / "cache", 1 << 20)
    path = directory / "cache" / KEY[:2] / f"{KEY}.fly"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(KEY.encode() + data)
    assert is_well_formed(cache.get_or_build(KEY, lambda: ARTEFACT))
    exported = directory / "exported.fly"
    exported.write_bytes(data)
    try:
        launchable = load(exported)
    except ArtefactError:
        return
    assert is_well_formed(launchable.artefact)
    try:
        launchable[1, 64](None, None, 1.0, None)
    except FlyError:
        return
    raise AssertionError("a launch without a tensor succeeded")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("artefacts")


def test_what_was_written_is_read(directory):
    cache = DiskCache(directory / "whole", 1 << 20)
    cache.put(KEY, ARTEFACT)
    assert cache.get(KEY) == ARTEFACT
    assert Launchable(ARTEFACT).specs == SPECS
    assert with_header(json.dumps(header(), sort_keys=True).encode()) == ARTEFACT.to_bytes()


def test_bytes_changed_under_a_right_checksum(directory):
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    body = ARTEFACT.to_bytes()[:-DIGEST]
    for i in range(400):
        data = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.choice([0, 0x22, 0x2D, 0x39, 0x5B, 0xFF, rng.randrange(256)])
        try:
            read_every_way(sealed(bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])), directory)
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {i}: {error!r}") from error


@settings(max_examples=150, deadline=None)
@given(values)
def test_headers_that_are_any_json(directory, value):
    read_every_way(with_header(json.dumps(value).encode()), directory)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_headers_with_one_value_changed(directory, data):
    whole = header()
    path = data.draw(st.sampled_from(list(places(whole))))
    read_every_way(with_header(json.dumps(changed(whole, path, data.draw(values))).encode()), directory)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_descriptions_of_arguments_with_one_value_changed(directory, data):
    rows = json.loads(ARTEFACT.metadata["arguments"])
    path = data.draw(st.sampled_from(list(places(rows))))
    whole = header()
    whole["metadata"]["arguments"] = json.dumps(changed(rows, path, data.draw(values)))
    read_every_way(with_header(json.dumps(whole).encode()), directory)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"kernel":' * 100_000,
        b"[]",
        b"1" * 5000,
        b"NaN",
        b"\xff\xfe[\x00]\x00",
        json.dumps(header() | {"metadata": []}).encode(),
        json.dumps(header() | {"resources": None}).encode(),
        json.dumps(header() | {"fields": ["xp"]}).encode(),
        json.dumps(header() | {"block": [True, 1, 1]}).encode(),
        json.dumps(header() | {"kernel": "\ud800"}).encode(),
        json.dumps(header() | {"dynamic_shared": -1}).encode(),
        json.dumps(header() | {"binary_bytes": 10**30, "isa_bytes": -(10**30) + 41}).encode(),
    ],
    ids=lambda text: text[:12],
)
def test_strange_headers_are_named(text):
    with pytest.raises(ArtefactError, match="malformed artefact header"):
        Artefact.from_bytes(with_header(text))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[1]", "[[[], null]]", "[[{}, null]]", '[["x", {}]]', "null", '[[{"name": 1}, 2]]']
)
def test_strange_descriptions_of_arguments_are_named(text):
    with pytest.raises(ArtefactError, match="malformed argument description"):
        Launchable(dataclasses.replace(ARTEFACT, metadata={"arguments": text}))


@fly.kernel
def store_one(x: fly.Tensor):
    """x[0] = 1"""
    x.store(fly.f32(1.0), 0)


@pytest.mark.parametrize(
    "other",
    [{"kernel": "another"}, {"target": "gfx942"}, {"block": (128, 1, 1)}, {"fields": ()}, {"metadata": {}}],
    ids=str,
)
def test_an_entry_that_says_it_is_for_something_else_is_built_again(other, tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_CACHE_DIR", str(tmp_path))
    x = TensorSpec("f32", 1, 4, True)
    built = fly.compile(store_one, x, block=64, target="gfx950")
    (entry,) = tmp_path.glob("??/*.fly")
    entry.write_bytes(entry.stem.encode() + dataclasses.replace(built, **other).to_bytes())
    assert fly.compile(store_one, x, block=64, target="gfx950").binary == built.binary
    again = Artefact.from_bytes(entry.read_bytes()[64:])
    assert dataclasses.replace(again, metadata=built.metadata) == built


def test_a_rank_that_would_fill_the_memory_is_refused():
    rows = json.loads(ARTEFACT.metadata["arguments"])
    rows[0][1]["rank"] = 10**12
    with pytest.raises(ArtefactError, match="rank is 1000000000000; accepted: an int from 0 to 64"):
        Launchable(dataclasses.replace(ARTEFACT, metadata={"arguments": json.dumps(rows)}))
