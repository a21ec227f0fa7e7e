"""Dropout: which weights are kept is a function of their positions, so that every kernel and tile agrees on it.

A call of Philox4x32 decides for 4 x 8 positions: those of queries that differ in bits 0 and 3, and of keys that
differ in bits 0, 1 and 3. What lanes hold of an accumulator is then spread over few calls, for every matrix
instruction.
With q and k the positions of a query and a key in their sequences, all numbers unsigned:

    key = seed;  counter = (k>>4<<1 | k>>2&1,  q>>4<<2 | q>>1&3,  sequence * heads + head,  offset)
    j = (k & 1) | (q>>3&1) << 1 | (k>>3&1) << 2 | (q & 1) << 3 | (k>>1&1) << 4
    bits 7 to 4 of a position's byte: bit j of the call's words 0 to 3
    bits 3 to 0: bit j of word w, rotated to the left by SPREAD[w], xor word 0, rotated by SHARED; w = 0 to 3
    kept iff byte >= T;  T = 256 p, rounded;  what is kept is scaled by 256 / (256 - T)

So the upper four bits of a byte are Philox's own, and the bytes of any two positions are independent (SPREAD and
SHARED are of a search for that; of 465 triples that begin with position 0 435 are). Bits of a byte are in eight words
at one place since 32 comparisons are eight instructions then, one for each bit of T.

`rng_state` is a tensor of two int64, (seed, offset); of the offset the low 32 bits count. Philox: Salmon, Moraes,
Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), whose statistical tests 7 rounds pass.
`dropout_mask.py` is the same for torch, `dropout_tile.py` for accumulators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fly
from fly.errors import ArgumentError

from ..arguments.callers import arg, problem, written

Words = tuple[Any, Any, Any, Any]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
ROUNDS = 7
SPREAD, SHARED = (14, 3, 8, 18), 2  # rotations
LEAST, MOST = 1 / 512, 511 / 512  # probabilities that are 1 to 255 of 256


def threshold(probability: float, function: str = "") -> int:
    """T, of 256: bytes below it are dropped. 0 for no dropout.

    Raises:
        ArgumentError: a probability that is none of 0 and [1/512, 511/512): in 256ths it would be none or all.
    """
    if probability != 0 and not LEAST <= probability < MOST:
        raise problem(
            ArgumentError,
            f"{arg.dropout_p} must be 0 or from 1/512 up to 511/512, as it is rounded to 256ths, "
            f"got {written(probability)}",
            function,
        )
    return int(256 * probability + 0.5)


def scale(dropped: int) -> float:
    """What kept weights are multiplied by, of the threshold: 1 / the share that is kept."""
    return 256 / (256 - dropped)


def philox(key: Sequence[Any], counter: Words, rounds: int = ROUNDS) -> Words:
    """Philox4x32: four random words of a key and a counter of four, low word first; traced i32 or vectors.

    key: two words, or what all rounds make of them (`round_key`), one round's two after the other's.
    """
    words: Words = counter
    for number in range(rounds):
        high_0, low_0 = fly.mul_wide(words[0], MULTIPLIERS[0])
        high_1, low_1 = fly.mul_wide(words[2], MULTIPLIERS[1])
        new_0 = high_1 ^ words[1] ^ round_key(key, number, 0)
        words = (new_0, low_1, high_0 ^ words[3] ^ round_key(key, number, 1), low_0)
    return words


def round_key(key: Sequence[Any], number: Any, which: int) -> Any:
    """A round's first or second word, of a key as `philox` takes it; `number`: static, or for a key of two words."""
    return key[which] + (number * KEY_STEPS[which] & WORD) if len(key) == 2 else key[2 * number + which]


def query_number(query: Any) -> Any:
    """A query's word of the counter: its position without bits 0 and 3."""
    return (query >> 4 << 2) | ((query >> 1) & 3)


def key_number(key: Any) -> Any:
    """A key's word of the counter: its position without bits 0, 1 and 3."""
    return (key >> 4 << 1) | ((key >> 2) & 1)


def query_place(query: Any) -> Any:
    """A query's bits of the number of a position in its call."""
    return ((query & 1) << 3) | ((query >> 2) & 2)


def key_place(key: Any) -> Any:
    """A key's bits of the number of a position in its call."""
    return (key & 1) | ((key & 2) << 3) | ((key >> 1) & 4)


def rotated(word: Any, bits: int) -> Any:
    """A word of 32 bits rotated to the left; traced i32."""
    return (word << bits) | ((word >> (32 - bits)) & ((1 << bits) - 1))


def byte_bits(words: Words) -> list[Any]:
    """Words whose bits j are those of position j's byte, bit 7 first, of the words of a call."""
    shared = rotated(words[0], SHARED)
    return [*words, *(rotated(word, bits) ^ shared for word, bits in zip(words, SPREAD, strict=True))]


def decisions(words: Words, dropped: Any) -> Any:
    """A word whose bit j says whether the weight at position j of a call is kept; traced i32.

    words: the call's; dropped: the threshold, the same in every lane, or for each of its bits `one_will_do`.
    """
    kept: Any = -1
    for number, bits in enumerate(reversed(byte_bits(words))):
        # where the threshold's bit is set, the byte's has to be, and what is below decides; else either will do:
        # the majority of three, which ptxas knows in this form
        either = dropped[number] if isinstance(dropped, tuple) else one_will_do(dropped, number)
        kept = (bits & kept) | (either & (bits | kept))
    return kept


def one_will_do(dropped: Any, number: Any) -> Any:
    """All bits where bit `number` of the threshold, static or traced, is clear; else none."""
    return ((dropped >> number) & 1) - 1


def seed_words(seed: fly.Value) -> tuple[fly.Value, fly.Value]:
    """The low and the high word of an i64."""
    return seed.to(fly.i32), (seed >> 32).to(fly.i32)


@dataclass(frozen=True)
class RandomHead:
    """The random numbers of one head of one sequence: i32 words, the same in every lane of a wave.

    `key`: the seed's low and high word, or `philox`'s other form; `head`: sequence * heads + head of the queries;
    `offset`: its low word.
    """

    key: tuple[fly.Value, ...]
    head: fly.Value
    offset: fly.Value

    @staticmethod
    def load(rng_state: fly.Tensor, head: fly.Value) -> RandomHead:
        """From a tensor of two i64, (seed, offset)."""
        seed, offset = (rng_state.load(i) for i in (0, 1))
        low, high, last = map(fly.first_lane, (*seed_words(seed), offset.to(fly.i32)))
        return RandomHead((low, high), head, last)

    def words(self, query_number: Any, key_number: Any, rounds: int = ROUNDS) -> Words:
        """The words of the call that has these numbers of queries (`query_number`) and keys (`key_number`)."""
        return philox(self.key, (key_number, query_number, self.head, self.offset), rounds)

    def decisions(self, query_number: Any, key_number: Any, dropped: Any, rounds: int = ROUNDS) -> Any:
        """Which weights are kept of the 32 positions of the call that has these numbers; see `decisions`."""
        return decisions(self.words(query_number, key_number, rounds), dropped)

    def keeps(self, query: fly.Value, key: fly.Value, dropped: fly.Value | int, rounds: int = ROUNDS) -> fly.Value:
        """Whether the weight at a position is kept, i1: a whole call for one of its 32 decisions.

        query, key: i32 positions in their sequences; dropped: the threshold.
        """
        found = self.decisions(query_number(query), key_number(key), dropped, rounds)
        kept: fly.Value = ((found >> (query_place(query) | key_place(key))) & 1) != 0
        return kept
