"""Calls whose offsets, lengths, entries and pages are right, and what makes them wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels import dispatch, flash_attn_interface
from kernels.cache import kv_cache
from kernels.cache.kv_cache import append_to_cache
from kernels.flash_attn_api import flash_attn_with_kvcache
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.block_mask import BlockMask
from kernels.problem.contract import Launch

HEADS, KV_HEADS, D = 4, 2, 64


def run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are checked, and then nothing is compiled or launched."""
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    monkeypatch.setattr(kv_cache, "_plans", {})
    launch = Launch(lambda tensors, stream: None)
    monkeypatch.setattr(dispatch, "prepare_function", lambda kernel: lambda tensors, request: launch)
    monkeypatch.setattr(kv_cache, "_prepare", lambda *_: None)


def numbers(*values: Any, device: str = "cpu") -> torch.Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def heads(*shape: int, device: str = "cpu") -> torch.Tensor:
    """(*shape, D) of 16-bit floats."""
    return torch.zeros((*shape, D), dtype=torch.bfloat16, device=device)


def packed(device: str = "cpu") -> dict[str, Any]:
    """Three packed sequences, one without queries, and tokens behind them."""
    return {
        "q": heads(48, HEADS, device=device),
        "k": heads(60, KV_HEADS, device=device),
        "v": heads(60, KV_HEADS, device=device),
        "cu_seqlens_q": numbers(0, 5, 5, 40, device=device),
        "cu_seqlens_kv": numbers(0, 20, 30, 57, device=device),
        "max_seqlen_q": 35,
        "max_seqlen_kv": 27,
        "seqused_q": numbers(5, 0, 34, device=device),
        "seqused_kv": numbers(0, 10, 27, device=device),
    }


def packed_whole(device: str = "cpu") -> dict[str, Any]:
    """The same with all tokens in use."""
    return packed(device) | {"seqused_q": None, "seqused_kv": None}


def dense(device: str = "cpu") -> dict[str, Any]:
    """Three sequences of a cache of four."""
    return {
        "q": heads(3, 8, HEADS, device=device),
        "k": heads(4, 40, KV_HEADS, device=device),
        "v": heads(4, 40, KV_HEADS, device=device),
        "seqused_q": numbers(8, 0, 3, device=device),
        "seqused_kv": numbers(40, 0, 7, device=device),
        "cache_leftpad": numbers(40, 0, 3, device=device),
        "kv_batch_idx": numbers(3, 0, 3, device=device),
    }


def table(device: str = "cpu") -> torch.Tensor:
    """Pages of three sequences with 64, 0 and 17 keys; what is behind them is none."""
    return numbers([9, 0, 3, 3], [-1, 10, 2**31 - 1, -(2**31)], [4, 5, -1, 10], device=device)


def paged(device: str = "cpu") -> dict[str, Any]:
    """Three sequences in ten pages of 16 keys."""
    return {
        "q": heads(3, 2, HEADS, device=device),
        "k": heads(10, 16, KV_HEADS, device=device),
        "v": heads(10, 16, KV_HEADS, device=device),
        "block_table": table(device),
        "seqused_kv": numbers(64, 0, 17, device=device),
    }


def paged_entries(device: str = "cpu") -> dict[str, Any]:
    """The same for two sequences in rows 2 and 0, with padding at the left that covers a whole page."""
    pages = table(device)
    pages[2, 0] = -1
    return paged(device) | {
        "q": heads(2, 2, HEADS, device=device),
        "block_table": pages,
        "seqused_kv": numbers(17, 64, device=device),
        "kv_batch_idx": numbers(2, 0, device=device),
        "cache_leftpad": numbers(16, 5, device=device),
    }


def packed_paged(device: str = "cpu") -> dict[str, Any]:
    """The same with packed queries; offsets tell lengths, and their first one nothing."""
    return paged(device) | {
        "q": heads(6, HEADS, device=device),
        "cu_seqlens_q": numbers(0, 1, 3, 6, device=device),
        "max_seqlen_q": 3,
        "seqused_kv": None,
        "cu_seqlens_kv": numbers(7, 71, 71, 88, device=device),
        "max_seqlen_kv": 64,
    }


