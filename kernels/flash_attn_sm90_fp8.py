"""Flash attention forward for Hopper on 8-bit floats: the pipeline of `flash_attn_sm90`, with e4m3 products.

Q, K and V are e4m3, out is bf16. What differs from 16 bits:

| what | why |
|---|---|
| V becomes (D, keys), beforehand in the call's workspace or, decoding, by a warpgroup | k is along rows' bytes |
| its keys are in another order, in each 16 | P's accumulators, narrowed, are then A registers as they are |
| P is 2^8 exp(score - max) | e4m3 holds 2^-9 to 448: probabilities from 2^-17 on do not vanish |
| no lazy rescale | P would pass 448 |
| each tile's P V starts from zero and is added to O in f32 | 8-bit products add up with about 14 bits |
| where O and a tile's scores take most registers, O comes first | P V and scores are never in registers at once |
| sums are of P before it is rounded | log-sum-exps are as exact as in 16 bits; rounding errors of P have no sign |

`q_descale * k_descale` of a sequence and key head multiplies scores with the softmax's scale, `v_descale` the output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import fly
from fly.backends.nvvm import wgmma
from fly.backends.nvvm.mbarrier import Position
from fly.backends.nvvm.wgmma import FirstRows, PanelTile, WarpgroupAtom
from fly.errors import ShapeError
from fly.runtime.device import device_of

from .flash_attn_sm90 import ConsumerOf, KeptOf, OfHead, State, run_block
from .problem.contract import Launch, Request, Tensors
from .problem.online_softmax import OnlineSoftmax
from .sm90.builds import Key, Sm90Options, build_for
from .sm90.dropout import KeptWeights
from .sm90.launch import bind_build, typical_lengths
from .sm90.producer import Pages, Producer, entry_of
from .sm90.schedule import PackedRows
from .sm90.transposer import Transposer
from .work.steps import bind_kernel
from .work.tile_scheduler import Work, fold_grid, slice_of_block

OFFSET = 8  # probabilities are 2 ** OFFSET times what they are, below e4m3's largest number, 448
DTYPE = torch.float8_e4m3fn
FIRST_ROWS = 8  # of each 16, which a warp has
LEAST_SCALE = 2.0**-126

# Like kernels/sm90/tiles.py; those with one consumer were not measured.
TILES: dict[Key, Mapping[str, Any]] = {
    (64, 64, False, 3, None): {"block_n": 128, "stages": 2, "q_stages": 2},
    (64, 64, False, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.75},
    (64, 64, True, 3, None): {"block_n": 128, "stages": 2, "q_stages": 2},
    (64, 64, True, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.75},
    (128, 128, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 2},
    (128, 128, False, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.75},
    (128, 128, True, 2, None): {"block_n": 128, "stages": 3, "q_stages": 2, "ping_pong": False, "hold": True},
    (128, 128, True, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.75},
    (256, 256, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "output_first": True},
    (256, 256, True, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "output_first": True},
}
# Decoding, where V is read once and transposed in the kernel. More tiles in flight make blocks end less evenly.
DECODING: Mapping[int, Mapping[str, Any]] = {
    64: {"block_n": 128, "stages": 4, "transposed_stages": 1},
    128: {"block_n": 128, "stages": 3, "transposed_stages": 1},
    256: {"block_n": 128, "stages": 2, "transposed_stages": 1, "output_first": True},
}


@dataclass(frozen=True)
class Fp8Options(Sm90Options):
    """A build on 8-bit inputs: V's tiles have head dimensions for rows and keys for columns.

    `output_first`: a tile's O += P V is started before the next tile's scores, and is in O before these are there.
    `transposed_stages`: slots for V's tiles that a warpgroup of the kernel makes; 0 where V comes transposed.
    `first_rows`: a sequence and key head has `FIRST_ROWS` rows at most, and others of each 16 have no softmax and no
    output.
    """

    rescale: str = "always"
    output_first: bool = False
    transposed_stages: int = 0
    first_rows: bool = False
    most_keys: ClassVar[int] = 128  # of more, sums in a product's accumulators lose too much
    decoding: ClassVar[Mapping[int, Mapping[str, Any]]] = DECODING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rescale != "always":
            raise ShapeError(
                f"rescale is {self.rescale!r}; expected 'always' with 8-bit probabilities, which end at 448"
            )
        if self.output_first and self.hold:
            raise ShapeError("hold is True; expected False with output_first, whose output waits for no exponentials")
        if self.first_rows and self.consumers > 1:
            raise ShapeError(f"consumers is {self.consumers}; expected 1 with first_rows")
        if self.first_rows and self.products > 1:
            # ptxas would give each product registers of its own, and spill 150 words
            raise ShapeError(f"first_rows is True; expected False with head_dim_v {self.head_dim_v}")

    @property
    def registers(self) -> tuple[int, int]:
        """As of `Sm90Options`; where two consumers have wide outputs, the producer spills rather than they."""
        return (24, 240) if self.output_first and self.consumers == 2 else super().registers

    @property
    def products(self) -> int:
        """Products with a tile of V that make O's columns."""
        return self.head_dim_v // self.piece

    @property
    def piece(self) -> int:
        """Columns of O that one product with a tile of V makes: those that registers are left for."""
        return self.head_dim_v if self.head_dim_v <= 128 else 32

    @property
    def tiles(self) -> tuple[PanelTile, PanelTile, PanelTile]:
        """Of Q, K and transposed V in shared memory."""
        return (
            PanelTile.widest(self.block_m, self.head_dim, 1),
            PanelTile.widest(self.block_n, self.head_dim, 1),
            PanelTile.widest(self.head_dim_v, self.block_n, 1),
        )

    @property
    def raw_tile(self) -> PanelTile | None:
        return PanelTile.widest(self.block_n, self.head_dim_v, 1) if self.transposed_stages else None

    @property
    def v_stages(self) -> int:
        return self.transposed_stages or self.stages

    @property
    def boxes(self) -> tuple[tuple[int, ...], ...]:
        """What one bulk copy moves of q, k and v, see `Sm90Options`, or of transposed v, (B, Hkv, D, keys)."""
        q, k, v = super().boxes
        transposed = self.tiles[2]
        return q, k, v if self.transposed_stages else (1, 1, transposed.rows, transposed.panel_columns)


