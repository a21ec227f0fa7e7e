"""`kernel[grid, block](...)` ends here: bind, specialise, load once, then pack and launch.

A GPU launch with a key that was seen before (dtypes, ranks, alignments, unit strides, devices, static values,
block) takes no lock and builds little more than the packed arguments.
"""

from __future__ import annotations

import functools
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fly.backends.artefact import Artefact
from fly.errors import ArgumentError, ArgumentTypeError, ArtefactError, LaunchError
from fly.lang.messages import LOG_FIELD
from fly.lang.signature import REQUIRED, Field, Signature, Spec, TensorSpec
from fly.runtime.arguments import Argument, collect, describe_all
from fly.runtime.device import CPU, Allocation, DeviceKey, Dim3, LoadedKernel, device_for
from fly.runtime.log import has_messages, load
from fly.runtime.packing import ArgumentSlot, check_block, dim3, offsets, packer
from fly.runtime.shown import shown


class KernelLike(Protocol):
    """What the launcher needs of a kernel, and that attributes can be set: `launcher` is this module's."""

    name: str
    signature: Signature


Compile = Callable[[Any, tuple[Spec, ...], dict[str, Any], str, Dim3], Artefact]
"""(kernel, specs, all static values, a device's `build`, block) -> artefact; called under the kernel's lock."""


@dataclass(frozen=True, slots=True)
class Entry:
    """All that launches with one key share."""

    kernel: LoadedKernel
    fields: tuple[Field, ...]
    written: tuple[str, ...] | None
    layout: struct.Struct
    arguments: ArgumentSlot
    fixed: tuple[tuple[int, int], ...]
    device: DeviceKey
    current_stream: Callable[[], int]
    needs_allocations: bool

    def pack(self, values: Sequence[int | float | bytes]) -> bytes:
        """The argument buffer for flat values in field order."""
        if self.fixed:
            values = list(values)
            for position, value in self.fixed:
                values.insert(position, value)
        return self.layout.pack(*values)


@dataclass(frozen=True)
class Binding:
    """What one launch is about: enough to compile the same kernel for any target."""

    kernel: KernelLike
    grid: Dim3
    block: Dim3
    specs: tuple[Spec, ...]
    statics: Mapping[str, Any]


_collected: ContextVar[list[Binding] | None] = ContextVar("collected", default=None)


@contextmanager
def bindings() -> Iterator[list[Binding]]:
    """Collects what this thread binds meanwhile, and launches on a device that is planned (`fly.runtime.planned`)."""
    found: list[Binding] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def collect_binding(
    kernel: KernelLike, grid: Dim3, block: Dim3, arguments: Sequence[Argument], statics: Mapping[str, Any]
) -> None:
    """Add one to what `bindings` collects, if it does."""
    if (collected := _collected.get()) is not None:
        collected.append(Binding(kernel, grid, block, tuple(argument.spec for argument in arguments), statics))


