"""Bugs that a Hopper kernel could have, planted one at a time: the simulator reports each, or results are wrong.

Most are one slot, one phase, one byte, one wait or one fence. A bug whose text is no longer in the kernels fails its
test: plant it again where its place is now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from fly.backends.nvvm import wgmma
from fly.backends.nvvm.mbarrier import Mbarriers, Position, Ring
from fly.errors import SimulatorReportError
from kernels import flash_attn_sm90, flash_attn_sm90_fp8
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.flash_attn_sm90 import Consumer
from kernels.flash_attn_sm90_fp8 import Fp8Consumer
from kernels.sm90 import combine as sm90_combine
from kernels.sm90 import producer as sm90_producer
from kernels.sm90.builds import Sm90Options
from kernels.sm90.combine import Combination
from kernels.sm90.producer import Producer
from kernels.sm90.schedule import Schedule, WorkRing
from kernels.sm90.transposer import TileTranspose, Transposer
from kernels.work.sequences import PagedSequence
from tests.kernels.fp8_reference import reference as fp8_reference
from tests.kernels.packed import offsets
from tests.kernels.paged import Paged
from tests.kernels.reference import check, reference
from tests.kernels.simulated import SEEDS, simulated  # noqa: F401
from tests.kernels.sm90.planting import Bug

KERNEL = ""


@pytest.fixture
def force(monkeypatch):
    """Builds of a call's request, whatever its shape."""

    def take(**fields) -> None:
        def build(request, units, typical=None, table=None, kind=Sm90Options):
            if kind is not Sm90Options and "block_n" in fields:
                fields["block_n"] = 64
            own = {"page_size": request.page_size, "features": request.static_features, **fields}
            return kind(request.head_dim, request.value_dim, request.causal, **own), request.num_kv_splits

        for module in (flash_attn_sm90, flash_attn_sm90_fp8):
            monkeypatch.setattr(module, "build_for", build)

    return take


TWO = {"consumers": 2, "block_n": 32, "stages": 2, "q_stages": 2}
ONE = {"consumers": 1, "block_n": 32, "stages": 3, "q_stages": 1, "ping_pong": False}


def tensors(queries: int, keys: int, heads: int = 2, kv_heads: int = 1, dim: int = 128, batch: int = 2):
    sizes = (batch, queries, heads), (batch, keys, kv_heads), (batch, keys, kv_heads)
    return [torch.randn(*size, dim).bfloat16() for size in sizes]


def wrong(q, k, v, causal: bool = False, calls: int = 1, **options) -> bool:
    """Whether results are; what is not written stays NaN."""
    for _ in range(calls):
        out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=torch.bfloat16)
        _, lse = flydsl_flash_attn_func(q, k, v, causal, return_lse=True, out=out, **options)
        scales = {name: x for name, x in options.items() if name.endswith("descale")}
        exact = fp8_reference(q, k, v, causal=causal, **scales) if q.dtype.itemsize == 1 else None
        lengths = options.get("cu_seqlens_q")
        if lengths is not None:
            both = (options[name].diff().tolist() for name in ("cu_seqlens_q", "cu_seqlens_kv"))
            exact = reference(q, k, v, causal=causal, lengths=list(zip(*both)))
        if not check(out, exact or reference(q, k, v, causal=causal), lse).ok:
            return True
    return False


def dense(force) -> bool:
    """Several tiles a block, two consumers, two key tiles more than slots."""
    force(**TWO)
    return wrong(*tensors(200, 150))


def causal(force) -> bool:
    force(**TWO)
    return wrong(*tensors(200, 200, dim=64), True)


def one_consumer(force) -> bool:
    """Rings of one and of three slots."""
    force(**ONE)
    return wrong(*tensors(100, 200, dim=64))


def again(force) -> bool:
    force(**TWO)
    return wrong(*tensors(200, 70), calls=2)


def packed(force) -> bool:
    """Sequences without queries or keys among them; what lies behind a sequence's keys is another's."""
    force(**TWO)
    queries, keys = (5, 0, 0, 150, 3), (40, 7, 0, 70, 33)
    q, k, v = (torch.randn(sum(n), h, 64).bfloat16() for n, h in ((queries, 2), (keys, 1), (keys, 1)))
    for query, key in ((4, 39), (154, 116)):  # a sequence's last key counts where it is seen
        k[key, 0] = q[query, 0] / 2
    v[-33:] = torch.inf  # the last sequence's
    return wrong_packed(q, k, v, queries, keys)


