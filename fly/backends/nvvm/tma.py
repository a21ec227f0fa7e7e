"""Bulk tensor copies (TMA): boxes of a tensor to shared memory and back, through tensor maps.

PTX ISA, "cp.async.bulk.tensor". Coordinates are in elements, in the tensor's order; what lies outside of the
tensor reads as zero and is not written. The last coordinate is a multiple of 16 bytes: at any other the engine ends
the kernel with an illegal instruction (seen on an H200, not in the manual). Each function raises a ShapeError for a
wrong number of coordinates and a DTypeError for ones that are no i32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fly.backends.nvvm.emit import as_i32, operation, shared_address
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
    operation("tma_prefetch", [tensor_map.pointer])


def load(
    tensor_map: TensorMap, destination: Pointer, coordinates: Sequence[Any], barrier: Value, blocks: int = 1
) -> None:
    """One thread starts the copy of a box to shared memory (aligned to 128 bytes); its bytes arrive at `barrier`.

    `blocks`: of a cluster, all of which get the box, at this address and barrier of their own.
    """
    at = _coordinates(tensor_map, coordinates)
    operands = [shared_address(destination), tensor_map.pointer, as_i32(barrier, "barrier"), *at]
    if blocks == 1:
        operation("tma_load", operands)
    else:
        operation("tma_load_to_all", operands, attributes={"blocks": blocks})


def store(tensor_map: TensorMap, source: Pointer, coordinates: Sequence[Any]) -> None:
    """One thread starts the copy of a box from shared memory; see `commit`, `wait` and `wait_read`."""
    at = _coordinates(tensor_map, coordinates)
    operation("tma_store", [shared_address(source), tensor_map.pointer, *at])


def commit() -> None:
    """Close this thread's group of stores."""
    operation("tma_commit")


def wait_read(newer: int = 0) -> None:
    """Until all but the `newer` last groups of this thread have read their shared memory."""
    operation("tma_wait_read", attributes={"newer": newer})


def wait(newer: int = 0) -> None:
    """Until they have been written: this thread, and who acquires what it releases from here on, may read them."""
    operation("tma_wait", attributes={"newer": newer})
