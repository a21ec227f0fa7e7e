"""Batches whose sequences must come out with the same bits alone: what tests of `split_keys` share, and a command.

    python -m tests.kernels.work.batch_invariance --batches 200 --device cuda    # or FLY_ARCH=gfx942, on the CPU

A batch has a few sequences of packed queries, from one query as in decoding to a whole prompt, with keys that are
packed, dense or in pages. One of its sequences is computed again: as a batch of its own, or in the dense form, or its
last queries alone.
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged

FEATURES: Mapping[str, Any] = {
    "plain": lambda heads, device: {},
    "window": lambda heads, device: {"window_size": (90, 0)},
    "sink": lambda heads, device: {"sink": torch.linspace(-1, 2, heads, device=device)},
    "softcap": lambda heads, device: {"softcap": 7.0},
    "window, sink": lambda heads, device: {
        "window_size": (200, 0),
        "sink": torch.linspace(-1, 2, heads, device=device),
    },
}
PAGES = (16, 64)
VOCABULARY = 500


@dataclass(frozen=True)
class Batch:
    """`queries` and `keys` of sequences, and how they are called.

    `page_size` 0: packed keys. `split_keys` 0: as many parts as suit the device, and bits that may differ.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    split_keys: int
    feature: str
    seed: int
    device: str = "cpu"

    @staticmethod
    def draw(draw: random.Random, most_queries: int, most_keys: int, **fixed: Any) -> Batch:
        """Lengths up to those given; what is not `fixed` is drawn too."""
        keys = tuple(
            draw.choice((draw.randint(1, most_keys), draw.randint(1, 200))) for _ in range(draw.randint(2, 4))
        )
        queries = tuple(min(n, draw.choice((1, draw.randint(1, 8), draw.randint(1, most_queries)))) for n in keys)
        least = -(-max(keys) // 64 // 128) * 128
        drawn = {
            "heads": draw.choice((2, 4, 8)),
            "kv_heads": draw.choice((1, 2)),
            "head_dim": draw.choice((64, 128)),
            "page_size": draw.choice((0, *PAGES)),
            "split_keys": max(least, draw.choice((128, 256, 512))),
            "feature": draw.choice(list(FEATURES)),
            "seed": draw.getrandbits(31),
        }
        return Batch(queries, keys, **drawn | fixed)

    def difference(self) -> str | None:
        """One of its sequences, any, and a form of it, any, that comes out with other bits than in the batch."""
        draw = random.Random(self.seed)
        b = draw.randrange(len(self.keys))
        n, m, before = self.keys[b], self.queries[b], sum(self.keys[:b])
        rows = slice(sum(self.queries[:b]), sum(self.queries[: b + 1]))
        generator = torch.Generator(self.device).manual_seed(self.seed)
        shape = (sum(self.queries), self.heads, self.head_dim)
        q = (torch.rand(shape, generator=generator, device=self.device) * 4 - 2).bfloat16()
        rest = (self.kv_heads, (self.head_dim, self.head_dim), torch.bfloat16, self.seed)
        paged = Paged.of(self.keys, self.page_size or 16, *rest, device=self.device)
        out, lse = self._call(q, paged, self.queries, self.keys)
        mine, k, v = q[rows], paged.packed_k[before : before + n], paged.packed_v[before : before + n]
        form = draw.choice(("alone", "dense", "its last queries"))
        if form == "alone":
            table, lengths = (x[b : b + 1].contiguous() for x in (paged.table, paged.lengths))
            alone = replace(paged, table=table, lengths=lengths, packed_k=k, packed_v=v)
            count, (its_out, its_lse) = m, self._call(mine, alone, (m,), (n,))
        else:
            count = m if form == "dense" else draw.randint(1, m)
            its_out, its_lse = flydsl_flash_attn_func(mine[None, -count:], k[None], v[None], **self.options)
        same = same_bits(its_out.view(count, *its_out.shape[-2:]), out[rows][-count:])
        if same and same_bits(its_lse.view(-1, count), lse[:, rows][:, -count:]):
            return None
        return f"{form} ({count}) of sequence {b}"

    @property
    def options(self) -> dict[str, Any]:
        asked = FEATURES[self.feature](self.heads, self.device)
        split = {"split_keys": self.split_keys} if self.split_keys else {"num_kv_splits": 0}
        return {"causal": True, "return_lse": True, **split, **asked}

    def _call(self, q: torch.Tensor, paged: Paged, queries: tuple[int, ...], keys: tuple[int, ...]) -> Any:
        """(out (total, H, D), lse (H, total)) of packed queries."""
        given = {"cu_seqlens_q": offsets(queries, self.device), "max_seqlen_q": max(queries)}
        if self.page_size:
            return flydsl_flash_attn_func(q, paged.k, paged.v, **given, **paged.options, **self.options)
        given |= {"cu_seqlens_kv": offsets(keys, self.device), "max_seqlen_kv": max(keys)}
        return flydsl_flash_attn_func(q, paged.packed_k, paged.packed_v, **given, **self.options)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, NaN and signed zeros too."""
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def greedy_tokens(
    prompts: Sequence[Sequence[int]], steps: int, split_keys: int, device: str, seed: int
) -> list[list[int]]:
    """What a model of one random layer adds to each prompt; attention, and nothing else, is of the whole batch."""
    heads, kv_heads, head_dim = 4, 2, 64
    width, random_weights = heads * head_dim, torch.Generator().manual_seed(seed)
    shapes = (VOCABULARY, width), (width, width), *[(width, kv_heads * head_dim)] * 2, (width, width)
    embedding, to_q, *to_k_and_v, to_out = (torch.randn(s, generator=random_weights).to(device) for s in shapes)
    tokens = [list(prompt) for prompt in prompts]
    cached: list[list[torch.Tensor]] = [[torch.empty(0, kv_heads, head_dim, device=device)] * 2 for _ in prompts]
    added = [list(prompt) for prompt in prompts]
    for _ in range(steps):
        rows = [embedding[torch.tensor(new, device=device)] for new in added]
        for b, x in enumerate(rows):
            new = [(x @ w / width**0.5).view(-1, kv_heads, head_dim) for w in to_k_and_v]
            cached[b] = [torch.cat(pair) for pair in zip(cached[b], new)]
        q = torch.cat([(x @ to_q / width**0.5).view(-1, heads, head_dim) for x in rows])
        k, v = (torch.cat([pair[i] for pair in cached]) for i in (0, 1))
        lengths = [len(new) for new in added], [len(all_tokens) for all_tokens in tokens]
        given: dict[str, Any] = {"causal": True, "split_keys": split_keys}
        for name, those in zip(("q", "kv"), lengths):
            given |= {f"cu_seqlens_{name}": offsets(those, device), f"max_seqlen_{name}": max(those)}
        out = flydsl_flash_attn_func(*(x.bfloat16() for x in (q, k, v)), **given)
        ends = [row.view(1, -1).float() for row in out[given["cu_seqlens_q"][1:].long() - 1]]
        added = [[int((end @ to_out @ embedding.T).argmax())] for end in ends]
        for all_tokens, new_tokens in zip(tokens, added):
            all_tokens += new_tokens
    return [all_tokens[len(prompt) :] for all_tokens, prompt in zip(tokens, prompts)]


def main() -> None:
    """Random batches, and what differed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=math.inf, help="after so many, no other batch begins")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--queries", type=int, default=40, help="of a sequence, at most")
    parser.add_argument("--keys", type=int, default=600)
    parser.add_argument("--head-dim", type=int, help="64 or 128, drawn by default, like the next four")
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--feature", choices=FEATURES)
    parser.add_argument("--page-size", type=int, help="0: keys are packed")
    parser.add_argument("--automatic", action="store_true", help="without split_keys: what differs otherwise")
    given = parser.parse_args()
    asked = {name: getattr(given, name) for name in ("head_dim", "heads", "kv_heads", "feature", "page_size")}
    fixed = {name: value for name, value in asked.items() if value is not None} | {"device": given.device}
    if given.automatic:
        fixed["split_keys"] = 0
    draw, done, wrong, start = random.Random(given.seed), 0, 0, time.monotonic()
    while done < given.batches and time.monotonic() - start < given.seconds:
        batch = Batch.draw(draw, given.queries, given.keys, **fixed)
        if found := batch.difference():
            wrong += 1
            print(f"{done}: {found} of {batch}", flush=True)
        done += 1
    print(f"{done} batches, seed {given.seed}: {wrong} with other bits")


if __name__ == "__main__":
    main()
