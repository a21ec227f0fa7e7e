"""What gradients have to pass: the forward's acceptance table (`tests.kernels.acceptance`) with rows of its own.

A row is a backward kernel behind a forward kernel, whose out and log-sum-exp it takes, both forced. On an emulated
GPU every configuration runs in miniature on two of the rows, and with --exhaustive of every kind on all of them. A
configuration that the dispatch tables say a row's kernels do not serve must be refused with an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from benchmarks.shapes import Kind
from benchmarks.workload import Workload
from fly import config
from kernels import dispatch
from tests.kernels.acceptance import KINDS, Run, reduced
from tests.kernels.gradient_reference import by_autograd, gradients_by_parts


@dataclass(frozen=True)
class GradientRun(Run):
    """The same with a kernel of the backward pass, forced too; "" leaves the choice to its dispatch table."""

    backward: str = ""

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.backward or 'chosen'}"

    @property
    def backward_rows(self) -> list[dispatch.Kernel]:
        """The backward kernel in its dispatch table, or all that may be chosen."""
        return [
            row
            for row in dispatch.BACKWARD_KERNELS
            if self.backward in ("", row.name) and self.arch in (None, *row.archs)
        ]

    def start(self, patch: pytest.MonkeyPatch) -> None:
        super().start(patch)
        patch.setenv(config.BACKWARD_KERNEL.name, self.backward)

    def refuses(self, workload: Workload) -> bool:
        """Whether the dispatch tables say that one of the two kernels does not do this."""
        return super().refuses(workload) or not any(self.serves(row, workload) for row in self.backward_rows)


EMULATED = (
    GradientRun("gfx942", "gfx942", "gfx942"),
    GradientRun("generic", "gfx942", "generic"),
    GradientRun("gfx950", "gfx950", "gfx950"),
    GradientRun("generic", "gfx950", "generic"),
    GradientRun("", "sm_90a"),
)
ON_GPU = (GradientRun(""),)
# The families of each form, and the tokens that sequences shrink to on an emulated GPU: such that all of a form's
# strides are odd, or all even, and need one build of each kernel. Those of "cross" have two blocks, of 128 rows.
# Splitting keys is the forward pass's; some of "varlen" do.
FORMS: Mapping[str, Mapping[str, int]] = {
    "dense": {"default": 65, "cross": 151, "shared": 33},
    "packed": {"varlen": 49},
}
GPU_LENGTH = 2048
DOUT = 8.0  # so large that the rule's allowance for numbers near 0.3 is small beside what is compared


def kind_of(run: GradientRun, form: str) -> Kind:
    """The kind that stands for all of them: rows and forms differ in it, and each of its values is somewhere."""
    return KINDS[(3 * EMULATED.index(run) + 5 * list(FORMS).index(form)) % len(KINDS)]


def configurations(form: str, kind: Kind, run: GradientRun | None = None) -> list[Workload]:
    """A form's workloads in miniature, each once; with `run`, those that this row stands for."""
    every = list(dict.fromkeys(w for family, length in FORMS[form].items() for w in reduced(family, kind, length)))
    if run is None:
        return every
    place, count = EMULATED.index(run), len(EMULATED)
    return [workload for i, workload in enumerate(every) if (i - place) % count in (0, 2)]


def inputs_of(q: torch.Tensor, v: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random gradients of out and of the log-sum-exp, `DOUT` in size."""
    made = torch.Generator(q.device).manual_seed(seed + 1)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=made, device=q.device).mul(DOUT).to(q.dtype)
    return dout, torch.randn(*q.shape[:-3], q.shape[-2], q.shape[-3], generator=made, device=q.device) * DOUT


def failure(workload: Workload, seed: int, device: str = "cuda") -> str | None:
    """What is wrong with the gradients of a workload's out and log-sum-exp, or None.

    Results begin as NaN, so that what is not written is found. A finding of the emulator's checks raises.
    """
    q, k, v = workload.tensors(seed, device)
    dout, dlse = inputs_of(q, v, seed)
    found = by_autograd(q, k, v, workload.causal, dout, dlse, **workload.keywords(device))
    expected = gradients_by_parts(q, k, v, workload.causal, dout, dlse, workload.lengths)
    wrong = expected.wrong(found)
    return f"{workload}, seed {seed}, schedule {config.SIMULATOR_SEED.get()}: {'; '.join(wrong)}" if wrong else None


def failures(run: GradientRun, workloads: Sequence[Workload], seed: int) -> list[str]:
    """What is wrong with any of the workloads; those that the row's kernels do not serve must raise."""
    wrong = []
    for workload in workloads:
        if run.refuses(workload):
            q, k, v = workload.tensors(seed, run.device)
            with pytest.raises(NotImplementedError):
                by_autograd(q, k, v, workload.causal, *inputs_of(q, v, seed), **workload.keywords(run.device))
        elif (found := failure(workload, seed, run.device)) is not None:
            wrong.append(found)
    return wrong
