"""Bulk tensor copies (TMA): boxes of a tensor to shared memory and back, through tensor maps.

PTX ISA, "cp.async.bulk.tensor". Coordinates are in elements, in the tensor's order; what lies outside of the
tensor reads as zero and is not written. The last coordinate is a multiple of 16 bytes: at any other the engine ends
the kernel with an illegal instruction (seen on an H200, not in the manual). Each function raises a ShapeError for a
wrong number of coordinates and a DTypeError for ones that are no i32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fly.backends.nvvm.inline import as_i32, ptx, shared_address
from fly.errors import ShapeError
from fly.ir.memory import Pointer
from fly.ir.value import Value
from fly.lang.tensor_map import TensorMap


def _coordinates(tensor_map: TensorMap, coordinates: Sequence[Any]) -> list[Value]:
    rank = len(tensor_map.spec.box)
    if len(coordinates) != rank:
        raise ShapeError(f"{tensor_map!r} takes {rank} coordinates, not {len(coordinates)}")
    # the instruction takes the innermost dimension first
    return [as_i32(c, "coordinate") for c in reversed(coordinates)]


def prefetch(tensor_map: TensorMap) -> None:
    """Bring a tensor map into the cache that copies read it from."""
    ptx("prefetch.tensormap [$0];", "l", [tensor_map.pointer])


def load(tensor_map: TensorMap, destination: Pointer, coordinates: Sequence[Any], barrier: Value) -> None:
    """One thread starts the copy of a box to shared memory (aligned to 128 bytes); its bytes arrive at `barrier`."""
    at = _coordinates(tensor_map, coordinates)
    places = ", ".join(f"${3 + i}" for i in range(len(at)))
    ptx(
        f"cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$0], [$1, {{{places}}}], [$2];",
        ",".join(["r", "l", "r"] + ["r"] * len(at)),
        [shared_address(destination), tensor_map.pointer, as_i32(barrier, "barrier"), *at],
    )


def store(tensor_map: TensorMap, source: Pointer, coordinates: Sequence[Any]) -> None:
    """One thread starts the copy of a box from shared memory; see `commit` and `wait_read`."""
    at = _coordinates(tensor_map, coordinates)
    places = ", ".join(f"${2 + i}" for i in range(len(at)))
    ptx(
        f"cp.async.bulk.tensor.{len(at)}d.global.shared::cta.bulk_group [$1, {{{places}}}], [$0];",
        ",".join(["r", "l"] + ["r"] * len(at)),
        [shared_address(source), tensor_map.pointer, *at],
    )


def commit() -> None:
    """Close this thread's group of stores."""
    ptx("cp.async.bulk.commit_group;", "", [])


def wait_read(newer: int = 0) -> None:
    """Until all but the `newer` last groups of this thread have read their shared memory."""
    ptx(f"cp.async.bulk.wait_group.read {newer};", "", [])
