"""Attention over parts of the keys, put together: the second kernel of a call with split keys, and `merge_states`.

Split s of a row gives its own normalised output O_s and log-sum-exp L_s. Over all keys

    L = log(sum over s of exp(L_s))        out = sum over s of exp(L_s - L) * O_s

both in f32, measured from the largest L_s so far. A split without keys has L_s = -inf and weighs nothing; a row
without any gives out 0 and L = -inf. `Origin` says what is different of parts that callers bring.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fly

from ..problem.features import NO_FEATURES, Features
from ..problem.scores import LOG2_E
from .sequences import Sequence, sequences_of, tokens_of
from .steps import PARTIAL_RESULTS, aligned
from .tile_scheduler import head_of_block, part

THREADS = 256
VECTOR = 8  # elements of a row that a thread combines
AT_A_TIME = 4  # splits whose loads are on their way together
OPERANDS = ("seqused_q", "sink")
PARTIALS = (PARTIAL_RESULTS, "partial_lse")  # what the splits' results are called among a call's tensors


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
    def of(out: torch.Tensor, splits: int) -> Partials:
        """Of a call's result."""
        *batch, tokens, heads, head_dim = out.shape
        return Partials(splits, (*batch, heads, tokens), head_dim)

    @property
    def lse_offset(self) -> int:
        """Bytes before the log-sum-exps."""
        return aligned(4 * self.splits * math.prod(self.rows) * self.head_dim)

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


@dataclass(frozen=True)
class Origin:
    """Whose the parts are.

    `log2`: log-sum-exps are of base 2, the result's too. `foreign`: they are not this library's, so that +inf says
    "no keys" as well, and the output of a part without keys may be anything.
    """

    log2: bool = False
    foreign: bool = False

    @property
    def to_log2(self) -> float:
        """What makes a log-sum-exp one of base 2."""
        return 1.0 if self.log2 else LOG2_E

    def lse(self, loaded: fly.Value) -> fly.Value:
        """A part's log-sum-exp, -inf where there are no keys."""
        return fly.select(loaded == math.inf, -math.inf, loaded) if self.foreign else loaded

    def values(self, loaded: fly.Value, lse: fly.Value) -> fly.Value:
        """A part's output, finite where there are no keys."""
        if not self.foreign:
            return loaded
        return fly.select(fly.broadcast(lse == -math.inf, VECTOR), 0.0, loaded.to(fly.f32))


OWN = Origin()


def rows_of_block(head_dim: int) -> int:
    """Query rows that one block combines."""
    return THREADS // (head_dim // VECTOR)


@fly.kernel
def split_combine(
    partial_out: fly.Tensor | None,
    partial_lse: fly.Tensor | None,
    out: fly.Tensor,
    lse: fly.Tensor | None,
    cu_seqlens_q: fly.Tensor | None,
    *operands: fly.Operand,
    head_dim: int,
    features: Features = NO_FEATURES,
    origin: Origin = OWN,
    folded: bool = False,
) -> None:
    """out, lse = the splits' results put together, as in the module's formula.

    partial_out: (S, B, Sq, H, D) or packed (S, total_q, H, D); partial_lse: (S, B, H, Sq) or (S, H, total_q), f32;
    out, lse as in `tile_scheduler`; operands of `features`, which are among `OPERANDS`. Without partial_out and
    partial_lse, parts lie apart, and more operands are an out and an lse of each, or of several (S, ...). Grid:
    (row blocks, query heads, sequences), or `folded`. A thread owns `VECTOR` elements of a row, and reads no others'
    values.
    """
    given = features.bind(operands)
    lanes = head_dim // VECTOR
    rows = rows_of_block(head_dim)
    head, batch, exists = head_of_block(out.shape[-2], sequences_of(out, cu_seqlens_q), folded=folded)
    first_row = fly.block_id.x * rows
    row, column = fly.thread_id.x // lanes, fly.thread_id.x % lanes * VECTOR

    queries = Sequence.of(tokens_of(out, cu_seqlens_q), cu_seqlens_q, batch, given.get("seqused_q"))
    window = queries.matrix(out, head).rows(head_dim).window(first_row, rows)

    def lse_in(part_lse: fly.Tensor) -> fly.Value:
        return queries.vector(part_lse, head).load(first_row + row)

    def values_in(part_out: fly.Tensor) -> fly.Value:
        view = queries.matrix(part_out, head).rows(head_dim)
        return view.window(first_row, rows).load_inside(row, column, VECTOR)

    def result() -> tuple[fly.Value, fly.Value]:
        sink = given.sink_of(head, first_row + row)
        if partial_out is None or partial_lse is None:
            outs, lses = given.aux[::2], given.aux[1::2]
            several = [x.rank > out.rank for x in outs]
            return combined_apart(outs, lses, several, lse_in, values_in, sink, origin)
        splits = partial_lse.shape[0]

        def lse_of(split: Any) -> fly.Value:
            return lse_in(part(partial_lse, split))

        def values_of(split: Any) -> fly.Value:
            return values_in(part(partial_out, split))

        return combined(splits, lse_of, values_of, sink, origin=origin)

    inside = (row < rows) & (row < window.rows_left)
    with fly.when(inside if exists is None else inside & exists):
        output, row_lse = result()
        window.store(output.to(out.dtype), row, column)
        if lse is not None:
            with fly.when(column == 0):
                queries.vector(lse, head).store(row_lse, first_row + row)


