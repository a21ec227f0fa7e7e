"""The features that a call asks for: from keyword arguments to `Features` and the operands that a kernel takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from fly.errors import ArgumentTypeError

from ..arguments.callers import arg
from ..arguments.checks import ATTENTION, Checks, fail
from ..problem.catalogue import FEATURES, OPERANDS
from ..problem.features import Features

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STATIC = tuple(field.name for field in fields(Features))
AUX_DTYPES = (*FLOATS, torch.int32, torch.int64, torch.int16, torch.int8)


@dataclass(frozen=True)
class CallArguments:
    """A call as the checks of features see it (`problem.catalogue`).

    q and k, whose ranks and shapes are checked, and the keyword arguments by name (`options`).
    """

    q: torch.Tensor
    k: torch.Tensor
    causal: bool
    batch: int
    packed: bool
    options: Mapping[str, Any]
    checks: Checks = ATTENTION

    def __getitem__(self, keyword: str) -> Any:
        return self.options[keyword]

    @property
    def fp8_cache(self) -> bool:
        """Whether k and v have 8 bits and q has more."""
        return self.k.element_size() < self.q.element_size()

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[-2]

    @property
    def queries(self) -> int:
        """Of the longest sequence, or of all packed ones."""
        return self.q.shape[-3]

    @property
    def keys(self) -> int:
        """The same; in pages, those of a whole row of the table."""
        table = self["block_table"]
        return self.k.shape[-3] if table is None else self.k.shape[1] * table.shape[1]

    def tensor(self, name: str, value: Any, dtypes: Sequence[torch.dtype]) -> Any:
        """A value that is a tensor of one of `dtypes` on q's device."""
        self.checks.plain(name, value)
        self.checks.dtype(name, value, dtypes)
        if value.device != self.device:
            fail(f"{arg(name)} must be on {arg.q}'s device {self.device}, got {value.device}")
        return value

    def floats(self, name: str) -> Any:
        """A keyword argument that is such a tensor, of any float type that kernels convert."""
        return self.tensor(name, self[name], FLOATS)

    def single(self, name: str) -> Any:
        """The same of float32."""
        return self.tensor(name, self[name], (torch.float32,))

    def counts(self, name: str) -> Any:
        """A keyword argument that is one int32 number a sequence."""
        what = f"{self.batch} contiguous int32 numbers"
        self.checks.vector(name, self[name], torch.int32, self.device, what, self.batch)
        return self[name]

    def random_state(self, name: str) -> Any:
        """A keyword argument that is two int64 numbers, (seed, offset); some memory like them where it is None."""
        if self[name] is None:
            return torch.empty(2, dtype=torch.int64, device=self.device)
        self.checks.vector(name, self[name], torch.int64, self.device, "2 contiguous int64 numbers (seed, offset)", 2)
        return self[name]

    def function(self, name: str, function: Any, dependencies: Callable[[Any], Any]) -> Any:
        """A function that captures no tensor; `dependencies`: (name, value) of what it captures."""
        if not isinstance(function, Callable):  # type: ignore[arg-type]  # to mypy no class
            fail(f"{name} must be a function, got {function!r} ({type(function).__name__})", ArgumentTypeError)
        for captured, value in dependencies(function):
            if isinstance(value, torch.Tensor):
                fail(
                    f"{name} captures the tensor {captured!r}: pass it in aux_tensors, and it is an argument after "
                    "key",
                    ArgumentTypeError,
                )
        return function

    def aux_tensors(self, used: bool) -> tuple[torch.Tensor, ...]:
        """What functions may load from; `used`: there are functions."""
        tensors = self["aux_tensors"]
        if not isinstance(tensors, Sequence):
            fail(f"aux_tensors must be a sequence of tensors, got {type(tensors).__name__}", ArgumentTypeError)
        for i, tensor in enumerate(tensors):
            self.tensor(f"aux_tensors[{i}]", tensor, AUX_DTYPES)
        if tensors and not used:
            fail("aux_tensors are for score_mod and mask_mod, and neither is given: leave them out")
        return tuple(tensors)


def check_features(call: CallArguments) -> tuple[Features, dict[str, Any], tuple[str, ...]]:
    """(static features, operands by name, names of the features) that a call asks for; no auxiliary tensors.

    Raises:
        ArgumentError, ArgumentTypeError: a mistake of the caller.
    """
    found: dict[str, Any] = {}
    for feature in FEATURES:
        if feature.check is not None:
            found |= feature.check(call)
    operands = {name: found[name] for name in OPERANDS if name in found}
    static = {name: value for name, value in found.items() if name in STATIC}
    wanted = tuple(feature.name for feature in FEATURES if feature.used_by(found))
    return Features(tuple(operands), **static), operands, wanted
