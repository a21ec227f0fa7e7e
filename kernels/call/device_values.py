"""Checks of what is on the device: offsets, lengths, entries and pages (`FLY_CHECK_INPUTS`).

The rules are those of `device_rules`. For tensors of the CPU numpy evaluates them, always where the emulator's
checks are on. For those of a GPU it is a debug mode: a kernel evaluates them and writes what it finds into a report,
which the host waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch

import fly
from fly import config
from fly.errors import UnsupportedError

from ..arguments.checks import Checks, has_memory
from ..problem.block_mask import BlockMask
from .device_rules import RULES, Finding, Rule

THREADS = 256
MAX_BLOCKS = 64
FIELDS = 6  # of a report's row: rule, place, and `at`, value, low, high of `Finding`
NOTHING_FOUND = 2**31 - 1  # the rule of a thread that found nothing
OPEN = 2**62  # a bound that is none
# tensors that say where a call's sequences lie; of attention, lists of a block mask are looked at too
OF_ATTENTION = (
    *("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv"),
    *("cache_leftpad", "kv_batch_idx", "block_table"),
)
OF_APPEND = (
    *("cu_seqlens_q", "cu_seqlens_k_new"),
    *("cache_seqlens", "cache_leftpad", "cache_batch_idx", "block_table"),
)


def on(device: torch.device) -> bool:
    """Whether calls with tensors on `device` are checked: `FLY_CHECK_INPUTS`, else where the emulator checks too."""
    asked = config.CHECK_INPUTS.get()
    return device.type == "cpu" and config.EMULATOR_CHECKS.get() if asked is None else asked


@dataclass(frozen=True)
class Traced:
    """`Inputs` in a kernel: i64 values."""

    values: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """See `Inputs`."""
        return name in self.values

    def number(self, name: str) -> fly.Value:
        """See `Inputs`."""
        number: fly.Value = self.values[name].to(fly.i64)
        return number

    def load(self, name: str, *index: Any) -> fly.Value:
        """See `Inputs`."""
        element: fly.Value = self.values[name].load(*index).to(fly.i64)
        return element

    def smaller(self, a: Any, b: Any) -> fly.Value:
        """See `Inputs`."""
        return fly.minimum(a, b)

    def existing(self, index: Any, count: Any) -> fly.Value:
        """See `Inputs`."""
        return fly.minimum(fly.maximum(index, 0), count - 1)


@dataclass(frozen=True)
class OnHost:
    """`Inputs` of tensors on the CPU: int64 arrays, an element a place."""

    tensors: Mapping[str, np.ndarray]
    numbers: Mapping[str, int]

    def has(self, name: str) -> bool:
        """See `Inputs`."""
        return name in self.tensors or name in self.numbers

    def number(self, name: str) -> int:
        """See `Inputs`."""
        return self.numbers[name]

    def load(self, name: str, *index: Any) -> np.ndarray:
        """See `Inputs`."""
        elements: np.ndarray = self.tensors[name][index].astype(np.int64)
        return elements

    def smaller(self, a: Any, b: Any) -> Any:
        """See `Inputs`."""
        return np.minimum(a, b)

    def existing(self, index: Any, count: Any) -> Any:
        """See `Inputs`."""
        return np.clip(index, 0, count - 1)


@fly.kernel
def check_inputs(report: fly.Tensor, *operands: fly.Operand, names: tuple[str, ...], rules: str) -> None:
    """The first broken rule that each thread finds, among the places that it looks at.

    report: (threads of the grid, `FIELDS`) i64; a row's rule is `NOTHING_FOUND` where there is none. operands: the
    tensors and numbers of `names`. rules: which of `RULES`. Grid: any number of blocks; places go round the threads.
    """
    inputs = Traced(dict(zip(names, operands, strict=True)))
    (size, _, _) = fly.block_dim()
    thread, threads = fly.block_id.x * size + fly.thread_id.x, fly.grid_dim.x * size
    found = (fly.i64(NOTHING_FOUND), *[fly.i64(0) for _ in range(FIELDS - 1)])
    for number, rule in enumerate(RULES[rules]):
        if not rule.applies(inputs):
            continue
        columns = fly.i64(1) if rule.columns is None else inputs.number(rule.columns)
        places = inputs.number(rule.rows) * columns
        # as many rounds for every thread; past the end, the last place again
        for first, before in (loop := fly.range(0, places, threads, carry=found)):
            place = fly.minimum(first + thread, places - 1)
            row = place // columns
            column = place - row * columns
            value, low, high = rule.bounds(inputs, row, column)
            at, high = row if rule.at is None else rule.at(inputs, row), OPEN if high is None else high
            broken = (value < low) | (value > high)
            if rule.used is not None:
                broken = broken & rule.used(inputs, row, column)
            broken = broken & (before[0] == NOTHING_FOUND)
            here = (number, place, at, value, low, high)
            loop.next(*[fly.select(broken, now, then) for now, then in zip(here, before, strict=True)])
        found = loop.results
    for field, value in enumerate(found):
        report.store(value, thread, field)


def find_on_host(rules: str, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int]) -> Finding | None:
    """The first broken rule of a call whose tensors are on the CPU, at its first place.

    None of a call with a tensor that has no memory of its own: what such a call lacks is for other checks to say.
    """
    if not all(has_memory(type(x)) for x in tensors.values()):
        return None
    inputs = OnHost({name: tensor.numpy() for name, tensor in tensors.items()}, numbers)
    for rule in RULES[rules]:
        if not rule.applies(inputs):
            continue
        columns = 1 if rule.columns is None else numbers[rule.columns]
        place = np.arange(numbers[rule.rows] * columns)
        if not len(place):
            continue
        row, column = np.divmod(place, columns)
        value, low, high = rule.bounds(inputs, row, column)
        at, high = row if rule.at is None else rule.at(inputs, row), OPEN if high is None else high
        broken = (value < low) | (value > high)
        if rule.used is not None:
            broken = broken & rule.used(inputs, row, column)
        if broken.any():
            first = int(broken.argmax())
            of = partial(_element, place.shape, first)
            return Finding(rule, of(row), of(column), of(at), of(value), of(low), of(high), numbers)
    return None


def _element(shape: tuple[int, ...], index: int, numbers: Any) -> int:
    """Of one number, or of an array of this shape."""
    return int(np.broadcast_to(numbers, shape)[index])


def find_on_device(
    rules: str, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, int], stream: int | None = None
) -> Finding | None:
    """The same by `check_inputs`, for tensors of any device; waits for the current stream, which is `stream`."""
    unread: dict[str, Any] = dict.fromkeys(tensors)
    inputs = OnHost(unread, numbers)
    places = [_places(rule, numbers) for rule in RULES[rules] if rule.applies(inputs)]
    blocks = min(MAX_BLOCKS, -(-max(places, default=0) // THREADS))
    if not blocks:
        return None
    device = next(iter(tensors.values())).device
    report = torch.empty((blocks * THREADS, FIELDS), dtype=torch.int64, device=device)
    operands = (*tensors.values(), *numbers.values())
    check_inputs[blocks, THREADS](report, *operands, stream=stream, names=(*tensors, *numbers), rules=rules)
    number, place, at, value, low, high = min(map(tuple, report.tolist()))
    if number == NOTHING_FOUND:
        return None
    rule = RULES[rules][number]
    row, column = divmod(place, 1 if rule.columns is None else numbers[rule.columns])
    return Finding(rule, row, column, at, value, low, high, numbers)


def _places(rule: Rule, numbers: Mapping[str, int]) -> int:
    return numbers[rule.rows] * (1 if rule.columns is None else numbers[rule.columns])


def check(
    checks: Checks, rules: str, tensors: Mapping[str, Any], numbers: Mapping[str, Any], stream: int | None = None
) -> None:
    """Check a call of the function of `checks`, on the current stream, which is `stream`; None stands for nothing.

    Raises:
        ArgumentError: a rule is broken; it names the argument, the entry, its value and what is accepted.
        UnsupportedError: the call is captured into a graph, which the report cannot be read from.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    known = {name: number for name, number in numbers.items() if number is not None}
    if next(iter(given.values())).device.type == "cpu":
        finding = find_on_host(rules, given, known)
    else:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{checks.function}: FLY_CHECK_INPUTS=1 reads a report back from the device, which no graph can "
                "capture: check calls before the capture, and capture with FLY_CHECK_INPUTS=0"
            )
        finding = find_on_device(rules, given, known, stream)
    if finding is not None:
        checks.fail(str(finding))


