"""Dropout's mask in torch: the definition of `dropout.py` in integers of 64 bits, for references and for users."""

from __future__ import annotations

import torch

from .dropout import (
    KEY_STEPS,
    MULTIPLIERS,
    ROUNDS,
    WORD,
    Words,
    decisions,
    key_number,
    key_place,
    query_number,
    query_place,
    threshold,
)


def philox(key: tuple[torch.Tensor, torch.Tensor], counter: Words, rounds: int = ROUNDS) -> Words:
    """Philox4x32 on int64 tensors of words (0 to 2**32 - 1) that broadcast against each other."""
    words: Words = counter
    for number in range(rounds):
        # a product of two words wraps where it passes 2**63, and its bits are right all the same
        product_0, product_1 = words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]
        key_0, key_1 = (part + number * step & WORD for part, step in zip(key, KEY_STEPS, strict=True))
        words = (
            (product_1 >> 32 & WORD) ^ words[1] ^ key_0,
            product_1 & WORD,
            (product_0 >> 32 & WORD) ^ words[3] ^ key_1,
            product_0 & WORD,
        )
    return words


def random_state(device: torch.device) -> torch.Tensor:
    """What a call draws for its dropout: int64 (seed, offset), from torch's generator of the device."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def dropout_mask(
    rng_state: torch.Tensor, shape: tuple[int, int, int, int], dropout_p: float, rounds: int = ROUNDS
) -> torch.Tensor:
    """Which weights dropout keeps, bool of `shape` = (B, H, Sq, Skv), on the device of `rng_state`.

    rng_state: int64 of two elements, (seed, offset), as the forward pass drew it. The mask of a shorter or longer
    sequence is a part of it, or has it as a part. Packed sequences: sequence b of length (Sq, Skv) has the mask's
    part [b, :, :Sq, :Skv]. What is kept is scaled by 256 / (256 - T), T = round(256 * dropout_p).

    Raises:
        ArgumentError: `dropout_p` is none of 0 and [1/512, 511/512).
    """
    dropped = threshold(dropout_p, "dropout_mask")
    batch, heads, queries, keys = shape
    device = rng_state.device
    seed, offset = rng_state.unbind()

    def numbers(count: int) -> torch.Tensor:
        return torch.arange(count, device=device)

    query, key = numbers(queries), numbers(keys)
    # of the calls that have these positions
    of_query, of_key = (numbers(-(-count // 16) * each) for count, each in ((queries, 4), (keys, 2)))
    counter = (of_key, of_query[:, None], numbers(batch * heads)[:, None, None], offset & WORD)
    calls = (batch * heads, len(of_query), len(of_key))
    words = philox((seed & WORD, seed >> 32 & WORD), counter, rounds)
    kept = decisions((words[0], words[1], words[2], words[3]), dropped).expand(calls)
    place = query_place(query)[:, None] | key_place(key)
    found: torch.Tensor = kept[:, query_number(query)[:, None], key_number(key)] >> place & 1 != 0
    return found.view(shape)
