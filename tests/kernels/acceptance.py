"""What every flash-attention kernel has to pass: where kernels run (`RUNS`) against configurations (`FAMILIES`).

A new kernel is one row of `RUNS`. On an emulated GPU the configurations are reduced, and without --exhaustive every
one of them runs on two or three of the rows, with one of the eight kinds, another one on each; on a real GPU all run
as they are. A configuration that the dispatch table says a kernel does not serve must be refused with an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from benchmarks.shapes import SETS, SMALL_LENGTHS, Kind, kinds
from benchmarks.workload import Workload
from fly import config
from fly.runtime.device import device_of
from kernels import dispatch
from kernels.flash_attn_interface import flydsl_flash_attn_func
from tests.kernels.reference import MAX_SCORES, check, reference

KINDS = kinds(head_dims=(64, 128))
SCHEDULES = 5  # of the simulator, one of them for each test


@dataclass(frozen=True)
class Run:
    """A kernel on an emulated or simulated architecture (`arch`) with all checks on, or on the GPU (None).

    The kernel is forced; "" leaves the choice to the dispatch table.
    """

    kernel: str
    arch: str | None = None

    def __str__(self) -> str:
        return f"{self.kernel or 'chosen'}-{self.arch or 'gpu'}"

    @property
    def device(self) -> str:
        """The device of its tensors."""
        return "cpu" if self.arch else "cuda"

    @property
    def rows(self) -> list[dispatch.Kernel]:
        """The kernel in the dispatch table, or all that may be chosen."""
        return [row for row in dispatch.KERNELS if self.kernel in ("", row.name) and row.module is not None]

    def has(self, feature: str) -> bool:
        """Whether the dispatch table says that the kernel does this."""
        return any(feature in row.features for row in self.rows)

    def unavailable(self) -> str | None:
        """Why it cannot run here at all, or None."""
        if not self.rows:
            return f"the {self.kernel} kernel is not dispatched yet"
        if self.arch is None:
            if not torch.cuda.is_available():
                return "torch sees no GPU"
            target = device_of(torch.device("cuda")).target
            if not any(target in row.archs for row in self.rows):
                return f"the {self.kernel} kernel is not for {target}"
        return None

    def start(self, patch: pytest.MonkeyPatch) -> None:
        """Have calls run so while `patch` lasts; skips the test where they cannot."""
        reason = self.unavailable()
        if reason is not None:
            pytest.skip(reason)
        for variable in (config.KERNEL, config.DISABLE_DUALWAVE_SWP):
            patch.delenv(variable.name, raising=False)
        if self.kernel:
            patch.setenv(config.KERNEL.name, self.kernel)
        if self.arch:
            patch.setenv(config.ARCH.name, self.arch)
            patch.setenv(config.EMULATOR_CHECKS.name, "1")
            patch.setenv(config.SIMULATOR_SEED.name, str(secrets.randbelow(SCHEDULES)))

    def refuses(self, workload: Workload) -> bool:
        """Whether the dispatch table says that the kernel does not do this."""
        return not any(self.serves(row, workload) for row in self.rows)

    @staticmethod
    def serves(row: dispatch.Kernel, workload: Workload) -> bool:
        """Whether a row of a dispatch table does this."""
        return {name for name, asked in _features(workload).items() if asked} <= {*row.features}


def _features(workload: Workload) -> dict[str, bool]:
    """Names of features in `problem.catalogue`, and whether a workload asks for them."""
    return {"packed": bool(workload.lengths), "split_kv": workload.num_kv_splits != 1}


RUNS = (
    Run("generic", "gfx942"),
    Run("generic", "gfx950"),
    Run("gfx942", "gfx942"),
    Run("gfx950", "gfx950"),
    Run("sm90", "sm_90a"),
    Run("generic"),
    Run("gfx942"),
    Run("gfx950"),
    Run("sm90"),
)
EMULATED = tuple(run for run in RUNS if run.arch)
ON_GPU = tuple(run for run in RUNS if run.arch is None)
# of the sets, "small" is contained in the pairs below
FAMILIES: Mapping[str, Callable[[Kind], Iterator[Workload]]] = {
    name: of for name, (_, of) in SETS.items() if name != "small"
}
# on an emulated GPU, and how long sequences are there; "long" would be nothing else than "split"
REDUCED_LENGTHS: Mapping[str, int] = {"default": 1024, "cross": 512, "varlen": 512, "split": 1024, "shared": 256}


def failure(
    workload: Workload, seed: int, tensors: Sequence[torch.Tensor] | None = None, device: str = "cuda", **options
) -> str | None:
    """Run a workload with its LSE; what is wrong with the result, or None.

    `out` starts as NaN, so that what is not written is found. A finding of the emulator's checks raises.
    """
    q, k, v = workload.tensors(seed, device) if tensors is None else tensors
    scale = options.get("softmax_scale")
    ref = reference(q, k, v, causal=workload.causal, softmax_scale=scale, lengths=workload.lengths)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=device)
    options = workload.keywords(device) | options
    out, lse = flydsl_flash_attn_func(q, k, v, workload.causal, return_lse=True, out=out, **options)
    report = check(out, ref, lse)
    return None if report.ok else f"{workload}, seed {seed}, schedule {config.SIMULATOR_SEED.get()}: {report}"


def failures(run: Run, workloads: Sequence[Workload], seed: int) -> list[str]:
    """What is wrong with any of the workloads; those that the kernel does not serve must raise."""
    wrong = []
    for workload in workloads:
        if run.refuses(workload):
            tensors, options = workload.tensors(seed, run.device), workload.keywords(run.device)
            with pytest.raises(NotImplementedError):
                flydsl_flash_attn_func(*tensors, workload.causal, **options)
        elif (found := failure(workload, seed, device=run.device)) is not None:
            wrong.append(found)
    return wrong


def fits_gpu(workload: Workload) -> bool:
    """Whether the GPU's memory holds a workload with its reference."""
    queries, keys = (sum(side) for side in zip(*workload.sequences))
    wide = queries * workload.num_heads * workload.head_dim
    # q, out, plain attention of 2 bytes, the reference of 4; k and v; partial results; blocks of scores
    partial = 4 * max(1, workload.num_kv_splits or 8) * (workload.num_kv_splits != 1)
    needed = wide * (3 * 2 + 2 * 4 + partial) + 4 * keys * workload.num_kv_heads * workload.head_dim
    return needed + 4 * 4 * MAX_SCORES <= torch.cuda.get_device_properties(0).total_memory


