"""Attention over parts of the keys, put together: the second kernel of a call with split keys.

Split s of a row gives its own normalised output O_s and log-sum-exp L_s. Over all keys

    L = log(sum over s of exp(L_s))        out = sum over s of exp(L_s - L) * O_s

both in f32, measured from the largest L_s. A split without keys has L_s = -inf and weighs nothing; a row without any
gives out 0 and L = -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

import fly
from fly.runtime.compile import compile_kernel
from fly.runtime.prepared import Prepared, bind
from kernels.dispatch import Request, Tensors
from kernels.features import LOG2_E, NO_FEATURES, Features
from kernels.tile_scheduler import Sequence, grid, part

THREADS = 256
VECTOR = 8  # elements of a row that a thread combines
OPERANDS = ("seqused_q", "sink")
_ALIGNMENT = 256


@dataclass(frozen=True)
class Partials:
    """Where the splits' results lie in a workspace: outputs (S, ..., H, Sq, D), then log-sum-exps (S, ..., H, Sq).

    `rows` is (..., H, Sq): (B, H, Sq) dense, (H, total_q) packed; both f32. Heads come before tokens so that what a
    block writes is contiguous.
    """

    splits: int
    rows: tuple[int, ...]
    head_dim: int

    @staticmethod
    def of(tensors: Tensors, splits: int) -> Partials:
        """Of a call's tensors."""
        *batch, tokens, heads, head_dim = tensors.out.shape
        return Partials(splits, (*batch, heads, tokens), head_dim)

    @property
    def lse_offset(self) -> int:
        """Bytes before the log-sum-exps."""
        outputs = 4 * self.splits * math.prod(self.rows) * self.head_dim
        return outputs + -outputs % _ALIGNMENT

    @property
    def bytes(self) -> int:
        """Size of the workspace."""
        return self.lse_offset + 4 * self.splits * math.prod(self.rows)

    def views(self, workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs, log-sum-exps) in a workspace, with the dimensions of a call's out and lse after the splits."""
        memory = workspace.reshape(-1).view(torch.uint8)
        outputs = memory[: self.lse_offset].view(torch.float32)
        outputs = outputs[: self.splits * math.prod(self.rows) * self.head_dim]
        outputs = outputs.view(self.splits, *self.rows, self.head_dim).transpose(-2, -3)
        lse = memory[self.lse_offset : self.bytes].view(torch.float32).view(self.splits, *self.rows)
        return outputs, lse


def rows_of_block(head_dim: int) -> int:
    """Query rows that one block combines."""
    return THREADS // (head_dim // VECTOR)


@fly.kernel
def split_combine(
    partial_out: fly.Tensor,
    partial_lse: fly.Tensor,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    cu_seqlens_q: fly.Tensor | None,
    *operands: fly.Operand,
    head_dim: int,
    features: Features = NO_FEATURES,
):
    """out, lse = the splits' results put together, as in the module's formula.

    partial_out: (S, B, Sq, H, D) or packed (S, total_q, H, D); partial_lse: (S, B, H, Sq) or (S, H, total_q), f32;
    out, lse as in `kernels.tile_scheduler`; operands of `features`, which are among `OPERANDS`. Grid: (row blocks,
    query heads, sequences). A thread owns `VECTOR` elements of a row.
    """
    given = features.bind(operands)
    sink = given.get("sink")
    lanes = head_dim // VECTOR
    rows = rows_of_block(head_dim)
    head, batch = fly.block_id.y, fly.block_id.z
    first_row = fly.block_id.x * rows
    row, column = fly.thread_id.x // lanes, fly.thread_id.x % lanes * VECTOR

    queries = Sequence.of(out, cu_seqlens_q, batch, given.get("seqused_q"))
    window = queries.matrix(out, head).rows(head_dim).window(first_row, rows)

    def split_lse(split: Any) -> fly.Value:
        return queries.vector(part(partial_lse, split), head).load(first_row + row) * LOG2_E

    with fly.when((row < rows) & (row < window.rows_left)):
        for split, so_far in (loop := fly.range(partial_lse.shape[0], carry=fly.f32(-math.inf))):
            loop.next(fly.maximum(so_far, split_lse(split)))
        maximum = loop.results
        if sink is not None:
            sink_log2 = sink.load(head).to(fly.f32) * LOG2_E
            maximum = fly.maximum(maximum, sink_log2)
        # -inf - -inf is NaN: a row without any key is measured from 0
        pivot = fly.select(maximum == -math.inf, 0.0, maximum)
        start = (fly.f32(0.0), fly.broadcast(fly.f32(0.0), VECTOR))
        for split, (total, output) in (loop := fly.range(partial_lse.shape[0], carry=start)):
            weight = fly.exp2(split_lse(split) - pivot)
            view = queries.matrix(part(partial_out, split), head).rows(head_dim)
            values = view.window(first_row, rows).load_inside(row, column, VECTOR)
            loop.next(total + weight, fly.fma(values, fly.broadcast(weight, VECTOR), output))
        total, output = loop.results
        if sink is not None:
            total = total + fly.exp2(sink_log2 - pivot)
        inverse = fly.select(total == 0.0, 0.0, fly.rcp(total))
        window.store((output * fly.broadcast(inverse, VECTOR)).to(out.dtype), row, column)
        if lse is not None:
            with fly.when(column == 0):
                value = (pivot + fly.log2(total)) * (1 / LOG2_E)
                queries.vector(lse, head).store(fly.select(total == 0.0, -math.inf, value), first_row + row)


def operand_places(request: Request) -> tuple[int, ...]:
    """Which the combination takes of a call's operands that are tensors."""
    asked = request.asked
    return tuple(asked.place(name) for name in asked.only(OPERANDS).operands)


def prepare(partial_out: torch.Tensor, partial_lse: torch.Tensor, tensors: Tensors, request: Request) -> Prepared:
    """Compile and bind the combination.

    Its addresses are partial_out, partial_lse, out, lse, cu_seqlens_q, and those at `operand_places`.
    """
    asked = request.asked.only(OPERANDS)
    blocks = grid(request.batch, request.num_heads, request.seq_len, rows_of_block(request.value_dim))
    statics = {"head_dim": request.value_dim, "features": asked}
    arguments = (
        partial_out,
        partial_lse,
        tensors.out,
        tensors.lse,
        tensors.cu_seqlens_q,
        *(request.asked.tensor(tensors.operands, name) for name in asked.operands),
    )
    return bind(split_combine, blocks, THREADS, arguments, statics, compile_kernel)