def masked(device: str = "cpu") -> dict[str, Any]:
    """One mask for all sequences, lists by head: 3 blocks of queries, 4 of keys."""
    counts = numbers([[4, 0, 1], [2, 1, 0]], device=device)
    indices = numbers(
        [[[0, 1, 2, 3], [-1, 9, 9, 9], [3, 4, -5, 7]], [[3, 0, 4, 4], [2, -1, -1, -1], [9, 9, 9, 9]]], device=device
    )
    whole, places = numbers([[0, 1, 2]], device=device), numbers([[[9, 9], [2, 9], [1, 3]]], device=device)
    mask = BlockMask(counts, indices, whole, places, (128, 128), (300, 500), lambda b, h, query, key: query >= key)
    return {
        "q": heads(2, 300, 2, device=device),
        "k": heads(2, 500, KV_HEADS, device=device),
        "v": heads(2, 500, KV_HEADS, device=device),
        "block_mask": mask,
    }


def append(device: str = "cpu") -> dict[str, Any]:
    """Two new tokens for each of three sequences of a cache of four."""
    return {
        "q": heads(3, 3, HEADS, device=device),
        "k_cache": heads(4, 40, KV_HEADS, device=device),
        "v_cache": heads(4, 40, KV_HEADS, device=device),
        "k": heads(3, 2, KV_HEADS, device=device),
        "v": heads(3, 2, KV_HEADS, device=device),
        "cache_seqlens": numbers(0, 38, 7, device=device),
        "cache_leftpad": numbers(2, 0, 9, device=device),
        "cache_batch_idx": numbers(3, 0, 1, device=device),
    }


def append_entries(device: str = "cpu") -> dict[str, Any]:
    """The same into rows 4, 0 and 2 of a table of five."""
    rows = [[7, -1, -1, -1], [-1, -1, -1, -1], [-1, 0, -1, -1], [99, 99, 99, 99], [-1, -1, -1, 3]]
    return append_paged(device) | {
        "block_table": numbers(*rows, device=device),
        "cache_batch_idx": numbers(4, 0, 2, device=device),
    }


def append_rotated(device: str = "cpu") -> dict[str, Any]:
    """The same without left padding and entries, rotated."""
    tables = {name: heads(40, device=device)[:, :16] for name in ("rotary_cos", "rotary_sin")}
    lengths = {"cache_seqlens": numbers(0, 37, 7, device=device), "cache_leftpad": None, "cache_batch_idx": None}
    return append(device) | tables | lengths


def append_paged(device: str = "cpu") -> dict[str, Any]:
    """Two new tokens behind 62, 14 and 16 keys in ten pages of 16; pages that nothing is written to do not matter."""
    pages = numbers([-1, 99, -1, 3], [9, -1, -1, -1], [-1, 0, 10, 10], device=device)
    return {
        "q": heads(3, 3, HEADS, device=device),
        "k_cache": heads(10, 16, KV_HEADS, device=device),
        "v_cache": heads(10, 16, KV_HEADS, device=device),
        "k": heads(3, 2, KV_HEADS, device=device),
        "v": heads(3, 2, KV_HEADS, device=device),
        "cache_seqlens": numbers(62, 14, 16, device=device),
        "block_table": pages,
    }


def append_packed(device: str = "cpu") -> dict[str, Any]:
    """0, 2 and 1 new keys for three sequences with packed queries, and tokens of no sequence behind both."""
    tables = {name: heads(40, device=device)[:, :16] for name in ("rotary_cos", "rotary_sin")}
    return append(device) | {
        **tables,
        "q": heads(7, HEADS, device=device),
        "cu_seqlens_q": numbers(0, 1, 3, 6, device=device),
        "max_seqlen_q": 3,
        "k": heads(4, KV_HEADS, device=device),
        "v": heads(4, KV_HEADS, device=device),
        "cu_seqlens_k_new": numbers(0, 0, 2, 3, device=device),
        "cache_seqlens": numbers(39, 38, 7, device=device),
        "cache_leftpad": None,
        "causal": True,
    }