def wrong_packed(q, k, v, queries, keys) -> bool:
    """Whether the results of all sequences but the last are wrong."""
    lengths = {"cu_seqlens_q": offsets(queries), "cu_seqlens_kv": offsets(keys)}
    lengths |= {"max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)}
    out = torch.full_like(q, torch.nan)
    _, lse = flydsl_flash_attn_func(q, k, v, True, return_lse=True, out=out, **lengths)
    last = queries[-1]
    parts = q[:-last], k[: -keys[-1]], v[: -keys[-1]]
    exact = reference(*parts, causal=True, lengths=list(zip(queries[:-1], keys[:-1])))
    return not check(out[:-last], exact, lse[:, :-last]).ok


def in_pages(force) -> bool:
    force(**{**ONE, "stages": 2})
    pages = Paged.of((100, 33), 16, 1, (64, 64), torch.bfloat16, 1)
    q = torch.randn(2, 70, 2, 64).bfloat16()
    out, lse = flydsl_flash_attn_func(q, pages.k, pages.v, False, return_lse=True, **pages.options)
    parts = pages.packed_k, pages.packed_v
    exact = reference(q.flatten(0, 1), *parts, causal=False, lengths=[(70, 100), (70, 33)])
    return not check(out.flatten(0, 1), exact, lse.transpose(0, 1).flatten(1)).ok


def combined(force) -> bool:
    """Parts that the kernel puts together itself."""
    force(**{**ONE, "combines": True, "takes_late": True, "q_stages": 2, "pack_gqa": 2})
    return wrong(*tensors(30, 200, dim=64), num_kv_splits=3, calls=2)


def narrow(dim: int = 128):
    return [x.to(torch.float8_e4m3fn) for x in tensors(100, 200, dim=dim)]


def fp8(force) -> bool:
    force(consumers=2, block_n=64, stages=2, q_stages=2)
    return wrong(*narrow(), v_descale=torch.rand(2, 1) + 0.5)


def fp8_decoding(force) -> bool:
    """V is turned by a warpgroup of the kernel."""
    force(consumers=1, block_n=64, stages=2, q_stages=2, transposed_stages=1, transposers=4, ping_pong=False)
    q, k, v = narrow(64)
    keys = torch.tensor([170, 31], dtype=torch.int32)
    out, lse = flydsl_flash_attn_func(q[:, :20], k, v, False, return_lse=True, seqused_kv=keys)
    exact = [
        fp8_reference(q[b : b + 1, :20], k[b : b + 1, :n], v[b : b + 1, :n], causal=False)
        for b, n in ((0, 170), (1, 31))
    ]
    return not all(check(out[b : b + 1], exact[b], lse[b : b + 1]).ok for b in range(2))


CASES: Mapping[str, Callable[..., bool]] = {
    case.__name__: case
    for case in (dense, causal, one_consumer, again, packed, in_pages, combined, fp8, fp8_decoding)
}

BUGS = (
    Bug(
        "the phase does not change with two slots",
        Position,
        "next",
        "self.phase ^ self.index => self.phase",
        "dense",
        "deadlock shared-race mbarrier-count",
    ),
    Bug(
        "the phase does not change with one slot",
        Position,
        "next",
        "Position(self.index, self.phase ^ 1) => Position(self.index, self.phase)",
        "one_consumer",
        "deadlock shared-race",
    ),
    Bug(
        "the phase does not change with three slots",
        Position,
        "next",
        "select(wraps, self.phase ^ 1, self.phase) => self.phase",
        "one_consumer",
        "deadlock shared-race mbarrier-count",
    ),
    Bug(
        "a slot too many before the first again",
        Position,
        "next",
        "self.index == stages - 1 => self.index == stages",
        "one_consumer",
        "out-of-bounds mbarrier-init shared-race",
    ),
    Bug(
        "a slot is filled before it is free",
        Ring,
        "acquire",
        "self.empty.wait(at.index, at.phase ^ 1) => pass",
        "dense",
        "shared-race mbarrier-count",
    ),
    Bug("a slot is waited for a phase late", Ring, "acquire", "at.phase ^ 1 => at.phase", "dense", "deadlock"),
    Bug(
        "a slot is read before it is full",
        Ring,
        "wait",
        "self.full.wait(at.index, at.phase) => pass",
        "dense",
        "shared-race",
    ),
    Bug(
        "a slot is read a phase early",
        Ring,
        "wait",
        "at.phase => at.phase ^ 1",
        "dense",
        "shared-race uninitialised deadlock",
    ),
    Bug("a slot is never released", Ring, "release", "self.empty.arrive(at.index) => pass", "dense", "deadlock"),
    Bug(
        "every lane releases a slot",
        Ring,
        "release",
        "lane == 0 => lane >= 0",
        "dense",
        "mbarrier-count",
    ),
    Bug(
        "a consuming warp is not waited for",
        Ring,
        "allocate",
        "consumer_warps * blocks => consumer_warps * blocks - 1",
        "dense",
        "mbarrier-count shared-race wrong",
    ),
    Bug(
        "mbarriers are used before they are there",
        flash_attn_sm90,
        "init_all",
        "        fence_mbarrier_init()\n    barrier() =>         fence_mbarrier_init()",
        "dense",
        "mbarrier-init",
    ),
    Bug(
        "an mbarrier is not initialised",
        Mbarriers,
        "init",
        "range(self.count) => range(self.count - 1)",
        "one_consumer",
        "mbarrier-init",
    ),
    Bug("mbarriers overlap by a byte", Mbarriers, "at", "* BYTES => * (BYTES - 1)", "dense", "mbarrier-init"),
    Bug(
        "a byte more is announced than comes",
        Producer,
        "_load",
        "acquire(at, slots.tile.bytes, note) => acquire(at, slots.tile.bytes + 1, note)",
        "dense",
        "deadlock",
    ),
    Bug(
        "a byte less is announced than comes",
        Producer,
        "_load",
        "acquire(at, slots.tile.bytes, note) => acquire(at, slots.tile.bytes - 1, note)",
        "dense",
        "mbarrier-bytes",
    ),
    Bug(
        "the last step's V is another tile's",
        Producer,
        "run",
        "self._load_v(v_at, work, work.tiles.first, here) => self._load_v(v_at, work, work.tiles.first + 1, here)",
        "dense",
        "wrong",
    ),
    Bug(
        "keys begin one later",
        Producer,
        "_keys",
        "work.kv.start + j * schedule.block_n => work.kv.start + j * schedule.block_n + 1",
        "dense",
        "wrong",
    ),
    Bug(
        "a head of queries is taken for one of keys",
        Producer,
        "_keys",
        "work.head // self.group => work.head",
        "dense",
        "wrong",
    ),
    Bug(
        "panels are copied to one place",
        sm90_producer,
        "copy_tile",
        "panel * tile.panel_bytes + i * piece_bytes => i * piece_bytes",
        "dense",
        "shared-race uninitialised",
    ),
    Bug(
        "a page is taken twice",
        PagedSequence,
        "pages",
        "row + i * self.page_size => row",
        "in_pages",
        "wrong",
    ),
    Bug(
        "values of another sequence are not cleared",
        Consumer,
        "_accumulate",
        "self.schedule.cut_keys => False",
        "packed",
        "wrong",
    ),
    Bug(
        "cleared values have no fence",
        sm90_producer,
        "clear_rows",
        "    fence_async_shared() =>     pass",
        "packed",
        "proxy-fence",
    ),
    Bug(
        "warps do not wait for what the others clear",
        flash_attn_sm90,
        "clear_tail",
        "barrier_sync(index + barrier, threads) => pass",
        "packed",
        "shared-race",
    ),
    Bug(
        "a row too many is cleared",
        sm90_producer,
        "clear_rows",
        "fly.maximum(first, 0) * tile.swizzle => (fly.maximum(first, 1) - 1) * tile.swizzle",
        "packed",
        "wrong",
    ),
    Bug(
        "V is not waited for",
        Consumer,
        "_accumulate",
        "v.ring.wait(state.v_at) => pass",
        "dense",
        "shared-race",
    ),
    Bug(
        "the first K is not waited for",
        Consumer,
        "first",
        "self.buffers.k.ring.wait(k_at) => pass",
        "dense",
        "shared-race uninitialised",
    ),
    Bug(
        "scores are taken before they are there",
        Consumer,
        "_products",
        "wgmma.wait(1, scores, => wgmma.wait(2, scores,",
        "dense",
        "in-flight",
    ),
    Bug(
        "V's slot is released before its product is done",
        Consumer,
        "_added",
        "output = self._acc => self.buffers.v.ring.release(state.v_at); output = self._acc",
        "dense",
        "shared-race mbarrier-count deadlock",
    ),
    Bug(
        "Q's slot is not released",
        Consumer,
        "_scored",
        "self.buffers.q.ring.release(q_at) => pass",
        "dense",
        "deadlock",
    ),
    Bug(
        "Q's slot is released before its last tile",
        Consumer,
        "_scored",
        "j == work.tiles.first => j == work.tiles.first + 1",
        "one_consumer",
        "shared-race mbarrier-count deadlock",
    ),
    Bug(
        "both consumers take the first rows of Q",
        Consumer,
        "_scores",
        "self.index * (64 * q.tile.swizzle // wgmma.UNIT) => 0",
        "dense",
        "wrong",
    ),
    Bug(
        "one consumer waits alone",
        Consumer,
        "await_tensor_cores",
        "2 * WARPGROUP => WARPGROUP",
        "dense",
        "named-barrier",
    ),
    Bug(
        "a consumer keeps the tensor cores",
        Consumer,
        "free_tensor_cores",
        "barrier_arrive(following + TENSOR_CORES, 2 * WARPGROUP) => pass",
        "dense",
        "deadlock",
    ),
    Bug(
        "more registers than there are", Sm90Options, "registers", "2: (40, 232) => 2: (56, 240)", "dense", "deadlock"
    ),
    Bug(
        "a row past the last is stored",
        flash_attn_sm90,
        "store_runs",
        "with fly.when(first + row < count): => with fly.when(first + row <= count):",
        "dense",
        "out-of-bounds global-race wrong",
    ),
    Bug(
        "groups of rows lie half as far apart",
        wgmma.PanelTile,
        "by_columns",
        "8 * self.swizzle => 4 * self.swizzle",
        "dense",
        "wrong",
    ),
    Bug(
        "panels of V lie one line apart",
        wgmma.PanelTile,
        "by_rows",
        "self._descriptor(self.panel_bytes, => self._descriptor(128,",
        "dense",
        "wrong",
    ),
    Bug(
        "a descriptor is 16 bytes on",
        wgmma.Operand,
        "descriptor",
        "return from_elements([start + self.units, => return from_elements([start + self.units + 1,",
        "dense",
        "wrong out-of-bounds shared-race uninitialised",
    ),
    Bug(
        "steps along rows are half as long",
        wgmma.PanelTile,
        "step",
        "return k * self.swizzle => return k * self.swizzle // 2",
        "dense",
        "wrong",
    ),
    Bug(
        "an empty packed tile has the rows before its sequence",
        Schedule,
        "_packed_in_use",
        "(block < 0) | (block >= blocks) => block < 0",
        "packed",
        "out-of-bounds global-race wrong",
    ),
    Bug("counters are not reset", Schedule, "finish", "self.counters.store(fly.i32(0), 0) => pass", "again", "wrong"),
    Bug(
        "the last rows are no tile",
        Schedule,
        "_row_blocks",
        "fly.ceil_div(self.seq_len, self.block_m * self.together) => self.seq_len // self.block_m",
        "dense",
        "wrong",
    ),
    Bug(
        "what was published is never released",
        WorkRing,
        "read",
        "self.ring.release(at) => pass",
        "dense",
        "deadlock",
    ),
    Bug(
        "a tile is read before it is published",
        WorkRing,
        "read",
        "self.ring.wait(at) => pass",
        "dense",
        "shared-race uninitialised",
    ),
    Bug(
        "parts are counted before all of them is stored",
        Combination,
        "run",
        "barrier_sync(self.barrier, WARPGROUP) => pass",
        "combined",
        "global-race",
    ),
    Bug(
        "one part too few is waited for",
        Combination,
        "run",
        "schedule.splits - 1 => schedule.splits - 2",
        "combined",
        "global-race wrong",
    ),
    Bug(
        "a count hands on nothing of what it counts",
        sm90_combine.Combination,
        "run",
        '(FIRST_ARRIVAL + tile)) => (FIRST_ARRIVAL + tile), order="relaxed")',
        "combined",
        "global-race",
    ),
    Bug(
        "lse is in base 2",
        Fp8Consumer,
        "_finished",
        "of_values))), lse => of_values))), lse.map(lambda x: x * 1.442695)",
        "fp8",
        "wrong",
    ),
    Bug(
        "transposed tiles have no fence",
        Ring,
        "publish",
        "fence_async_shared() => pass",
        "fp8_decoding",
        "proxy-fence",
    ),
    Bug(
        "a transposed slot is written before it is free",
        Ring,
        "claim",
        "self.empty.wait(at.index, at.phase ^ 1) => pass",
        "fp8_decoding",
        "shared-race deadlock",
    ),
    Bug(
        "even bytes are taken for odd ones",
        TileTranspose,
        "store",
        "fly.select(lane // 16 == 0, EVEN, ODD) => fly.select(lane // 16 == 0, ODD, EVEN)",
        "fp8_decoding",
        "wrong",
    ),
    Bug(
        "a raw slot is released before it is read",
        Transposer,
        "_transpose",
        "raw.ring.wait(raw_at) => raw.ring.wait(raw_at); raw.ring.release(raw_at)",
        "fp8_decoding",
        "shared-race mbarrier-count deadlock",
    ),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", SEEDS)
def test_without_a_bug_there_is_none(case, schedule, force):
    assert not CASES[case](force)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_it_is_found(bug, force, monkeypatch, seed):
    bug.plant(monkeypatch)
    try:
        found = "wrong" if CASES[bug.case](force) else None
    except SimulatorReportError as error:
        found = error.reports[0].kind
    assert found in bug.found.split(), f"seed {seed}"