@fly.kernel
def flash_attn_sm90_fp8(
    q: fly.TensorMap,
    k: fly.TensorMap,
    v: fly.TensorMap,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    cu_seqlens_q: fly.Tensor | None,
    cu_seqlens_kv: fly.Tensor | None,
    counters: fly.Tensor,
    whole_out: fly.Tensor | None,
    whole_lse: fly.Tensor | None,
    seq_len_kv: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    group: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    section: fly.i32,  # type: ignore[valid-type]  # a dtype, for its scalars
    scale_log2: fly.f32,  # type: ignore[valid-type]  # a dtype, for its scalars
    *operands: fly.Operand,
    options: Fp8Options,
) -> None:
    """out = softmax(softmax_scale * q k^T) v, as `flash_attn_sm90`.

    q, k: e4m3 maps; v: one of what `transpose_values` makes, or with `transposed_stages` like k's; operands:
    q_descale, k_descale, v_descale or some of them, (B, Hkv) f32. Where sequences lie, in pages, packed or with
    lengths, only builds with `transposed_stages` are told.
    """
    tensors = (out, lse, cu_seqlens_q, cu_seqlens_kv, counters, whole_out, whole_lse)
    sizes = (seq_len_kv, group, section)
    transposer = Transposer if options.transposed_stages else None
    run_block((q, k, v), tensors, sizes, scale_log2, operands, options, Fp8Producer, Fp8Consumer, transposer)


@dataclass(frozen=True)
class Output:
    """O so far, and what its rows are to be multiplied by before more is added: it is measured from older maxima."""

    values: fly.Value
    factor: fly.RowVector


class Fp8Producer(Producer):
    """The producer of 8-bit tiles."""

    def _load_v(self, at: Position, work: Work, j: Any, pages: Pages) -> Position:
        if self.buffers.raw is not None:
            return super()._load_v(at, work, j, pages)
        place = entry_of(work.kv), work.head // self.group, 0
        return self._load(self.v, self.buffers.v, at, [place], j * self.schedule.block_n)


