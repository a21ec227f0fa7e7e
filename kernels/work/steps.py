"""Kernels bound to a call's tensors by name, one after the other; a later call only patches addresses.

A kernel takes what its parameters name among a call's `Tensors`, and which addresses a call patches follows from the
same names. Several kernels of one launch share the tensors; what one of them leaves for the next is a part of the
launch's workspace, under a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fly.runtime.compile import compile_to_launch
from fly.runtime.prepared import Prepared, bind, picker, together

from ..problem.contract import Launch, Tensors

WORKSPACE_ALIGNMENT = 256  # of its parts, in bytes
PARTIAL_RESULTS = "partial_out"  # the part with the results of parts of the keys


def aligned(nbytes: int) -> int:
    """So many bytes, rounded up to where the next part of a workspace may begin."""
    return nbytes + -nbytes % WORKSPACE_ALIGNMENT


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """A kernel with everything bound but addresses: `prepared` is launched with those of what it `takes`."""

    prepared: Prepared
    takes: tuple[str, ...]


def bind_kernel(
    kernel: Any,
    grid: int | Sequence[int],
    threads: int,
    arguments: Mapping[str, Any],
    statics: Mapping[str, Any],
    *,
    called: Mapping[str, str] | None = None,
    operands: Sequence[str] = (),
) -> BoundKernel:
    """Compile and bind `kernel`, a `fly.kernel`, to what its parameters name among `arguments`.

    `arguments`: tensors, tensor maps and numbers; what is not among them is None. `called`: the names there of
    parameters that have another. `operands`: the names of what it takes after its parameters.

    Raises as `fly.runtime.launch.launch` does.
    """
    called = called or {}
    names = (*(called.get(p.name, p.name) for p in kernel.signature.parameters), *operands)
    values = tuple(arguments.get(name) for name in names)
    bound = bind(kernel, grid, threads, values, statics, compile_to_launch)
    takes = tuple(n for n, value in zip(names, values) if value is not None and not isinstance(value, int | float))
    return BoundKernel(bound, takes)


@dataclass(frozen=True, slots=True)
class Steps:
    """The kernels of a launch, in order on one stream.

    `parts`: where parts of the workspace begin, in bytes, by name, and `nbytes`: its size. `of_stream`: what the
    stream decides the address of. `splits`: as of `Launch`.
    """

    kernels: tuple[BoundKernel, ...]
    parts: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0
    of_stream: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    splits: int = 0

    def behind(self, kernel: BoundKernel, part: str, nbytes: int) -> Steps:
        """With one more kernel before them, which leaves `part` of so many bytes at the workspace's beginning."""
        return replace(self.beside(part, nbytes), kernels=(kernel, *self.kernels))

    def beside(self, part: str, nbytes: int) -> Steps:
        """With one more `part` of so many bytes at the workspace's beginning."""
        start = aligned(nbytes)
        parts = {part: 0} | {name: start + place for name, place in self.parts.items()}
        return replace(self, parts=parts, nbytes=start + self.nbytes)

    def launch(self) -> Launch:
        """All of them as one launch, which takes from a call's tensors what the kernels take and it does not make."""
        current_stream = self.kernels[0].prepared.entry.current_stream
        parts, of_stream = tuple(self.parts.values()), tuple(self.of_stream.values())
        made = (*self.parts, *self.of_stream)
        given = tuple(dict.fromkeys(name for kernel in self.kernels for name in kernel.takes if name not in made))
        order = {name: i for i, name in enumerate((*given, *made))}
        takes = [[order[name] for name in kernel.takes] for kernel in self.kernels]
        launch = together([kernel.prepared for kernel in self.kernels], takes, len(order))
        names = (*given, "workspace") if parts else given
        take = picker(names)

        def at(addresses: list[int], stream: int | None) -> None:
            if stream is None:
                stream = current_stream()
            if parts:
                addresses += map(addresses.pop().__add__, parts)
            for address in of_stream:
                addresses.append(address(stream))
            launch(addresses, stream)

        def run(tensors: Tensors, stream: int | None) -> None:
            at([tensor.data_ptr() for tensor in take(tensors)], stream)

        return Launch(run, self.nbytes, at, names, self.splits, self.parts.get(PARTIAL_RESULTS, 0))