class Launcher:
    """One kernel's specialisations, each compiled and loaded on first use; safe under many threads."""

    def __init__(self, kernel: KernelLike):
        self._kernel = kernel
        self._arity = None if kernel.signature.variadic else len(kernel.signature.parameters)
        self._entries: dict[tuple[object, ...], Entry] = {}
        self._artefacts: dict[tuple[object, ...], Artefact] = {}
        self._loaded: dict[tuple[object, ...], Entry] = {}
        self._lock = threading.RLock()

    def launch(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        statics: Mapping[str, Any],
        stream: Any,
        compile: Compile,
    ) -> None:
        """See `launch`."""
        grid = dim3(grid, "grid")
        block = dim3(block, "block")
        if len(args) != self._arity:
            args, statics = self.complete(args, statics)
        values: list[int | float] = []
        try:
            key = (block, collect(args, values), static_key(statics) if statics else ())
            entry = self._entries.get(key)
        except Exception:
            self._explain(args, statics)
            raise
        allocations: tuple[Allocation, ...] = ()
        if entry is None:
            entry, arguments = self.enter(block, args, statics, compile, key)
            if entry.needs_allocations:
                collect_binding(self._kernel, grid, block, arguments, statics)
                allocations = tuple(a.allocation for a in arguments if a.allocation is not None)
        slot = entry.arguments
        try:
            slot.view[:] = entry.pack(values)
        except (struct.error, OverflowError):
            self._explain(args, statics)
            raise
        handle = entry.current_stream() if stream is None else stream_handle(stream, entry.device)
        entry.kernel.launch(grid, block, slot, handle, allocations)

    def enter(
        self, block: Dim3, args: Sequence[Any], statics: Mapping[str, Any], compile: Compile, key: Any = None
    ) -> tuple[Entry, tuple[Argument, ...]]:
        """Check everything, compile and load what is not yet; later launches find it under `key`."""
        signature = self._kernel.signature
        check_block(block)
        args, statics = self.complete(args, statics)
        arguments, place = describe_all(signature, args)
        specs = tuple(argument.spec for argument in arguments)
        statics = self._with_defaults(statics)
        device = device_for(place)
        specialised = (specs, static_key(statics), device.build, block)
        with self._lock:
            entry = self._loaded.get((specialised, place))
            if entry is None:
                artefact = self._artefacts.get(specialised)
                if artefact is None:
                    artefact = compile(self._kernel, specs, statics, device.build, block)
                    _check_artefact(artefact, device.target, block)
                    self._artefacts[specialised] = artefact
                fixed = _fixed_values(artefact, signature, specs)
                entry = Entry(
                    kernel=load(device, artefact),
                    fields=artefact.fields,
                    written=artefact.written,
                    layout=packer(artefact.fields),
                    arguments=ArgumentSlot(offsets(artefact.fields)),
                    fixed=fixed,
                    device=place,
                    current_stream=_current_stream(place),
                    needs_allocations=device.needs_allocations,
                )
                self._loaded[specialised, place] = entry
        _check_writable(entry.written, arguments)
        if key is not None and not entry.needs_allocations:
            self._entries[key] = entry
        return entry, arguments

    def complete(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """One value a parameter, from positional and named ones; what remains are static values.

        Raises:
            ArgumentError: too many arguments, one that is missing, or one that is given twice.
        """
        name, parameters = self._kernel.name, self._kernel.signature.parameters_for(len(args))
        if len(args) > len(parameters):
            accepted = ", ".join(parameter.name for parameter in parameters)
            raise ArgumentError(f"{name}: {len(args)} positional arguments; accepted: {accepted}")
        statics, values = dict(named), list(args)
        for parameter in parameters[: len(args)]:
            if parameter.name in statics:
                raise ArgumentError(f"{name}: argument {parameter.name!r} is given twice")
        for parameter in parameters[len(args) :]:
            if parameter.name not in statics and not parameter.optional:
                raise ArgumentError(f"{name}: argument {parameter.name!r} is missing")
            values.append(statics.pop(parameter.name, None))
        return values, statics

    def _with_defaults(self, statics: Mapping[str, Any]) -> dict[str, Any]:
        name, defaults = self._kernel.name, self._kernel.signature.statics
        for given, value in statics.items():
            if given not in defaults:
                accepted = ", ".join(defaults) or "none"
                raise ArgumentError(f"{name}: unexpected argument {given!r}; static parameters: {accepted}")
            try:
                hash(value)
            except TypeError:
                message = f"{name}: static argument {given!r} is {shown(value)}; accepted: hashable values"
                raise ArgumentTypeError(message) from None
        complete = {**defaults, **statics}
        for parameter, value in complete.items():
            if value is REQUIRED:
                raise ArgumentError(f"{name}: static argument {parameter!r} is missing")
        return complete

    def _explain(self, args: Sequence[Any], statics: Mapping[str, Any]) -> None:
        """Raise the error that names the bad argument, if one is bad."""
        describe_all(self._kernel.signature, args)
        self._with_defaults(statics)


_launchers_lock = threading.Lock()


def launcher_of(kernel: KernelLike) -> Launcher:
    """The kernel's launcher, made on first use."""
    launcher = getattr(kernel, "launcher", None)
    if launcher is None:
        with _launchers_lock:
            launcher = getattr(kernel, "launcher", None)
            if launcher is None:
                launcher = cast("Any", kernel).launcher = Launcher(kernel)
    return launcher


def launch(
    kernel: KernelLike,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    statics: Mapping[str, Any],
    stream: Any,
    compile: Compile,
) -> None:
    """Launch `kernel` on the device of its tensors; on a GPU this returns without waiting.

    `grid` (in blocks) and `block` (in threads) are one to three positive ints. `statics` holds the static
    arguments and any run-time ones given by name; optional arguments at the end may be left out. `stream` is
    a driver handle, an object with `.cuda_stream`, or None for torch's current stream on that device. Arrays
    that are not torch's are not waited for: order their producer before `stream`.

    Raises:
        ArgumentError: a bad, missing or unexpected argument, or tensors on more than one device.
        ArgumentTypeError: an argument of a type or dtype that is not accepted.
        LaunchError: a grid, block, stream or shared memory size that cannot be launched.
        DeviceError: the device is missing or its driver reported a failure.
        CompileError: the kernel cannot be compiled or loaded.
    """
    launcher_of(kernel).launch(grid, block, args, statics, stream, compile)


_SELF_EVIDENT = frozenset({int, bool, str, type(None)})


def _exact(value: Any) -> object:
    """A key that tells 1 from True and 1.0, and -0.0 from 0.0, inside tuples too."""
    if value.__class__ is tuple:
        return tuple([(item.__class__, _exact(item)) for item in value])
    return value.hex() if value.__class__ is float else value


def static_key(statics: Mapping[str, Any]) -> tuple[object, ...]:
    """A key of static values that is equal only where the values are the same, not just equal."""
    values = tuple(statics.values())
    classes = tuple(map(type, values))
    if not _SELF_EVIDENT.issuperset(classes):
        values = tuple(map(_exact, values))
    return tuple(statics), classes, values


def stream_handle(stream: Any, device: DeviceKey) -> int:
    """The driver handle of a stream given as a handle or as an object with `.cuda_stream`.

    Raises:
        ArgumentTypeError: neither of these.
        LaunchError: a stream of another device, or one for host memory, which has none.
    """
    try:
        handle = getattr(stream, "cuda_stream", stream)
        owner = getattr(stream, "device_index", None)
    except Exception:  # a property of the caller's class may raise anything
        handle = owner = None
    if handle.__class__ is not int or not 0 <= handle < 2**64:
        raise ArgumentTypeError(
            f"argument 'stream' is {shown(stream)}; accepted: a handle, an object with .cuda_stream, or None"
        )
    if device == CPU and handle:
        raise LaunchError(f"stream is {shown(stream)} but the tensors are on cpu; accepted: None or 0")
    if owner is not None and device != CPU and owner != device[1]:
        raise LaunchError(f"stream is on cuda:{owner}, the tensors on cuda:{device[1]}")
    return handle


def _current_stream(device: DeviceKey) -> Callable[[], int]:
    """Reads torch's current stream on a device, whatever the current device; 0 without torch."""
    if device == CPU:
        return int
    read = _torch_stream_reader()
    return functools.partial(_late_stream if read is None else read, device[1])


def _torch_stream_reader() -> Callable[[int], int] | None:
    torch = sys.modules.get("torch")
    return getattr(torch._C, "_cuda_getCurrentRawStream", None) if torch is not None else None


def _late_stream(ordinal: int) -> int:
    read = _torch_stream_reader()  # torch may have been imported since
    return 0 if read is None else read(ordinal)


def _check_artefact(artefact: Artefact, target: str, block: Dim3) -> None:
    if artefact.target != target:
        raise LaunchError(f"{artefact.kernel}: compiled for {artefact.target}, the tensors are on {target}")
    if tuple(artefact.block) != block:
        raise LaunchError(f"{artefact.kernel}: block is {block}, compiled for {tuple(artefact.block)}")


def _check_writable(written: tuple[str, ...] | None, arguments: Sequence[Argument]) -> None:
    """Refuse read-only arrays that the kernel may write; all of them where it is not known what it writes."""
    for argument in arguments:
        if argument.readonly and (written is None or argument.name in written):
            raise ArgumentError(
                f"argument {argument.name!r} is a read-only array, and the kernel writes it; accepted: an array that "
                "may be written, such as a copy"
            )


def _fixed_values(artefact: Artefact, signature: Signature, specs: tuple[Spec, ...]) -> tuple[tuple[int, int], ...]:
    """(position, value) of the artefact's fields that arguments do not give.

    These are last strides, which they leave out where they are 1, and the log, whose address a launch puts in.

    Raises:
        ArtefactError: the fields differ from the arguments' in any other way.
    """
    given = signature.flatten(specs)
    left_out = {
        f"{parameter.name}.stride{spec.rank - 1}"
        for parameter, spec in zip(signature.parameters_for(len(specs)), specs)
        if isinstance(spec, TensorSpec) and spec.unit_stride
    }
    values = {**dict.fromkeys(left_out, 1), **({LOG_FIELD.name: 0} if has_messages(artefact) else {})}
    fixed = tuple((i, values[field.name]) for i, field in enumerate(artefact.fields) if field.name in values)
    if tuple(field for field in artefact.fields if field.name not in values) != given:
        raise ArtefactError(
            f"{artefact.kernel}: takes ({', '.join(field.name for field in artefact.fields)}), the arguments "
            f"flatten to ({', '.join(field.name for field in given)})"
        )
    return fixed
