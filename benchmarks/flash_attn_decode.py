"""How close decoding comes to the speed of memory, next to peers, all taking turns in one process.

    python benchmarks/flash_attn_decode.py
    python benchmarks/flash_attn_decode.py --batch 1 16 --seq_len_kv 65536 --page_size 16 --csv decode.csv
    python benchmarks/flash_attn_decode.py --dtype f8e4m3 --provider fly --provider "fly paged"

One query a sequence, 64 query heads on 8 key heads by default. A cell's floor is the time in which a copy moves the
bytes of K and V: its bandwidth, read and written, is measured first. Whether results are right is for the tests.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import workload
from benchmarks.progress import progress, say
from benchmarks.run_record import RUN_COLUMNS, run_record, versions
from benchmarks.timing import measure

Call = Callable[[], object]
DTYPES = workload.ALL_DTYPES
PRESET = "decode"  # what its files call it
COPY_BYTES = 4 << 30
MOST_BYTES = 40 << 30  # of one cell's K and V
BATCHES = (1, 4, 16, 64)
KEYS = (4096, 16384, 65536, 131072)
# of a CSV file: a cell, its floor, a provider's median and quartiles; `best_ratio` is one of ours over `best_peer`
CSV_COLUMNS = (
    *("batch", "seq_len_kv", "num_heads", "num_kv_heads", "head_dim", "dtype", "page_size", "floor_us", "provider"),
    *("microseconds", "low_us", "high_us", "best_peer", "best_ratio", "copy_tb_s", "rounds", *RUN_COLUMNS),
)


@dataclass(frozen=True)
class Cell:
    """One decoding step: `batch` queries of `heads` heads, `keys` keys of `kv_heads` heads each."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def bytes(self) -> int:
        """Of K and V."""
        return 2 * self.batch * self.keys * self.kv_heads * self.head_dim * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Cache:
    """A cell's tensors: q (B, 1, H, D); pools of pages (P, page_size, Hkv, D), whose pages in order are the dense
    (B, S, Hkv, D); the table that deals them out, and lengths."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @staticmethod
    def of(cell: Cell, page_size: int) -> Cache:
        """Random numbers, pages dealt out at random."""
        pages = cell.batch * cell.keys // page_size

        def pool() -> torch.Tensor:
            size = (pages, page_size, cell.kv_heads, cell.head_dim)
            return torch.empty(size, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1).to(DTYPES[cell.dtype])

        q = torch.randn(cell.batch, 1, cell.heads, cell.head_dim, device="cuda").to(DTYPES[cell.dtype])
        table = torch.randperm(pages, device="cuda").int().view(cell.batch, -1)
        lengths = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device="cuda")
        return Cache(q, pool(), pool(), table, lengths)

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same memory as one run of keys a sequence."""
        shape = (len(self.q), -1, *self.k_pages.shape[2:])
        return self.k_pages.view(shape), self.v_pages.view(shape)


def _fly(cache: Cache) -> Call:
    from kernels.flash_attn_interface import flydsl_flash_attn_func

    k, v = cache.dense
    return lambda: flydsl_flash_attn_func(cache.q, k, v, True, num_kv_splits=0)


def _fly_paged(cache: Cache) -> Call:
    from kernels.flash_attn_interface import flydsl_flash_attn_func

    options = {"block_table": cache.table, "seqused_kv": cache.lengths, "num_kv_splits": 0}
    return lambda: flydsl_flash_attn_func(cache.q, cache.k_pages, cache.v_pages, True, **options)


def _sdpa(cache: Cache) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (t.transpose(1, 2) for t in (cache.q, *cache.dense))

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return call


def _fa4(splits: int, cache: Cache) -> Call:
    from flash_attn.cute import flash_attn_func

    k, v = cache.dense
    return lambda: flash_attn_func(cache.q, k, v, causal=True, num_splits=splits)


def _fa4_paged(splits: int, cache: Cache) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    options = {"page_table": cache.table, "seqused_k": cache.lengths, "causal": True, "num_splits": splits}
    return lambda: flash_attn_varlen_func(cache.q, cache.k_pages, cache.v_pages, **options)


PROVIDERS: dict[str, Callable[[Cache], Call]] = {
    "fly": _fly,
    "fly paged": _fly_paged,
    "SDPA flash": _sdpa,
    "FA4": lambda cache: _fa4(1, cache),
    "FA4 split": lambda cache: _fa4(0, cache),
    "FA4 paged": lambda cache: _fa4_paged(1, cache),
}