def _pages(cache: torch.Tensor, table: torch.Tensor) -> dict[str, int]:
    """Numbers of keys in pages; a table without rows has no column to look at."""
    rows, pages = table.shape
    return {
        "entries": rows,
        "pages": cache.shape[0],
        "page_size": cache.shape[1],
        "table_pages": pages,
        "table_columns": pages if rows else 0,
    }


def check_attention(
    checks: Checks,
    q: torch.Tensor,
    k: torch.Tensor,
    given: Mapping[str, torch.Tensor | None],
    block_mask: BlockMask | None,
    longest: tuple[int | None, int | None],
    stream: int | None,
) -> None:
    """Check a call of flash attention whose shapes are right: its tensors by name, (max_seqlen_q, max_seqlen_kv).

    Raises as `check` does.
    """
    tensors = {name: given.get(name) for name in OF_ATTENTION}
    table, offsets, packed_keys = tensors["block_table"], tensors["cu_seqlens_q"], k.dim() == 3
    numbers: dict[str, int | None] = {
        "batch": q.shape[0] if offsets is None else len(offsets) - 1,
        "queries" if offsets is None else "total_q": q.shape[-3],
        "total_kv" if packed_keys else "entries": k.shape[0],  # of pages, `_pages` tells the entries
        "max_seqlen_q": longest[0],
        "max_seqlen_kv": longest[1],
    }
    if table is not None:
        numbers |= _pages(k, table)
    elif not packed_keys:
        numbers["keys"] = k.shape[1]
    lists: dict[str, torch.Tensor] = {}
    if block_mask is not None:
        numbers["key_blocks"] = -(-k.shape[1] // block_mask.BLOCK_SIZE[1])
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        lists = dict(zip(names, block_mask.tensors))
        for counts, indices in zip(names[::2], names[1::2]):
            if counts not in lists:
                continue
            _, heads, blocks = lists[counts].shape
            numbers |= {f"{counts} heads": heads, f"{counts} blocks": blocks, f"{counts} rows": lists[counts].numel()}
            numbers[f"{indices} columns"] = lists[indices].shape[-1]
            lists[counts], lists[indices] = lists[counts].flatten(), lists[indices].flatten(0, -2)
    check(checks, "attention", {**tensors, **lists}, numbers, stream)


def check_append(
    checks: Checks,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    given: Mapping[str, Any],
    each_query: bool,
) -> None:
    """Check an append to a cache whose shapes are right: its tensors by name, and what their bounds are.

    q and k are (B, S, heads, D), or packed (total, heads, D) where there are `cu_seqlens_q` and `cu_seqlens_k_new`.
    Raises as `check` does.
    """
    tensors = {name: given.get(name) for name in OF_APPEND}
    table = tensors["block_table"]
    numbers: dict[str, int] = {
        "batch": len(cast(torch.Tensor, tensors["cache_seqlens"])),
        "queries" if q.dim() == 4 else "total_q": q.shape[-3],
        "new" if k.dim() == 4 else "total_new": k.shape[-3],
    }
    if table is not None:
        numbers |= _pages(k_cache, table)
    else:
        numbers |= {"entries": k_cache.shape[0], "keys": k_cache.shape[1]}
    if k.shape[-3]:
        numbers["writes"] = 1
    if cos is not None:
        numbers |= {"positions": cos.shape[0]} | ({"each_query": 1} if each_query else {})
    check(checks, "append", tensors, numbers)
