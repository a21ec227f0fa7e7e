"""What offsets, lengths, entries and pages that live on the device must be: one list of rules for each function.

A rule says between which bounds a number of the caller's lies, for each sequence or each entry of a table. It is a
Python function of `Inputs`, so that numpy evaluates it for tensors of the CPU, and a kernel for those of a GPU
(`device_values`). Numbers have 64 bits: what is compared does not overflow.

A list is in order of what its rules rely on: of several broken rules the first one is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..arguments.callers import arg


class Inputs(Protocol):
    """What a rule reads of a call: int32 tensors and host numbers, by name."""

    def has(self, name: str) -> bool:
        """Whether the call has the tensor or number."""

    def number(self, name: str) -> Any:
        """A number that the host knows."""

    def load(self, name: str, *index: Any) -> Any:
        """An element of a tensor."""

    def smaller(self, a: Any, b: Any) -> Any:
        """The minimum of two numbers."""

    def existing(self, index: Any, count: Any) -> Any:
        """A number that should be one of `count`, cut to what exists."""


Bounds = tuple[Any, Any, Any]  # value, low, high; low ≤ value ≤ high, and high None leaves it open


@dataclass(frozen=True)
class Finding:
    """A broken rule: `value` at `row` and `column` is not from `low` to `high`; `numbers` are those of the call.

    `at`: the entry of the argument that has the value, the row's own by default.
    """

    rule: Rule
    row: int
    column: int
    at: int
    value: int
    low: int
    high: int
    numbers: Mapping[str, int]

    def __str__(self) -> str:
        return self.rule.message(self)

    def entry(self, name: str, why: str, *index: int | str) -> str:
        """ "`name[index]` is 70; accepted: 0 to 64, why"; the index is the row where none is given."""
        place = ", ".join(map(str, index or (self.row,)))
        return f"{arg(name)}[{place}] is {self.value}; accepted: {self.low} to {self.high}, {why}"

    @property
    def paged(self) -> bool:
        """Whether keys are in pages."""
        return "pages" in self.numbers

    @property
    def table_holds(self) -> str:
        """The capacity of a sequence's pages in words."""
        pages, size = self.numbers["table_pages"], self.numbers["page_size"]
        return f"{arg('block_table')}'s {pages} pages of {size} keys hold"


@dataclass(frozen=True)
class Rule:
    """`bounds(inputs, row, column)` hold at every place that counts.

    needs: the tensors and numbers without which there is nothing to check. rows, columns: how many places there are
    to look at, by the names of numbers; without `columns`, one a row. used: which of them count, by default all. at:
    the entry of the argument that is looked at, by default `row`.
    """

    needs: tuple[str, ...]
    bounds: Callable[[Inputs, Any, Any], Bounds]
    message: Callable[[Finding], str]
    rows: str = "batch"
    columns: str | None = None
    used: Callable[[Inputs, Any, Any], Any] | None = None
    at: Callable[[Inputs, Any], Any] | None = None

    def applies(self, inputs: Inputs) -> bool:
        """Whether the call has what the rule is about."""
        return all(map(inputs.has, self.needs))


def _tokens(x: Inputs, offsets: str, b: Any) -> Any:
    """Of packed sequence b."""
    return x.load(offsets, b + 1) - x.load(offsets, b)


def _queries(x: Inputs, b: Any) -> Any:
    """Queries that sequence b has."""
    return _tokens(x, "cu_seqlens_q", b) if x.has("cu_seqlens_q") else x.number("queries")


def _queries_in_use(x: Inputs, b: Any) -> Any:
    queries = _queries(x, b)
    return x.smaller(x.load("seqused_q", b), queries) if x.has("seqused_q") else queries


def _room(x: Inputs, b: Any) -> Any:
    """Keys that there is memory for in sequence b."""
    if x.has("block_table"):
        return x.number("table_pages") * x.number("page_size")
    return _tokens(x, "cu_seqlens_kv", b) if x.has("cu_seqlens_kv") else x.number("keys")


def _keys(x: Inputs, b: Any) -> Any:
    """Keys of sequence b that count."""
    keys = _room(x, b)
    if x.has("block_table") and x.has("cu_seqlens_kv"):
        keys = x.smaller(_tokens(x, "cu_seqlens_kv", b), keys)
    return x.smaller(x.load("seqused_kv", b), keys) if x.has("seqused_kv") else keys