GOOD: dict[str, tuple[Callable[..., Any], Callable[[str], dict[str, Any]]]] = {
    "packed": (flydsl_flash_attn_func, packed),
    "packed whole": (flydsl_flash_attn_func, packed_whole),
    "dense": (flydsl_flash_attn_func, dense),
    "paged": (flydsl_flash_attn_func, paged),
    "paged entries": (flydsl_flash_attn_func, paged_entries),
    "packed paged": (flydsl_flash_attn_func, packed_paged),
    "masked": (flydsl_flash_attn_func, masked),
    "append": (append_to_cache, append),
    "append rotated": (append_to_cache, append_rotated),
    "append paged": (append_to_cache, append_paged),
    "append entries": (append_to_cache, append_entries),
    "append packed": (flash_attn_with_kvcache, append_packed),
}


@dataclass(frozen=True)
class Mistake:
    """A good call with one entry changed, and what the message says after the function's name."""

    call: str
    argument: str
    index: tuple[int, ...]
    value: int
    message: str

    def arguments(self, device: str = "cpu") -> tuple[Callable[..., Any], dict[str, Any]]:
        """(function, its arguments)."""
        function, good = GOOD[self.call]
        given = good(device)
        owner, _, name = self.argument.rpartition(".")
        tensor = getattr(given[owner], name) if owner else given[name]
        tensor[self.index] = self.value
        return function, given