class Fp8Consumer(ConsumerOf[Output]):
    """A consumer of 8-bit tiles."""

    options: Fp8Options

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.dtype = fly.bf16  # of the output
        self.piece_atom = WarpgroupAtom(self.options.piece, self.output_atom.dtype)
        if self.options.first_rows:
            atoms = (self.score_atom, self.output_atom)
            self.score_layout, self.output_layout = (fly.AccumulatorLayout(FirstRows(a), "m") for a in atoms)

    def _in_use(self, product: fly.Value) -> fly.Value:
        """A product's accumulators, or those of the rows that there are."""
        return FirstRows.of(product) if self.options.first_rows else product

    def _no_output(self) -> Output:
        zeros = fly.Fragment.zeros(self.output_layout, 1, 1).tiles[0][0]
        return Output(zeros, fly.RowVector.full(self.output_layout, 1, 1.0))

    def fragment(self, output: Output) -> fly.Fragment:
        return fly.Fragment(self.output_layout, ((output.values,),))

    def _product(self, number: int, state: State) -> fly.Value:
        """Start P V of a key tile for the columns of one piece, from zero."""
        v = self.buffers.v
        columns = v.operand(state.v_at, units=number * self.options.piece * v.tile.swizzle // wgmma.UNIT)
        return wgmma.issue(self.piece_atom, state.weights, columns, self.options.block_n // self.piece_atom.k)

    def _accumulate(self, work: Work, j: Any, output: Output, state: State) -> fly.Value:
        self.buffers.v.ring.wait(state.v_at)
        return self._product(0, state)

    def _accumulated(
        self, started: fly.Value, output: Output, state: State, after: Sequence[fly.Value] = ()
    ) -> Output:
        return self._summed(started, output, state, after=after)[0]

    def _summed(
        self,
        started: fly.Value,
        output: Output,
        state: State,
        behind: Callable[[], fly.Value] | None = None,
        after: Sequence[fly.Value] = (),
    ) -> tuple[Output, fly.Value | None]:
        """O with the products of a key tile, of which the first is started, and what `behind` starts after them.

        One of them is added while the next is multiplied, and no more than two are in registers at a time.
        """
        starts: list[Callable[[], fly.Value]]
        starts = [functools.partial(self._product, number, state) for number in range(1, self.options.products)]
        starts += [] if behind is None else [behind]
        before, factors = output.values, self.fragment(output).spread(output.factor, 0)
        pieces: list[fly.Value] = []
        flying: fly.Value | None = started
        for number in range(self.options.products):
            following = None
            if number < len(starts):
                if pieces:
                    # a wait for nothing, before which the last piece must have been added and its product is free
                    pieces[-1:] = wgmma.wait(1, pieces[-1])
                following = starts[number]()
            assert flying is not None
            product = self._in_use(wgmma.wait(int(following is not None), flying, after=() if number else after)[0])
            place = slice(number * len(product), (number + 1) * len(product))
            pieces.append(fly.fma(before[place], factors[place], product))
            flying = following
        return Output(fly.concat(pieces), output.factor), flying

    def _products(
        self, output: Output, state: State, q_at: Position, accumulate: Callable[[], fly.Value], kept_of: KeptOf
    ) -> tuple[fly.Value, Any, KeptWeights | None]:
        if not self.options.output_first:
            return super()._products(output, state, q_at, accumulate, kept_of)

        def scores() -> fly.Value:
            started = self._scores(q_at, state.k_at)
            if self.options.ping_pong:
                self.free_tensor_cores()
            return started

        if self.options.ping_pong:
            self.await_tensor_cores()
        output, started = self._summed(accumulate(), output, state, scores)
        assert started is not None
        self.buffers.v.ring.release(state.v_at)
        return wgmma.wait(0, started)[0], output, None

    def _added(self, started: Any, output: Output, state: State, sums: fly.RowVector) -> Output:
        added: Output = started if self.options.output_first else super()._added(started, output, state, sums)
        return added

    def _rescaled(self, output: Output, factor: fly.RowVector) -> Output:
        return Output(output.values, fly.RowVector(self.output_layout, factor.values))

    def _descaled(self, value: Any, work: Work, *names: str) -> Any:
        """A value times the head's scales of these names, as far as there are any."""
        for name in names:
            scales = self.given.get(name)
            if scales is not None:
                head = work.head // (self.schedule.heads // scales.shape[1])
                value = value * scales.load(work.batch, head)
        return value

    def _of_head(self, work: Work) -> fly.Value:
        """What the head's scores are multiplied by, in log2 units; with 0, masked scores would be NaN."""
        return fly.maximum(self._descaled(self.scale, work, "q_descale", "k_descale"), LEAST_SCALE)

    def _modified(
        self, work: Work, j: Any, scores: fly.Value, of_head: OfHead, bias: fly.Fragment | None = None
    ) -> fly.Fragment:
        return super()._modified(work, j, self._in_use(scores), of_head, bias)

    def _advance(
        self, of_head: OfHead, softmax: OnlineSoftmax, scores: fly.Fragment, *, masked: bool
    ) -> tuple[OnlineSoftmax, fly.Fragment, fly.RowVector]:
        assert isinstance(of_head, fly.Value)
        return softmax.advance(scores, of_head, masked=masked, offset=OFFSET)

    def _narrow(self, probabilities: fly.Fragment) -> tuple[fly.Value, ...]:
        """P as the A registers of the second product, 32 keys each."""
        values = probabilities.tiles[0][0]
        return wgmma.by_pairs(FirstRows.twice(values) if self.options.first_rows else values, fly.f8e4m3)

    def _finish(self, work: Work, softmax: OnlineSoftmax) -> tuple[fly.RowVector, fly.RowVector]:
        inverse, lse = softmax.finish(self._of_head(work), offset=OFFSET)
        scale = self._descaled(fly.f32(1.0), work, "v_descale")
        return inverse.map(lambda x: x * scale), lse

    def store(self, view: fly.Tensor | PackedRows, work: Work, output: fly.Fragment) -> None:
        if self.options.transposed_stages:
            # few rows to store; trading them among lanes would take registers that loops spill for at D=256
            self._store_runs(view, work, output, self.dtype)
        else:
            super().store(view, work, output)


TRANSPOSE_THREADS = 128
KEYS, DIMS = 16, 16  # that a thread transposes, 16 bytes each


def keys_of_block(head_dim: int) -> int:
    """Keys that one block of `transpose_values` takes."""
    return TRANSPOSE_THREADS * KEYS * DIMS // head_dim


@fly.kernel
def transpose_values(v: fly.Tensor, transposed: fly.Tensor, *, head_dim: int, folded: bool = False) -> None:
    """transposed[b, h, :, 16 i + j] = v[b, 16 i + PAIRS(j), h, :], zero past the last key.

    v: (B, S, Hkv, D), transposed: (B, Hkv, D, S rounded up to 16), 8-bit, 16-byte aligned. Grid: (blocks of
    `keys_of_block`, Hkv, B), or `folded`. A thread has 16 keys by 16 dimensions in registers; 32 threads load 64
    bytes of each key, and store 128 of each dimension.
    """
    first, head, batch, exists = fly.block_id.x * keys_of_block(head_dim), fly.block_id.y, fly.block_id.z, None
    if folded:
        slice_, exists = slice_of_block(v.shape[2] * v.shape[0])
        batch = slice_ // v.shape[2]
        head = slice_ - batch * v.shape[2]
    lane, warp, beside = fly.thread_id.x % 32, fly.thread_id.x // 32, head_dim // (4 * DIMS)
    column = (lane % 4 + 4 * (warp % beside)) * DIMS
    key = (lane // 4 + 8 * (warp // beside)) * KEYS
    rows = v[batch, :, head, :].rows(head_dim).window(first, keys_of_block(head_dim))
    columns = transposed[batch, head, :, :]
    inside = first + key < transposed.shape[3]
    with fly.when(inside if exists is None else inside & exists):
        words = [rows.load(key + i, column, DIMS).bitcast(fly.i32) for i in range(KEYS)]
        for word in range(DIMS // 4):
            fours = [
                _transposed([words[wgmma.PAIRS(4 * slot + i)][word] for i in range(4)]) for slot in range(KEYS // 4)
            ]
            for i in range(4):
                values = fly.from_elements([four[i] for four in fours]).bitcast(v.dtype)
                fly.store(values, columns.at(column + 4 * word + i, first + key), align=16)


def _transposed(words: list[fly.Value]) -> list[fly.Value]:
    """A 4 by 4 matrix of bytes, a word a row, transposed."""
    even, low = 0x00FF00FF, 0xFFFF

    def twos(a: fly.Value, b: fly.Value) -> tuple[fly.Value, fly.Value]:
        return (a & even) | ((b & even) << 8), ((a >> 8) & even) | (b & ~even)

    (even_01, odd_01), (even_23, odd_23) = twos(*words[:2]), twos(*words[2:])
    pairs = ((even_01, even_23), (odd_01, odd_23))
    lower = [(a & low) | (b << 16) for a, b in pairs]
    upper = [((a >> 16) & low) | (b & ~low) for a, b in pairs]
    return [*lower, *upper]


def has_first_rows(request: Request, options: Fp8Options) -> bool:
    """Whether a build for decoding is better without half of the rows of its tiles: if no row is in that half.

    Where O is made in several products, memory decides, not the softmax.
    """
    return options.products == 1 and request.seq_len * options.pack_gqa <= FIRST_ROWS


def prepare(tensors: Tensors, request: Request) -> Launch:
    """Compile and bind this kernel for one kind of call; see `contract.Prepare`."""
    units = device_of(tensors["q"].device).compute_units
    typical = typical_lengths(tensors, request)
    options, splits = build_for(request, units, typical, table=TILES, kind=Fp8Options)
    assert isinstance(options, Fp8Options)
    if options.transposed_stages:
        options = replace(options, first_rows=has_first_rows(request, options))
        return bind_build(flash_attn_sm90_fp8, tensors, request, options, splits).launch()
    v = tensors["v"]
    batch, keys, kv_heads, head_dim = v.shape
    # only its sizes and strides matter here, and the workspace's are for others
    transposed = torch.empty(batch, kv_heads, head_dim, keys + -keys % KEYS, dtype=DTYPE, device=v.device)
    tensors = {**tensors, "transposed": transposed, "workspace": None}
    grid, fold = fold_grid((-(-keys // keys_of_block(head_dim)), kv_heads, batch))
    transpose = bind_kernel(transpose_values, grid, TRANSPOSE_THREADS, tensors, {"head_dim": head_dim, **fold})
    forward = bind_build(flash_attn_sm90_fp8, tensors, request, options, splits)
    return forward.behind(transpose, "transposed", transposed.numel()).launch()
