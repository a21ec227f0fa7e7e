"""What a library of kernels adds to fly's command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fly.emulator.timing import Launch
    from fly.lang.signature import Spec


@dataclass(frozen=True)
class ProfiledCall:
    """A function that launches kernels on CPU tensors, which `profile` knows by a short name.

    `settings`: its keyword arguments with their defaults, for the help; `check(**settings)` raises `ArgumentError`
    where they do not fit; `placed(launch, **settings)` is the launch with each workgroup's place on the grid.
    """

    function: Callable[..., Any]
    settings: str
    check: Callable[..., None]
    placed: Callable[..., Launch]


class Library(Protocol):
    """The module that has a library's commands.

    `KERNELS`: short names that `inspect` takes, each with a function of (architecture, settings) that gives (kernel,
    argument specs, static parameters, threads of a block). `CALLS`: those that `profile` takes. `CALL_FLAGS`: names
    of the flags that `add_call_flags` adds, by which a call is described; `chosen_for` says which kernel serves it on
    an architecture, in words, and gives what `KERNELS`' functions give.
    """

    KERNELS: Mapping[str, Callable[[str, dict[str, Any]], tuple[Any, tuple[Spec, ...], dict[str, Any], int]]]
    CALLS: Mapping[str, ProfiledCall]

    CALL_FLAGS: Sequence[str]

    def add_call_flags(self, parser: Any) -> None:
        """Add flags that describe a call to an argparse parser; what is not given is None."""

    def chosen_for(self, arch: str, options: Any) -> tuple[str, tuple[Any, tuple[Spec, ...], dict[str, Any], Any]]:
        """What serves the call that flags describe, in words, and what is compiled for it."""

    def add_commands(self, commands: Any) -> None:
        """Add the library's own to the subcommands of an argparse parser."""
