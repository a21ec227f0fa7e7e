"""Dropout: which weights are kept is a function of their positions, so that every kernel and tile agrees on it.

A call of Philox4x32 gives 16 bytes, one for each of 4 x 4 positions: those of queries that differ in bits 0 and 3,
and of keys that do. What lanes hold of an accumulator is then spread over few calls, for every matrix instruction.
With q and k the positions of a query and a key in their sequences, all numbers unsigned:

    key = seed;  counter = (k>>4<<2 | k>>1&3,  q>>4<<2 | q>>1&3,  sequence * heads + head,  offset)
    byte = 4 * ((q&1) + 2 * (q>>3&1)) + (k&1) + 2 * (k>>3&1)
    kept iff byte >= T;  T = 256 p, rounded;  what is kept is scaled by 256 / (256 - T)

`rng_state` is a tensor of two int64, (seed, offset); of the offset the low 32 bits count. Philox: Salmon, Moraes,
Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), whose statistical tests 7 rounds pass.
`dropout_mask.py` is the same for torch, `dropout_tile.py` for accumulators.
"""

from __future__ import annotations

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


def philox(key: tuple[Any, Any], counter: Words, rounds: int = ROUNDS) -> Words:
    """Philox4x32: four random words of a key of two and a counter of four, low word first; traced i32 or vectors."""
    words: Words = counter
    for number in range(rounds):
        step_0, step_1 = (number * step & WORD for step in KEY_STEPS)
        high_0, low_0 = fly.mul_wide(words[0], MULTIPLIERS[0])
        high_1, low_1 = fly.mul_wide(words[2], MULTIPLIERS[1])
        words = (high_1 ^ words[1] ^ (key[0] + step_0), low_1, high_0 ^ words[3] ^ (key[1] + step_1), low_0)
    return words


def call_number(position: Any) -> Any:
    """A query's or key's word of the counter: its position without bits 0 and 3."""
    return (position >> 4 << 2) | ((position >> 1) & 3)


def place_in_call(position: Any) -> Any:
    """Which of four a query or key is in its call: bits 0 and 3 of its position."""
    return (position & 1) | ((position >> 2) & 2)


@dataclass(frozen=True)
class RandomHead:
    """The random numbers of one head of one sequence: i32 words, the same in every lane of a wave.

    `key`: the seed's low and high word; `head`: sequence * heads + head of the queries; `offset`: its low word.
    """

    key: tuple[fly.Value, fly.Value]
    head: fly.Value
    offset: fly.Value

    @staticmethod
    def load(rng_state: fly.Tensor, head: fly.Value) -> RandomHead:
        """From a tensor of two i64, (seed, offset)."""
        seed, offset = (rng_state.load(i) for i in (0, 1))
        low, high, last = map(fly.first_lane, (seed.to(fly.i32), (seed >> 32).to(fly.i32), offset.to(fly.i32)))
        return RandomHead((low, high), head, last)

    def words(self, query_number: Any, key_number: Any, rounds: int = ROUNDS) -> Words:
        """The words of the call that has these numbers (`call_number`) of queries and keys."""
        return philox(self.key, (key_number, query_number, self.head, self.offset), rounds)

    def keeps(self, query: fly.Value, key: fly.Value, dropped: fly.Value | int, rounds: int = ROUNDS) -> fly.Value:
        """Whether the weight at a position is kept, i1: a whole call for one of its 16 bytes.

        query, key: i32 positions in their sequences; dropped: the threshold.
        """
        words = self.words(call_number(query), call_number(key), rounds)
        place = place_in_call(query)
        low, high = (fly.select((place & 1) == 0, words[i], words[i + 1]) for i in (0, 2))
        word = fly.select(place < 2, low, high)
        kept: fly.Value = ((word >> (place_in_call(key) << 3)) & 0xFF) >= dropped
        return kept
