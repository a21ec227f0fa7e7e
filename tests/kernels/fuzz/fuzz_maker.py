"""Random calls under a build: lengths, tensors and options that are valid together."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from kernels.problem.block_mask import create_block_mask
from tests.kernels.feature_cases import FEATURES, Inputs, stripes
from tests.kernels.fuzz.fuzz_caches import Appended, Tokens
from tests.kernels.fuzz.fuzz_draws import (
    APPEND,
    CACHE,
    DTYPES,
    LAYOUTS,
    OURS,
    VLLM,
    Build,
    Draw,
    Placed,
    numbers,
    place,
)
from tests.kernels.fuzz.fuzz_problems import Problem, on_device
from tests.kernels.packed import offsets

HUGE = 2**31 - 1
# features whose tensors have the lengths' shapes: they are drawn for calls that are not empty
OF_LENGTHS = {"bias", "bias of keys", "bias padded", "block_mask", "score_mod aux", "mask_mod aux"}
OF_FEATURE_CASES = {*OF_LENGTHS, "score_mod", "mask_mod"} - {"block_mask"}
NOT_EXPANDED = tuple(name for name in LAYOUTS if name != "expanded")
STACKED = tuple(name for name in LAYOUTS if name != "heads first")


def draw_problem(draw: Draw, build: Build, device: str, extremes: bool = True) -> Problem:
    """A call of any build but those of `append_to_cache`; `extremes`: its numbers may be of any magnitude."""
    assert build.function != APPEND
    return _Maker(draw, build, device, extremes).problem()


class _Maker:
    """What the parts of a call have in common while it is drawn.

    `capacity`: rows of a cache's entry; `room`: rows that each sequence may use; `exact`, `given`: see `Problem`.
    """

    def __init__(self, draw: Draw, build: Build, device: str, extremes: bool):
        self.draw, self.build, self.device = draw, build, device
        self.names = set(build.features)
        self.dtype = DTYPES[build.dtype]
        self.extreme = draw.chance(0.4) and extremes and not build.rotary and build.dtype != "f8e4m3"
        self.placed: list[Placed] = []
        self.exact: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.kv_heads = draw.choice((1, 1, 2, 3))
        self.heads = self.kv_heads * (1 if "qkvpacked" in build.function else draw.choice((1, 1, 2, 3, 4)))
        least = int(bool(self.names & OF_LENGTHS))
        self.batch = draw.choice((1, 1, 1, 2, 2, 3, 4) if build.packed else (1, 1, 1, 2, 2, 3))
        if draw.chance(0.03) and not least and build.function != CACHE:
            self.batch = 0
        most = build.most if build.head_dim <= 128 else build.most // 2
        count = self.batch if build.packed else 1
        self.queries = [max(draw.length(most // draw.choice((1, 3, 3))), least) for _ in range(count)]
        self.keys = [
            max(draw.length(most), least) for _ in range(self.batch if build.packed_keys or build.page else 1)
        ]
        if "qkvpacked" in build.function or draw.chance(0.15):
            self.keys = (self.queries * self.batch)[: len(self.keys)]
        if not build.packed:
            self.queries = self.queries * self.batch
        if not (build.packed_keys or build.page):
            self.keys = self.keys * self.batch

    def content(self, *shape: int) -> torch.Tensor:
        if self.extreme and self.draw.chance(0.5):
            return numbers(self.draw, self.dtype, *shape)
        return self.draw.normal(*shape).to(self.dtype)

    def put(self, content: torch.Tensor, layouts: Any = LAYOUTS) -> torch.Tensor:
        tensor, placed = place(self.draw, content, self.build.odd, self.device, layouts)
        self.placed.append(placed)
        return tensor

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def problem(self) -> Problem:
        build, draw, exact, given = self.build, self.draw, self.exact, self.given
        given["num_kv_splits"] = {"any": 0, "one": 1}.get(build.splits, draw.choice((2, 3, 5, 8)))
        given |= dict(build.tuning)
        if build.function == OURS and draw.chance(0.1):
            given |= {"num_kv_heads": self.kv_heads, "cross_seqlen": True}
        q, k, v, whole = self.tensors()
        if build.packed:
            self.packing()
        new, caches = None, []
        if build.new:
            caches, self.placed = self.placed[-2:], self.placed[:-2]
            new = self.append(q, k, v, caches)
        self.options(q, *(k,) if new is None else (k, new.k))
        out = None
        if build.out:
            empty = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=build.out_dtype)
            given["out"], out = place(draw, empty, build.odd, self.device, NOT_EXPANDED)
        if new is not None:
            exact["seqused_kv"] = self.ints([n + more for n, more in zip(new.lengths, new.keys.counts)])
        if "cache_leftpad" in exact:  # at most all of the keys
            keys = exact.get("seqused_kv", self.ints(self.keys if build.page else self.room))
            exact["cache_leftpad"] = torch.minimum(exact["cache_leftpad"], keys)
        if not (build.packed_keys or build.page) and draw.chance(0.5):
            self.forget(k, v, caches)
        return Problem(build, q, k, v, whole, exact, given, self.placed, not self.extreme, new, out, caches)

    def packing(self) -> None:
        """Offsets, and lengths that no sequence is longer than."""
        build, draw = self.build, self.draw
        self.exact["cu_seqlens_q"] = offsets(self.queries).to(self.device)
        if build.function == CACHE:
            most = max(self.queries, default=0)
            self.given["max_seqlen_q"] = most + draw.choice((0, 0, 0, 7, HUGE - most))
            return
        if not build.page:
            same = self.queries == self.keys and draw.chance(0.5)
            self.exact["cu_seqlens_kv"] = self.exact["cu_seqlens_q"] if same else offsets(self.keys).to(self.device)
        elif build.function != VLLM and draw.chance(0.4):  # as FlashAttention-2 says how long sequences in pages are
            self.given |= {"cu_seqlens_kv": offsets(self.keys).to(self.device), "seqused_kv": None}
        most = [max(x, default=0) for x in (self.queries, self.keys)]
        if draw.chance(0.3):
            most = [n + draw.choice((1, 7, 300, HUGE - n)) for n in most]
        self.given |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), most))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """(q, k, v, what they are parts of)."""
        build, draw = self.build, self.draw
        of_q = (sum(self.queries),) if build.packed else (self.batch, self.queries[0] if self.batch else 3)
        of_k = (sum(self.keys),) if build.packed_keys else (self.batch, self.keys[0] if self.batch else 5)
        dims = build.head_dim, build.head_dim_v
        if "packed" in build.function:
            first = 3 if "qkv" in build.function else 2
            whole = self.content(*of_k, first, self.kv_heads, dims[0])
            whole = self.put(whole.flatten(-3, -2), STACKED).unflatten(-2, (first, self.kv_heads))
            parts = whole.unbind(-3)
            q = parts[0] if first == 3 else self.put(self.content(*of_q, self.heads, dims[0]))
            return q, *parts[-2:], whole
        columns = build.function != OURS and not build.new and draw.chance(0.1)
        q = self.put(self.content(*of_q, self.heads, dims[0]))
        if columns:
            q = q.transpose(-1, -2).contiguous().transpose(-1, -2)
        if build.page:
            return q, *self.pages(), None
        cache = build.function == CACHE
        if not build.packed_keys:
            more = draw.choice((0, 0, 1, 2)) if cache or "kv_batch_idx" in self.names else 0
            self.capacity = max(of_k[1], 1) if cache else of_k[1]
            self.room = [self.capacity] * self.batch
            of_k = (self.batch + more, self.capacity)
            self.entries(of_k[0], distinct=build.new)
        k, v = (self.put(self.content(*of_k, self.kv_heads, dim), NOT_EXPANDED if cache else LAYOUTS) for dim in dims)
        if columns and not cache:
            k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (k, v))
        if dims[0] == dims[1] and not build.new and draw.chance(0.05):
            v = k
        return q, k, v, None

    def entries(self, number: int, distinct: bool) -> list[int]:
        """The entry, of so many, that each sequence has."""
        draw = self.draw
        if "kv_batch_idx" not in self.names:
            return list(range(self.batch))
        chosen = draw.sample(range(number), self.batch) if distinct else draw.choices(range(number), k=self.batch)
        self.exact["kv_batch_idx"] = self.ints(chosen)
        return chosen

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v in shuffled pages, NaN where no sequence has a key; the table's unused entries are anything."""
        draw, size = self.draw, self.build.page
        counts = [-(-(n + draw.choice((0, 0, 3, size))) // size) for n in self.keys]
        wide = max(max(counts, default=0) + draw.choice((0, 0, 2)), 1)
        pages = sum(counts) + draw.choice((1, 3))
        order = draw.sample(range(pages), sum(counts))
        rows = self.batch + (draw.choice((0, 1, 2)) if "kv_batch_idx" in self.names else 0)
        table = draw.ints(-(2**31), 2**31 - 1, rows, wide)
        self.capacity, self.room = wide * size, [n * size for n in counts]
        used = [torch.zeros(0, dtype=torch.int64)]
        firsts = accumulate(counts, initial=0)
        for row, n, count, first in zip(self.entries(rows, distinct=True), self.keys, counts, firsts):
            mine = torch.tensor(order[first : first + count], dtype=torch.int64)
            table[row, :count] = mine.to(torch.int32)
            used.append((mine[:, None] * size + torch.arange(size)).flatten()[:n])
        found = torch.cat(used)
        self.exact |= {"block_table": table.to(self.device), "seqused_kv": self.ints(self.keys)}
        result = []
        for dim in (self.build.head_dim, self.build.head_dim_v):
            pool = torch.full((pages * size, self.kv_heads, dim), float("nan"), dtype=self.dtype)
            pool[found] = self.content(len(found), self.kv_heads, dim)
            result.append(self.put(pool.view(pages, size, self.kv_heads, dim), LAYOUTS[:4]))
        return tuple(result)

    def append(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, caches: list[Placed]) -> Appended:
        """New rows that have a place in the cache."""
        build, draw, size = self.build, self.draw, self.build.page
        packed = build.new == "packed"
        counts = [draw.choice((0, 1, 1, 2, 5, 20)) for _ in self.room]
        if not packed:
            counts = [min(counts[0], *self.room)] * self.batch
        counts = [min(n, most) for n, most in zip(counts, self.room)]
        lengths = [draw.randint(0, most - n) for n, most in zip(counts, self.room)]
        seqlens: Any = self.ints(lengths)
        if draw.chance(0.3):
            lengths = [min(lengths)] * self.batch
            seqlens = lengths[0]
        positions = max(lengths) + max(*counts, *self.queries, 1) + draw.choice((0, 5))
        cos = sin = None
        if build.rotary:
            angles = torch.rand(positions, build.rotary // 2, generator=draw.generator) * 6.3
            cos, sin = (x.to(self.dtype).to(self.device) for x in (angles.cos(), angles.sin()))
        indices, table = (self.exact.get(name) for name in ("kv_batch_idx", "block_table"))
        indices = list(range(self.batch)) if indices is None else indices.tolist()
        table = None if table is None else table.tolist()

        def entry(b: int, at: int) -> tuple[int, int]:
            return (table[indices[b]][at // size], at % size) if size else (indices[b], at)

        for b, n in enumerate(lengths):  # these count now
            for at in range(n):
                for cache in (k, v):
                    cache[entry(b, at)] = cache[entry(b, at)].nan_to_num(0.5)
        for placed in caches:
            placed.before.copy_(placed.memory)
        tokens = (sum(counts),) if packed else (self.batch, counts[0])
        new = [self.put(self.content(*tokens, self.kv_heads, dim)) for dim in (build.head_dim, build.head_dim_v)]
        of_queries, of_keys = Tokens(self.queries, build.packed), Tokens(counts, packed)
        each = build.causal or bool(self.names & {"window", "attention_chunk"})
        return Appended(*new, of_queries, of_keys, cos, sin, lengths, build.interleaved, each, seqlens, entry)

    def options(self, q: torch.Tensor, *keys: torch.Tensor) -> None:
        """What the build's features are in this call; `keys`: of a cache, and new ones."""
        build, draw, names, exact = self.build, self.draw, self.names, self.exact
        if not build.new and build.function == CACHE:
            self.lengths_of_cache()
        if "seqused_q" in names:
            exact["seqused_q"] = self.ints([draw.randint(0, n) for n in self.queries])
        if "seqused_kv" in names:
            exact["seqused_kv"] = self.ints([draw.randint(0, n) for n in self.keys])
        if "cache_leftpad" in names:
            exact["cache_leftpad"] = self.ints([draw.randint(0, draw.choice((3, self.capacity))) for _ in self.room])
        if "kv_batch_idx" not in names and not build.packed_keys and not build.page and keys[0].shape[0] > self.batch:
            self.given["kv_batch_idx"], exact["kv_batch_idx"] = None, self.ints(list(range(self.batch)))
        if "window" in names:
            exact["window_size"] = tuple(self.side() if closed else -1 for closed in build.sides)
            if build.function not in (OURS, VLLM):
                self.given["window_size"] = [None if side < 0 else side for side in exact["window_size"]]
        if "attention_chunk" in names:
            exact["attention_chunk"] = draw.choice((1, draw.randint(1, 9), draw.randint(1, build.most), HUGE))
        if "softcap" in names:
            exact["softcap"] = draw.power(-3, 20) if self.extreme else draw.uniform(1.0, 50.0)
        if "alibi" in names:
            shape = (self.heads,) if draw.chance(0.5) else (self.batch, self.heads)
            size = draw.power(-3, 4) if self.extreme else 1.0
            slopes = draw.normal(*shape).abs() * draw.choice((size, size, -0.1 * size))
            exact["alibi_slopes"] = slopes.to(self.device)
        if "sink" in names:
            exact["sink"] = self.sink().to(self.device)
        for name in sorted(names & {"q_descale", "k_descale", "v_descale"}):
            shape = draw.choice(((), (1,), (self.batch, self.kv_heads)))
            exact[name] = (torch.rand(shape, generator=draw.generator) + 0.5).to(self.device)
        self.functions()
        if self.extreme:
            exact["softmax_scale"] = self.scale(q, *keys)
        elif draw.chance(0.4):
            exact["softmax_scale"] = draw.uniform(0.01, 1.0)

    def lengths_of_cache(self) -> None:
        """`cache_seqlens` as None, a number or a tensor."""
        draw = self.draw
        room = self.keys if self.build.page else self.room
        lengths = [draw.randint(0, n) for n in room]
        kind = draw.choice(("none", "int", "tensor", "tensor", "tensor"))
        if kind == "int":
            lengths = [min(lengths)] * self.batch
            self.given["seqused_kv"] = lengths[0]
        elif kind == "none" and not self.build.page:
            lengths, self.given["seqused_kv"] = room, None
        self.exact["seqused_kv"] = self.ints(lengths)

    def side(self) -> int:
        draw = self.draw
        sizes = [0, draw.randint(0, 20), draw.randint(0, 20), draw.randint(0, self.build.most)]
        return draw.choice([*sizes, HUGE - draw.choice((0, 0, 40))] if self.extreme else sizes)

    def sink(self) -> torch.Tensor:
        draw = self.draw
        dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
        sink = draw.normal(self.heads) * 3
        if self.extreme:
            sink = sink * draw.power(0, 3.5 if dtype == torch.float16 else 30.0)
        return sink.to(dtype)

    def scale(self, q: torch.Tensor, *keys: torch.Tensor) -> float:
        """Any that leaves scores within float32, or one that makes them of a random size."""
        draw = self.draw

        def norm(x: torch.Tensor) -> float:
            x = x.double().nan_to_num(0.0)
            return x.norm(dim=-1).max().item() if x.numel() else 0.0

        size = max(norm(q) * max(map(norm, keys)), 1e-30)
        wanted = draw.power(-46, 30) if draw.chance(0.4) else draw.power(-2, 5) / size
        return min(wanted, 1e36 / size, 1e37)

    def forget(self, k: torch.Tensor, v: torch.Tensor, caches: list[Placed]) -> None:
        """Keys of dense tensors that no sequence has become NaN."""
        lengths = [self.exact.get(name) for name in ("cache_leftpad", "seqused_kv", "kv_batch_idx")]
        if lengths[:2] == [None, None] or 0 in (*k.stride(), *v.stride()) or not k.shape[1]:
            return
        first, end, entry = (None if x is None else x.tolist() for x in lengths)
        seen = torch.zeros(k.shape[:2], dtype=torch.bool)
        for b in range(self.batch):
            counted = slice(first[b] if first else 0, end[b] if end else None)
            seen[entry[b] if entry else b, counted] = True
        for tensor in (k, v):
            tensor.masked_fill_(~seen[..., None, None].to(self.device), float("nan"))
        for placed in (*self.placed, *caches):
            placed.before.copy_(placed.memory)

    def functions(self) -> None:
        """Biases, functions of scores and masks."""
        build, draw, exact = self.build, self.draw, self.exact
        keys = [self.capacity] * self.batch if build.page else self.keys
        seed = draw.getrandbits(31)
        inputs = Inputs(self.queries, keys, self.heads, self.kv_heads, build.head_dim, build.dtype, seed=seed)
        for name in sorted(self.names & OF_FEATURE_CASES):
            exact |= {key: on_device(value, self.device) for key, value in FEATURES[name](inputs).items()}
        if "block_mask" in self.names:
            lengths = self.queries[0], self.keys[0]
            mask = create_block_mask(stripes, None, self.heads, *lengths, device=self.device, BLOCK_SIZE=build.block)
            exact["mask_mod"] = stripes
            self.given |= {"mask_mod": None, "block_mask": mask}
