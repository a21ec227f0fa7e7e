"""Decoding: what one instruction was found to be serves others that differ in registers and immediates only."""

from __future__ import annotations

import random

from fly.backends.rocdl.assemble import assemble, kernel_source
from fly.emulator import Program
from fly.emulator import decode as decoding
from fly.errors import EmulatorError

KINDS, EACH = 800, 4


def words(seed: int) -> list[bytes]:
    """Instructions of every encoding, some cut short: `KINDS` of random operations and variants, `EACH` of a kind."""
    rng, found = random.Random(seed), []
    encodings = decoding._encodings()
    for i in range(KINDS):
        encoding = encodings[i % len(encodings)]
        mask, value = encoding.fixed
        kept = mask | encoding.op_mask << encoding.op_at | encoding.deciding
        kind = rng.getrandbits(128) & ~(mask | encoding.op_mask << encoding.op_at) | value
        kind |= rng.choice(sorted(encoding.ops)) << encoding.op_at
        for low, source in encoding.sources:
            if rng.random() < 0.3:
                kept |= source << low
                kind = kind & ~(source << low) | (rng.choice((249, 250, 255)) & source) << low
        for _ in range(EACH):
            word = kind & kept | rng.getrandbits(128) & ~kept
            found.append(word.to_bytes(16, "little")[: rng.choice((16, 16, 16, 8, 4))])
    return found


def decoded(code: bytes) -> tuple | str:
    try:
        inst = decoding.decode(code, 64)
    except EmulatorError as error:
        return str(error)
    return inst, inst.fields, inst.sizes


def test_an_instruction_is_the_same_whatever_was_decoded_before(monkeypatch):
    monkeypatch.setattr(decoding, "_kinds", {})
    codes = words(1)
    shared = [decoded(code) for code in codes]
    assert len(decoding._kinds) < len(codes) / 2
    assert len({one[0].form for one in shared if isinstance(one, tuple)}) > 20
    for code, one in zip(codes, shared, strict=True):
        decoding._kinds.clear()
        assert decoded(code) == one, code.hex()


def test_code_of_a_symbol_without_a_size():
    """As hand-written assembly leaves it: the code ends with its section."""
    source = kernel_source("s_nop 0\ns_endpgm").replace(".size k, .Lend-k", "")
    machine = Program(assemble(source, "gfx950")).machine("k")
    assert [inst.name for inst in machine.instructions][:2] == ["s_nop", "s_endpgm"]