def reduced(family: str, kind: Kind, length: int = 0) -> list[Workload]:
    """A family's workloads of one kind, in miniature, each once; `length`: instead of the one in the table."""
    length = length or REDUCED_LENGTHS[family]
    heads = 2 if length < 1024 else 1
    return list(dict.fromkeys(workload.reduced(length, heads) for workload in FAMILIES[family](kind)))


def sampled(run: Run, family: str, kind: Kind) -> list[Workload]:
    """Of `reduced`, what this kind stands for: all kinds of a run together have every configuration once."""
    # kinds by turns from the front and the back, so that neighbours differ in everything; another start for each run
    place, last = KINDS.index(kind), len(KINDS) - 1
    turn = 2 * place if 2 * place < last else 2 * (last - place) + 1
    return reduced(family, kind)[(turn + 3 * EMULATED.index(run)) % len(KINDS) :: len(KINDS)]


def every_pair(kind: Kind, heads: int = 4) -> list[Workload]:
    """Every small length as queries against every one as keys, in an order in which neighbours share none."""
    count = len(SMALL_LENGTHS)
    places = [(i, (i + shift) % count) for shift in range(count) for i in range(count)]
    return [kind.dense(1, SMALL_LENGTHS[q], heads, heads // 2, SMALL_LENGTHS[kv]) for q, kv in places]


def sampled_pairs(run: Run, kind: Kind) -> list[Workload]:
    """Of `every_pair`, what this kind stands for: nine; the emulated runs of two architectures have them all."""
    runs = [other for other in EMULATED if other.kernel == run.kernel]
    place = runs.index(run) * len(KINDS) + KINDS.index(kind)
    return every_pair(kind, heads=2)[9 * place : 9 * (place + 1)]