def _offset_rules(offsets: str, total: str, tensor: str) -> tuple[Rule, ...]:
    """Of the tokens of a packed `tensor`, `total` of them; lengths in pages have none, and may start at any."""

    def bounds(x: Inputs, b: Any, _: Any) -> Bounds:
        return x.load(offsets, b + 1), x.load(offsets, b), x.number(total) if x.has(total) else None

    def message(f: Finding) -> str:
        this = f"{arg(offsets)}[{f.row + 1}] is {f.value}"
        if f.value < f.low:
            return f"{this}, less than {arg(offsets)}[{f.row}], which is {f.low}: offsets do not decrease"
        return f"{this}; accepted: up to {f.high}, the tokens of {arg(tensor)}"

    return (
        Rule(
            (offsets, total),
            lambda x, b, _: (x.load(offsets, b * 0), 0, 0),
            lambda f: f"{arg(offsets)}[0] is {f.value}: the first sequence starts at 0",
        ),
        Rule((offsets,), bounds, message),
    )


def _longest(name: str, needs: tuple[str, ...], length: Callable[[Inputs, Any], Any], tokens: str) -> Rule:
    """No sequence is longer than the caller says."""
    return Rule(
        (name, *needs),
        lambda x, b, _: (length(x, b), 0, x.number(name)),
        lambda f: f"{arg(name)} is {f.high}, but sequence {f.row} has {f.value} {tokens}",
    )


def _cache_rules(
    entries: str,
    first: Callable[[Inputs, Any], Any],
    end: Callable[[Inputs, Any], Any],
    needs: tuple[str, ...] = (),
    counts: Callable[[Inputs, Any, Any], Any] | None = None,
) -> tuple[Rule, Rule]:
    """Which entry of the cache, or row of the table, belongs to a sequence, and where its row says that keys are.

    Entries of the table for keys from `first` to `end` of a sequence are pages. `counts`: the sequences that do.
    """

    def row(x: Inputs, b: Any) -> Any:
        return x.existing(x.load(entries, b), x.number("entries")) if x.has(entries) else b

    def used(x: Inputs, b: Any, column: Any) -> Any:
        begin, size = column * x.number("page_size"), x.number("page_size")
        has_keys = (begin < end(x, b)) & (begin + size > first(x, b))
        return has_keys if counts is None else has_keys & counts(x, b, column)

    def entry_message(f: Finding) -> str:
        return f.entry(entries, f"the rows of {arg('block_table')}" if f.paged else "the entries of the cache")

    def page_message(f: Finding) -> str:
        why = f"the pages that there are, as sequence {f.row} has keys there"
        return f.entry("block_table", why, f.at, f.column)

    return (
        Rule(
            (entries, *needs),
            lambda x, b, _: (x.load(entries, b), 0, x.number("entries") - 1),
            entry_message,
            used=counts,
        ),
        Rule(
            ("block_table", *needs),
            lambda x, b, column: (x.load("block_table", row(x, b), column), 0, x.number("pages") - 1),
            page_message,
            columns="table_columns",
            used=used,
            at=row,
        ),
    )


def _block_rules(counts: str, indices: str) -> tuple[Rule, ...]:
    """Of one pair of a block mask's lists; the names are `block_mask.BlockMask`'s."""
    rows, columns = f"{counts} rows", f"{indices} columns"

    def place(f: Finding) -> tuple[int, int, int]:
        heads, blocks = f.numbers[f"{counts} heads"], f.numbers[f"{counts} blocks"]
        return f.row // blocks // heads, f.row // blocks % heads, f.row % blocks

    return (
        Rule(
            (counts,),
            lambda x, row, _: (x.load(counts, row), 0, x.number(columns)),
            lambda f: f.entry(f"block_mask.{counts}", f"the entries of {indices}", *place(f)),
            rows=rows,
        ),
        Rule(
            (counts,),
            lambda x, row, column: (x.load(indices, row, column), 0, x.number("key_blocks") - 1),
            lambda f: f.entry(f"block_mask.{indices}", "the blocks of keys", *place(f), f.column),
            rows=rows,
            columns=columns,
            used=lambda x, row, column: column < x.load(counts, row),
        ),
    )


def _used_message(f: Finding) -> str:
    room = f"what {f.table_holds}" if f.paged else f"the keys of sequence {f.row}"
    return f.entry("seqused_kv", room)


