"""The process-wide MLIR context, and the trace that is being built on this thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fly.errors import TraceError, author_frame
from fly.ir.mlir import ir
from fly.locks import lock_of_process

# MLIR objects of one context may not be built from two threads at once; every trace and every pass holds this.
LOCK = lock_of_process()

_active = threading.local()
_made: list[ir.Context] = []
_making = threading.Lock()  # not `LOCK`: what asks for the context first may hold a lock that a trace waits for


def context() -> ir.Context:
    """The one MLIR context, with the `fly` dialect loaded."""
    if not _made:
        from fly.ir import dialect

        with _making:
            if not _made:  # two threads that compile first would each have one, and mix what is of both
                ctx = ir.Context()
                ctx.enable_multithreading(False)
                dialect.load(ctx)
                _made.append(ctx)
    return _made[0]


@functools.cache
def _location(file: str, line: int) -> ir.Location:
    return ir.Location.file(file, line, 0, context())


@functools.cache
def unknown_location() -> ir.Location:
    """The location of operations that no author's line caused."""
    return ir.Location.unknown(context())


def caller_location() -> ir.Location:
    """The MLIR location of the author's line that is being traced."""
    frame = author_frame()
    return unknown_location() if frame is None else _location(frame.f_code.co_filename, frame.f_lineno)


class Trace:
    """One kernel being traced: its module, its target, and the run-time regions that are open.

    `target` is whatever the caller of the tracer passed; `fly.lang` reads instructions and limits from it.
    """

    def __init__(self, target: Any, block: tuple[int, int, int]):
        self.target = target
        self.block = block
        self.module = ir.Module.create(loc=unknown_location())
        self.open_regions: list[tuple[str, str]] = []  # what, and the author's file:line
        self.memo: dict[Any, Any] = {}
        self.rereads_ids = self.rereads_lanes = False  # see `fly.lang.ids.reread_ids`
        self.tapes: list[list[Any]] = []  # what is open to be differentiated: see `fly.ir.tape`


def current() -> Trace:
    """The trace being built on this thread.

    Raises:
        TraceError: no kernel is being traced.
    """
    trace: Trace | None = getattr(_active, "trace", None)
    if trace is None:
        raise TraceError("fly operations can only be used inside a function decorated with @fly.kernel")
    return trace


@contextmanager
def tracing(target: Any, block: tuple[int, int, int]) -> Iterator[Trace]:
    """A new `Trace` as the current one; MLIR's context is entered for the duration."""
    with LOCK, context():
        previous = getattr(_active, "trace", None)
        trace = _active.trace = Trace(target, block)
        try:
            yield trace
        finally:
            _active.trace = previous


def emit(
    name: str,
    operands: list[ir.Value],
    results: list[ir.Type],
    attributes: dict[str, ir.Attribute] | None = None,
    regions: int = 0,
) -> ir.Operation:
    """Append one operation at the insertion point, located at the author's line.

    Raises:
        TraceError: no kernel is being traced.
    """
    trace = current()
    op = ir.Operation.create(
        name,
        results=results,
        operands=operands,
        attributes=attributes,
        regions=regions,
        loc=caller_location(),
    )
    if results:
        for tape in trace.tapes:
            tape.append(op)
    return op