def copy_bandwidth() -> float:
    """Bytes a second that a copy of 4 GiB reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timing = measure({"copy": lambda: target.copy_(source)}, device="cuda", iters=10, warmup=2)["copy"]
    return 2 * COPY_BYTES / timing.median * 1e3


def _bound(cache: Cache, names: Sequence[str], told: set[str]) -> Iterator[tuple[str, Call]]:
    for name in names:
        try:
            call = PROVIDERS[name](cache)
            call()
        except Exception as error:  # a peer can fail in any way, and the others still have their turn
            reason = f"  {name}: {type(error).__name__}: {error}".splitlines()[0][:160]
            if reason not in told:
                say(reason)
                told.add(reason)
        else:
            yield name, call


def run(cells: Sequence[Cell], names: Sequence[str], page_size: int, iters: int) -> list[dict[str, object]]:
    """Time every cell and print a table: microseconds, and the part of the copy's bandwidth that ours reach."""
    bandwidth = copy_bandwidth()
    say(f"a copy moves {bandwidth / 1e12:.2f} TB/s; pages of {page_size} keys")
    say(
        f"{'B':>3} {'keys':>7} {'MB':>7} {'floor us':>9}"
        + "".join(f"{name:>17}" for name in names)
        + "   fly/best peer"
    )
    records: list[dict[str, object]] = []
    told: set[str] = set()
    for cell in progress(cells, "cell"):
        cache = Cache.of(cell, page_size)
        timings = measure(dict(_bound(cache, names, told)), device="cuda", iters=iters, warmup=3)
        floor = cell.bytes / bandwidth * 1e6
        times = {name: timing.median * 1e3 for name, timing in timings.items()}
        texts = [f"{times[n]:9.1f} {floor / times[n]:6.1%}" if n in times else "-" for n in names]
        peers = {name: time for name, time in times.items() if not name.startswith("fly")}
        best = min(peers, key=lambda name: peers[name], default="")
        ratio = f"{peers[best] / times['fly']:10.2f}" if best and "fly" in times else ""
        say(
            f"{cell.batch:3} {cell.keys:7} {cell.bytes / 1e6:7.0f} {floor:9.1f}"
            + "".join(f"{t:>17}" for t in texts)
            + ratio
        )
        sizes = {"batch": cell.batch, "seq_len_kv": cell.keys, "num_heads": cell.heads, "num_kv_heads": cell.kv_heads}
        same = {**sizes, "head_dim": cell.head_dim, "dtype": cell.dtype, "page_size": page_size, "floor_us": floor}
        same |= {"copy_tb_s": bandwidth / 1e12, "rounds": iters}
        for name, timing in timings.items():
            own = {"microseconds": times[name], "low_us": timing.low * 1e3, "high_us": timing.high * 1e3}
            if best and name not in peers:
                own |= {"best_peer": best, "best_ratio": peers[best] / times[name]}
            records.append({**same, "provider": name, **own})
        del cache
    return records


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time decoding next to its peers and the speed of memory.")
    parser.add_argument("--batch", type=int, nargs="+", metavar="N", default=BATCHES)
    parser.add_argument("--seq_len_kv", type=int, nargs="+", metavar="N", default=KEYS)
    parser.add_argument("--num_heads", type=int, default=64)
    parser.add_argument("--num_kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--page_size", type=int, default=64)
    parser.add_argument("--iters", type=int, metavar="N", default=15, help="rounds (15)")
    parser.add_argument("--provider", action="append", choices=tuple(PROVIDERS), help="only this one (repeatable)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--commit", metavar="REV", help="what FILE says was measured, where there is no git")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; exit code 2 where there is no GPU."""
    parser = _parser()
    args = parser.parse_args(argv)
    if any(keys % args.page_size for keys in args.seq_len_kv):
        parser.error(f"--seq_len_kv must be multiples of --page_size {args.page_size}, got {args.seq_len_kv}")
    if not torch.cuda.is_available():
        print("torch sees no GPU: nothing to time", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, {versions()}")
    same = (args.num_heads, args.num_kv_heads, args.head_dim, args.dtype)
    cells = [Cell(batch, keys, *same) for batch in args.batch for keys in args.seq_len_kv]
    with torch.no_grad():
        records = run(
            [c for c in cells if c.bytes <= MOST_BYTES], args.provider or list(PROVIDERS), args.page_size, args.iters
        )
    if args.csv is not None and records:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
            writer.writeheader()
            of_run = run_record(PRESET, args.commit)
            writer.writerows({**record, **of_run} for record in records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