_OFFSETS = "offsets do not decrease"
_HOLDS = "block_table's 4 pages of 16 keys hold"
_PAGES = "accepted: 0 to 9, the pages that there are, as sequence {} has keys there"
MISTAKES = {
    "first offset": Mistake(
        "packed", "cu_seqlens_q", (0,), 2, "cu_seqlens_q[0] is 2: the first sequence starts at 0"
    ),
    "negative offset": Mistake(
        "packed",
        "cu_seqlens_q",
        (1,),
        -3,
        f"cu_seqlens_q[1] is -3, less than cu_seqlens_q[0], which is 0: {_OFFSETS}",
    ),
    "decreasing offsets": Mistake(
        "packed",
        "cu_seqlens_q",
        (2,),
        4,
        f"cu_seqlens_q[2] is 4, less than cu_seqlens_q[1], which is 5: {_OFFSETS}",
    ),
    "offset past the tokens": Mistake(
        "packed", "cu_seqlens_q", (3,), 49, "cu_seqlens_q[3] is 49; accepted: up to 48, the tokens of q"
    ),
    "largest offset": Mistake(
        "packed",
        "cu_seqlens_q",
        (1,),
        2**31 - 1,
        "cu_seqlens_q[1] is 2147483647; accepted: up to 48, the tokens of q",
    ),
    "smallest offset": Mistake(
        "packed",
        "cu_seqlens_kv",
        (3,),
        -(2**31),
        f"cu_seqlens_kv[3] is -2147483648, less than cu_seqlens_kv[2], which is 30: {_OFFSETS}",
    ),
    "first key offset": Mistake(
        "packed", "cu_seqlens_kv", (0,), 1, "cu_seqlens_kv[0] is 1: the first sequence starts at 0"
    ),
    "key offset past the tokens": Mistake(
        "packed", "cu_seqlens_kv", (3,), 61, "cu_seqlens_kv[3] is 61; accepted: up to 60, the tokens of k"
    ),
    "more queries than the longest": Mistake(
        "packed whole", "cu_seqlens_q", (3,), 41, "max_seqlen_q is 35, but sequence 2 has 36 queries"
    ),
    "more keys than the longest": Mistake(
        "packed whole", "cu_seqlens_kv", (3,), 58, "max_seqlen_kv is 27, but sequence 2 has 28 keys"
    ),
    "queries in use past the sequence": Mistake(
        "packed", "seqused_q", (2,), 36, "seqused_q[2] is 36; accepted: 0 to 35, the queries of sequence 2"
    ),
    "negative packed length": Mistake(
        "packed", "seqused_kv", (0,), -1, "seqused_kv[0] is -1; accepted: 0 to 20, the keys of sequence 0"
    ),
    "keys in use past the sequence": Mistake(
        "packed", "seqused_kv", (1,), 11, "seqused_kv[1] is 11; accepted: 0 to 10, the keys of sequence 1"
    ),
    "queries in use past the tensor": Mistake(
        "dense", "seqused_q", (0,), 9, "seqused_q[0] is 9; accepted: 0 to 8, the queries of sequence 0"
    ),
    "keys in use past the tensor": Mistake(
        "dense", "seqused_kv", (0,), 41, "seqused_kv[0] is 41; accepted: 0 to 40, the keys of sequence 0"
    ),
    "padding past the length": Mistake(
        "dense", "cache_leftpad", (2,), 8, "cache_leftpad[2] is 8; accepted: 0 to 7, the keys of sequence 2"
    ),
    "negative padding": Mistake(
        "dense", "cache_leftpad", (1,), -1, "cache_leftpad[1] is -1; accepted: 0 to 0, the keys of sequence 1"
    ),
    "entry past the cache": Mistake(
        "dense", "kv_batch_idx", (2,), 4, "kv_batch_idx[2] is 4; accepted: 0 to 3, the entries of the cache"
    ),
    "negative entry": Mistake(
        "dense", "kv_batch_idx", (0,), -1, "kv_batch_idx[0] is -1; accepted: 0 to 3, the entries of the cache"
    ),
    "length past the table": Mistake(
        "paged", "seqused_kv", (0,), 65, f"seqused_kv[0] is 65; accepted: 0 to 64, what {_HOLDS}"
    ),
    "negative length of pages": Mistake(
        "paged", "seqused_kv", (2,), -7, f"seqused_kv[2] is -7; accepted: 0 to 64, what {_HOLDS}"
    ),
    "page that does not exist": Mistake(
        "paged", "block_table", (2, 1), 10, f"block_table[2, 1] is 10; {_PAGES.format(2)}"
    ),
    "negative page": Mistake("paged", "block_table", (0, 3), -1, f"block_table[0, 3] is -1; {_PAGES.format(0)}"),
    "length that reaches a page that does not exist": Mistake(
        "paged", "seqused_kv", (1,), 1, f"block_table[1, 0] is -1; {_PAGES.format(1)}"
    ),
    "page of another row": Mistake(
        "paged entries", "block_table", (0, 2), 12, f"block_table[0, 2] is 12; {_PAGES.format(1)}"
    ),
    "less padding than pages lack": Mistake(
        "paged entries", "cache_leftpad", (0,), 15, f"block_table[2, 0] is -1; {_PAGES.format(0)}"
    ),
    "row past the table": Mistake(
        "paged entries", "kv_batch_idx", (1,), 3, "kv_batch_idx[1] is 3; accepted: 0 to 2, the rows of block_table"
    ),
    "keys by offsets past the table": Mistake(
        "packed paged",
        "cu_seqlens_kv",
        (0,),
        6,
        f"sequence 0 has 65 keys by cu_seqlens_kv, more than the 64 that {_HOLDS}",
    ),
    "negative offset of pages": Mistake(
        "packed paged", "cu_seqlens_kv", (0,), -1, "cu_seqlens_kv[0] is -1: offsets are not negative"
    ),
    "decreasing lengths of pages": Mistake(
        "packed paged",
        "cu_seqlens_kv",
        (2,),
        70,
        f"cu_seqlens_kv[2] is 70, less than cu_seqlens_kv[1], which is 71: {_OFFSETS}",
    ),
    "page of packed queries": Mistake(
        "packed paged", "block_table", (2, 0), -9, f"block_table[2, 0] is -9; {_PAGES.format(2)}"
    ),
    "more blocks than listed": Mistake(
        "masked",
        "block_mask.kv_num_blocks",
        (0, 1, 2),
        5,
        "block_mask.kv_num_blocks[0, 1, 2] is 5; accepted: 0 to 4, the entries of kv_indices",
    ),
    "block that does not exist": Mistake(
        "masked",
        "block_mask.kv_indices",
        (0, 1, 0, 1),
        4,
        "block_mask.kv_indices[0, 1, 0, 1] is 4; accepted: 0 to 3, the blocks of keys",
    ),
    "fewer whole blocks than none": Mistake(
        "masked",
        "block_mask.full_kv_num_blocks",
        (0, 0, 1),
        -1,
        "block_mask.full_kv_num_blocks[0, 0, 1] is -1; accepted: 0 to 2, the entries of full_kv_indices",
    ),
    "whole block that does not exist": Mistake(
        "masked",
        "block_mask.full_kv_indices",
        (0, 0, 2, 1),
        -2,
        "block_mask.full_kv_indices[0, 0, 2, 1] is -2; accepted: 0 to 3, the blocks of keys",
    ),
    "full cache": Mistake(
        "append",
        "cache_seqlens",
        (1,),
        39,
        "cache_seqlens[1] is 39; with 2 new keys 41 are more than the 40 that an entry of k_cache holds",
    ),
    "largest length": Mistake(
        "append",
        "cache_seqlens",
        (0,),
        2**31 - 1,
        "cache_seqlens[0] is 2147483647; with 2 new keys 2147483649 are more than the 40 that an entry of k_cache "
        "holds",
    ),
    "negative length": Mistake("append", "cache_seqlens", (2,), -1, "cache_seqlens[2] is -1; accepted: 0 or more"),
    "padding past the new length": Mistake(
        "append", "cache_leftpad", (0,), 3, "cache_leftpad[0] is 3; accepted: 0 to 2, the keys of sequence 0"
    ),
    "entry past the cache to append to": Mistake(
        "append", "cache_batch_idx", (1,), 4, "cache_batch_idx[1] is 4; accepted: 0 to 3, the entries of the cache"
    ),
    "position past the tables": Mistake(
        "append rotated",
        "cache_seqlens",
        (1,),
        38,
        "cache_seqlens[1] is 38; what is rotated reaches position 40, and rotary_cos has 40 rows",
    ),
    "full table": Mistake(
        "append paged",
        "cache_seqlens",
        (0,),
        63,
        f"cache_seqlens[0] is 63; with 2 new keys 65 are more than the 64 that {_HOLDS}",
    ),
    "page to append to that does not exist": Mistake(
        "append paged", "block_table", (1, 0), 10, f"block_table[1, 0] is 10; {_PAGES.format(1)}"
    ),
    "page to append to in another row": Mistake(
        "append entries", "block_table", (4, 3), -1, f"block_table[4, 3] is -1; {_PAGES.format(0)}"
    ),
    "row past the table to append to": Mistake(
        "append entries",
        "cache_batch_idx",
        (2,),
        5,
        "cache_batch_idx[2] is 5; accepted: 0 to 4, the rows of block_table",
    ),
    "new keys over the end of a page": Mistake(
        "append paged", "cache_seqlens", (1,), 15, f"block_table[1, 1] is -1; {_PAGES.format(1)}"
    ),
    "first offset of packed queries": Mistake(
        "append packed", "cu_seqlens_q", (0,), 1, "cu_seqlens_q[0] is 1: the first sequence starts at 0"
    ),
    "offset past the packed queries": Mistake(
        "append packed", "cu_seqlens_q", (3,), 8, "cu_seqlens_q[3] is 8; accepted: up to 7, the tokens of q"
    ),
    "first offset of new keys": Mistake(
        "append packed", "cu_seqlens_k_new", (0,), -1, "cu_seqlens_k_new[0] is -1: the first sequence starts at 0"
    ),
    "decreasing offsets of new keys": Mistake(
        "append packed",
        "cu_seqlens_k_new",
        (3,),
        1,
        f"cu_seqlens_k_new[3] is 1, less than cu_seqlens_k_new[2], which is 2: {_OFFSETS}",
    ),
    "packed new keys of a full cache": Mistake(
        "append packed",
        "cache_seqlens",
        (1,),
        39,
        "cache_seqlens[1] is 39; with 2 new keys 41 are more than the 40 that an entry of k_cache holds",
    ),
    "packed queries past the tables": Mistake(
        "append packed",
        "cache_seqlens",
        (2,),
        38,
        "cache_seqlens[2] is 38; what is rotated reaches position 40, and rotary_cos has 40 rows",
    ),
}
