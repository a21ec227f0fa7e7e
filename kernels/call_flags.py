"""A call that is described by sizes and names: by flags of the command line, or by an entry of a file.

Imports nothing heavy: every command of fly's command line loads this module.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from fly.errors import ArgumentError

from .problem.catalogue import BY_NAME
from .problem.contract import DQ_SUMS, Request

FLAGS = tuple(name for name in BY_NAME if name not in ("packed", "split_kv", "debug_counts"))
BYTES = {"bf16": 2, "f16": 2, "f8e4m3": 1, "f8e4m3fnuz": 1, "f8e5m2": 1}
# flags that describe a call: (name, default, help)
SIZES = (
    ("head_dim", 128, "elements of a head"),
    ("head_dim_v", None, "elements of a head of v and out (head_dim)"),
    ("batch", 1, "sequences"),
    ("seq_len", 1024, "queries of the longest sequence"),
    ("seq_len_kv", None, "keys of the longest sequence (seq_len)"),
    ("num_heads", 16, "query heads"),
    ("num_kv_heads", None, "key heads (num_heads)"),
    ("num_kv_splits", 1, "parts of the keys, 0 for automatic"),
    ("alignment", 16, "bytes that divide addresses and strides"),
)
# of those that have another range than 1 to 2^31 - 1
RANGES = {"num_kv_splits": (0, 64), "alignment": (1, 16)}  # MAX_SPLITS, whose module is heavy


def _size(name: str) -> Callable[[str], int]:
    """Reads a flag of `SIZES`."""
    least, most = RANGES.get(name, (1, 2**31 - 1))

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 10 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return read


def add_call_flags(parser: Any) -> None:
    """Add `CALL_FLAGS`, by which `paths` and `inspect` are told of a call, to an argparse parser or group."""
    for name, default, meaning in SIZES:
        shown = meaning if default is None else f"{meaning} ({default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=_size(name), metavar="N", help=shown)
    parser.add_argument("--dtype", choices=tuple(BYTES), help="(bf16)")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="(causal)")
    parser.add_argument("--packed", action="store_true", default=None, help="packed sequences (cu_seqlens)")
    parser.add_argument("--debug-counts", action="store_true", default=None, help="count rescales")
    parser.add_argument("--dq-accumulate", choices=DQ_SUMS, help=f"of the backward pass ({DQ_SUMS[0]})")
    parser.add_argument("--feature", action="append", choices=FLAGS, help="what else the call asks for")
    parser.add_argument("--tuning", action="append", metavar="NAME", help="a tuning option, such as waves_per_eu")


CALL_FLAGS = (
    *(name for name, *_ in SIZES),
    *("dtype", "causal", "packed", "debug_counts", "dq_accumulate", "feature", "tuning"),
)


def request_of(options: argparse.Namespace) -> Request | None:
    """The call that the flags describe; None when they describe none."""
    given = {name: value for name, value in vars(options).items() if name in CALL_FLAGS and value is not None}
    return call(given) if given else None


def call(given: Mapping[str, Any]) -> Request:
    """The call that these of `CALL_FLAGS` describe; what is not given has its default."""
    size: dict[str, Any] = {name: default for name, default, _ in SIZES} | dict(given)
    heads = size["num_heads"]
    kv_heads = heads if size["num_kv_heads"] is None else size["num_kv_heads"]
    keys = size["seq_len"] if size["seq_len_kv"] is None else size["seq_len_kv"]
    dtype = given.get("dtype", "bf16")
    wanted = {
        "packed": bool(given.get("packed")),
        "split_kv": size["num_kv_splits"] > 1,
        "debug_counts": bool(given.get("debug_counts")),
        **{name: name in given.get("feature", ()) for name in FLAGS},
    }
    if heads % kv_heads:
        raise ArgumentError(f"--num-heads {heads} with --num-kv-heads {kv_heads}; accepted: a multiple of it")
    row = size["head_dim"] * BYTES[dtype]
    return Request(
        head_dim=size["head_dim"],
        dtype=dtype,
        causal=given.get("causal", True),
        cross_seqlen=wanted["packed"] or keys != size["seq_len"],
        return_lse=False,
        batch=size["batch"],
        seq_len=size["seq_len"],
        seq_len_kv=keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        softmax_scale=1.0,
        num_kv_splits=size["num_kv_splits"],
        alignment=size["alignment"],
        kv_alignment=size["alignment"],
        q_pitch=heads * row,
        kv_pitch=kv_heads * row,
        features=tuple(name for name in BY_NAME if wanted[name]),
        tuning=dict.fromkeys(given.get("tuning", ()), True),
        head_dim_v=size["head_dim_v"],
        dq_accumulate=given.get("dq_accumulate", DQ_SUMS[0]),
        bias_by_query=wanted["bias"],
    )
