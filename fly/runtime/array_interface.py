"""The CUDA array interface of other libraries' arrays, checked.

https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

from fly.errors import ArgumentTypeError
from fly.runtime.shown import shown

ACCEPTED = "a torch tensor, numpy array or object with __cuda_array_interface__"
_TYPESTR = re.compile(r"[<>|=][a-zA-Z]\d+")


def check_interface(name: str, value: Any, accepted: str = ACCEPTED) -> None:
    """Check that an argument has an array interface, and that it is one; `accepted`: what the argument may be.

    Raises:
        ArgumentTypeError: it has none, or one without or with other entries than the protocol's.
    """
    try:
        interface = value.__cuda_array_interface__
    except AttributeError:
        interface = None
    except Exception as error:  # a property may raise anything
        raise _wrong(name, value, f"whose __cuda_array_interface__ raised {type(error).__name__}") from error
    if isinstance(value, type) or (interface is None and not hasattr(type(value), "__cuda_array_interface__")):
        raise ArgumentTypeError(
            f"argument {name!r} is {shown(value)} of type {type(value).__qualname__}; accepted: {accepted}"
        )
    if not isinstance(interface, Mapping):
        raise _wrong(name, value, f"whose __cuda_array_interface__ is {shown(interface)}")
    for entry, is_right in _ENTRIES.items():
        if not is_right(interface.get(entry)):
            raise _wrong(name, value, f"whose __cuda_array_interface__ has {entry!r}: {shown(interface.get(entry))}")
    strides = interface.get("strides")
    if strides is not None and len(strides) != len(interface["shape"]):
        raise _wrong(name, value, f"with {len(interface['shape'])} sizes and {len(strides)} strides")


def _wrong(name: str, value: Any, what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"argument {name!r} is a {type(value).__qualname__} {what}; accepted: {ACCEPTED}, as its protocol says"
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "shape": lambda sizes: isinstance(sizes, tuple) and all(_is_whole(n) and n >= 0 for n in sizes),
    "typestr": lambda text: isinstance(text, str) and _TYPESTR.fullmatch(text) is not None,
    "data": lambda data: isinstance(data, tuple) and len(data) == 2 and _is_whole(data[0]) and 0 <= data[0] < 2**64,
    "strides": lambda strides: strides is None or (isinstance(strides, tuple) and all(map(_is_whole, strides))),
}
"""What each entry must be."""