State = tuple[fly.Value, fly.Value, fly.Value]  # the largest log-sum-exp, sum of weights, weighted sum of outputs


def combined(
    splits: Any,
    lse_of: Callable[[Any], fly.Value],
    values_of: Callable[[Any], fly.Value],
    sink: fly.Value | None,
    at_a_time: int = AT_A_TIME,
    origin: Origin = OWN,
) -> tuple[fly.Value, fly.Value]:
    """(`VECTOR` elements of a row's output, the row's log-sum-exp), f32.

    `lse_of`, `values_of`: what a thread loads of a split; `sink`: the row's, or None.
    """
    return _normalised(_with_splits(_nothing(sink), splits, lse_of, values_of, at_a_time, origin), sink, origin)


def _with_splits(
    state: State,
    splits: Any,
    lse_of: Callable[[Any], fly.Value],
    values_of: Callable[[Any], fly.Value],
    at_a_time: int,
    origin: Origin,
) -> State:
    for first, carried in (loop := fly.range(0, splits, at_a_time, carry=state)):
        # loads past the last split are of the last one, whose line is there: they cost no bandwidth
        places = [fly.minimum(first + i, splits - 1) for i in range(at_a_time)]
        values = [values_of(split) for split in places]
        lses = [
            fly.select(first + i < splits, origin.lse(lse_of(split)), -math.inf) for i, split in enumerate(places)
        ]
        loop.next(*_with(carried, lses, values, origin))
    results: State = loop.results
    return results


def combined_apart(
    outs: Items[fly.Tensor],
    lses: Items[fly.Tensor],
    several: Items[bool],
    lse_in: Callable[[fly.Tensor], fly.Value],
    values_in: Callable[[fly.Tensor], fly.Value],
    sink: fly.Value | None,
    origin: Origin,
) -> tuple[fly.Value, fly.Value]:
    """The same of parts in tensors of their own; `lse_in`, `values_in`: what a thread loads of one.

    `several`: which of the tensors hold several parts.
    """
    state = _nothing(sink)
    single = [i for i, more in enumerate(several) if not more]
    for first in range(0, len(single), AT_A_TIME):
        some = single[first : first + AT_A_TIME]
        values = [values_in(outs[i]) for i in some]
        state = _with(state, [origin.lse(lse_in(lses[i])) for i in some], values, origin)
    for i in (i for i, more in enumerate(several) if more):
        lse_of = partial(_of_part, lse_in, lses[i])
        values_of = partial(_of_part, values_in, outs[i])
        state = _with_splits(state, lses[i].shape[0], lse_of, values_of, AT_A_TIME, origin)
    return _normalised(state, sink, origin)


def _of_part(load: Callable[[fly.Tensor], fly.Value], parts: fly.Tensor, index: Any) -> fly.Value:
    return load(part(parts, index))


def _nothing(sink: fly.Value | None) -> State:
    """Of no parts but the row's sink, if it has one."""
    none = fly.broadcast(fly.f32(0.0), VECTOR)
    return (fly.f32(-math.inf), fly.f32(0.0), none) if sink is None else (sink, fly.f32(1.0), none)


def _with(state: State, lses: list[fly.Value], values: list[fly.Value], origin: Origin) -> State:
    """Of more parts."""
    maximum, total, output = state
    largest = functools.reduce(fly.maximum, lses, maximum)
    # -inf - -inf is NaN: as long as there is no key, the row is measured from 0
    pivot = fly.select(largest == -math.inf, 0.0, largest)
    weights = [fly.exp2((lse - pivot) * origin.to_log2) for lse in lses]
    before = fly.exp2((maximum - pivot) * origin.to_log2)
    output = output * fly.broadcast(before, VECTOR)
    for value, lse, weight in zip(values, lses, weights, strict=True):
        output = fly.fma(origin.values(value, lse), fly.broadcast(weight, VECTOR), output)
    return largest, total * before + functools.reduce(operator.add, weights), output


def _normalised(state: State, sink: fly.Value | None, origin: Origin) -> tuple[fly.Value, fly.Value]:
    maximum, total, output = state
    inverse = fly.select(total == 0.0, 0.0, fly.rcp(total))
    lse = fly.select(total == 0.0, -math.inf, maximum + fly.log2(total) * (1 / origin.to_log2))
    return output * fly.broadcast(inverse, VECTOR), lse if sink is None else fly.maximum(lse, sink)