ATTENTION = (
    *_offset_rules("cu_seqlens_q", "total_q", "q"),
    *_offset_rules("cu_seqlens_kv", "total_kv", "k"),
    Rule(
        ("cu_seqlens_kv", "block_table"),
        lambda x, b, _: (x.load("cu_seqlens_kv", b * 0), 0, None),
        lambda f: f"{arg('cu_seqlens_kv')}[0] is {f.value}: offsets are not negative",
    ),
    Rule(
        ("seqused_q",),
        lambda x, b, _: (x.load("seqused_q", b), 0, _queries(x, b)),
        lambda f: f.entry("seqused_q", f"the queries of sequence {f.row}"),
    ),
    Rule(("seqused_kv",), lambda x, b, _: (x.load("seqused_kv", b), 0, _room(x, b)), _used_message),
    Rule(
        ("cu_seqlens_kv", "block_table"),
        lambda x, b, _: (_tokens(x, "cu_seqlens_kv", b), 0, _room(x, b)),
        lambda f: (
            f"sequence {f.row} has {f.value} keys by {arg('cu_seqlens_kv')}, more than the {f.high} that "
            f"{f.table_holds}"
        ),
    ),
    _longest("max_seqlen_q", ("cu_seqlens_q",), _queries_in_use, "queries"),
    _longest("max_seqlen_kv", (), _keys, "keys"),
    Rule(
        ("cache_leftpad",),
        lambda x, b, _: (x.load("cache_leftpad", b), 0, _keys(x, b)),
        lambda f: f.entry("cache_leftpad", f"the keys of sequence {f.row}"),
    ),
    *_cache_rules("kv_batch_idx", lambda x, b: x.load("cache_leftpad", b) if x.has("cache_leftpad") else 0, _keys),
    *_block_rules("kv_num_blocks", "kv_indices"),
    *_block_rules("full_kv_num_blocks", "full_kv_indices"),
)


def _length(x: Inputs, b: Any) -> Any:
    return x.load("cache_seqlens", b)


def _new(x: Inputs, b: Any) -> Any:
    """New keys of sequence b."""
    return _tokens(x, "cu_seqlens_k_new", b) if x.has("cu_seqlens_k_new") else x.number("new")


def _with_new(x: Inputs, b: Any) -> Any:
    return _length(x, b) + _new(x, b)


def _rotated(x: Inputs, b: Any) -> Any:
    """How many positions from its length on sequence b has something at that is rotated."""
    queries = _queries(x, b)
    queries = queries if x.has("each_query") else x.smaller(queries, 1)
    return -x.smaller(-queries, -_new(x, b))


def _is_a_sequence(x: Inputs, b: Any, _: Any) -> Any:
    """Length and entry −1 together are none: `cache.packed` says so of tokens outside of all sequences."""
    length = _length(x, b)
    return (length != -1) | (x.load("cache_batch_idx", b) != -1) if x.has("cache_batch_idx") else length == length


def _full_message(f: Finding) -> str:
    numbers = f.numbers
    holds = numbers["table_pages"] * numbers["page_size"] if f.paged else numbers["keys"]
    room = f.table_holds if f.paged else f"an entry of {arg('k_cache')} holds"
    new = holds - f.high
    keys = "new key" if new == 1 else "new keys"
    return (
        f"{arg('cache_seqlens')}[{f.row}] is {f.value}; with {new} {keys} {f.value + new} are more than the {holds} "
        f"that {room}"
    )


def _rotary_message(f: Finding) -> str:
    rows = f.numbers["positions"]
    last = f.value + rows - f.high - 1
    return (
        f"{arg('cache_seqlens')}[{f.row}] is {f.value}; what is rotated reaches position {last}, and "
        f"{arg('rotary_cos')} has {rows} rows"
    )


# "writes" is there if there are new keys: nothing else reaches the cache
APPEND = (
    *_offset_rules("cu_seqlens_q", "total_q", "q"),
    *_offset_rules("cu_seqlens_k_new", "total_new", "k"),
    Rule(
        ("cache_seqlens",),
        lambda x, b, _: (_length(x, b), 0, None),
        lambda f: f"{arg('cache_seqlens')}[{f.row}] is {f.value}; accepted: 0 or more",
        used=_is_a_sequence,
    ),
    Rule(
        ("cache_seqlens", "writes"),
        lambda x, b, _: (_length(x, b), -1, _room(x, b) - _new(x, b)),
        _full_message,
        used=_is_a_sequence,
    ),
    Rule(
        ("cache_seqlens", "positions"),
        lambda x, b, _: (_length(x, b), -1, x.number("positions") - _rotated(x, b)),
        _rotary_message,
        used=_is_a_sequence,
    ),
    Rule(
        ("cache_leftpad",),
        lambda x, b, _: (x.load("cache_leftpad", b), 0, _with_new(x, b)),
        lambda f: f.entry("cache_leftpad", f"the keys of sequence {f.row}"),
    ),
    *_cache_rules("cache_batch_idx", _length, _with_new, ("writes",), _is_a_sequence),
)

RULES: Mapping[str, tuple[Rule, ...]] = {"attention": ATTENTION, "append": APPEND}
