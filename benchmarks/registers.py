"""Registers, spills and stack of every build that the library makes of its attention kernels, for any target.

    python -m benchmarks.registers --only_spills                          # all of them, half an hour on 16 cores
    python -m benchmarks.registers --arch sm_80 --kernel generic --pass backward --head_dim 64 128
    python -m benchmarks.registers --arch gfx942 --form plain window dropout --jobs 2

A call of every form, head dimension and mask is described, not made: what its launch would compile is compiled and
counted. AMD's figures are LLVM's notes in the object, NVIDIA's those of `ptxas`, which has to be installed. A spill
is a register on AMD, scalar ones in lanes of vector registers too, and a byte on NVIDIA, of stores and loads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.progress import progress, say
from fly.backends.artefact import Resources
from fly.backends.nvvm.codegen import resources
from fly.errors import UnsupportedError
from fly.runtime.compile import compile_to_launch
from fly.runtime.launch import Binding
from kernels import described
from kernels.commands import TARGETS, request_of
from kernels.dispatch import BACKWARD, FORWARD, Kernel
from kernels.generic.operands import padded
from kernels.problem.contract import Request

PASSES = {"forward": FORWARD, "backward": BACKWARD}
LENGTH, BATCH, HEADS = 512, 2, 4
SMALL_BLOCK = (64, 64)


@dataclass(frozen=True)
class Form:
    """A kind of call: flags of `python -m fly inspect`, and what else of its keyword arguments.

    `gradients`: whose are wanted besides those of q, k and v; `deterministic`: whether they are the same bits in
    every run, which is a form of the backward pass alone.
    """

    flags: Mapping[str, Any]
    more: Callable[[Request], Mapping[str, Any]] = lambda request: {}
    gradients: tuple[str, ...] = ()
    deterministic: bool = False

    @property
    def of_gradients(self) -> bool:
        """Whether only the backward pass has it."""
        return bool(self.gradients) or self.deterministic


def _features(*names: str, **rest: Any) -> Form:
    return Form({"feature": names}, **rest)


def _small_blocks(request: Request) -> Mapping[str, Any]:
    return {"block_mask": described.block_mask(request, SMALL_BLOCK)}


def _loaded(request: Request) -> Mapping[str, Any]:
    table = torch.empty(request.num_heads, request.seq_len_kv)
    return {"score_mod": _by_table, "aux_tensors": (table,)}


def _by_table(score: Any, batch: Any, head: Any, query: Any, key: Any, table: Any) -> Any:
    return score + table[head, key]


def _bias(*sizes: str) -> Callable[[Request], Mapping[str, Any]]:
    """One whose sizes are those of the request's, 1 where it is broadcast."""
    return lambda request: {"bias": torch.empty([getattr(request, name) if name else 1 for name in sizes])}


_ALL, _OF_HEADS = _bias("batch", "num_heads", "seq_len", "seq_len_kv"), _bias("num_heads", "seq_len", "seq_len_kv")
_OF_KEYS = _bias("num_heads", "", "seq_len_kv")


# every set of features that decides a choice of tiles or a kernel's code
FORMS: Mapping[str, Form] = {
    "plain": Form({}),
    "grouped": Form({"num_kv_heads": 1}),
    "many sequences": Form({"batch": 128, "seq_len": 2048}),
    "long": Form({"seq_len": 8192}),
    "packed": Form({"packed": True}),
    "packed, long": Form({"packed": True, "seq_len": 8192}),
    "grouped, long": Form({"num_kv_heads": 1, "seq_len": 8192}),
    "split": Form({"num_kv_splits": 4}),
    "seqused": _features("seqused"),
    "paged": _features("paged"),
    "window": _features("window"),
    "chunk": _features("attention_chunk"),
    "softcap": _features("softcap"),
    "alibi": _features("alibi"),
    "bias": _features("bias"),
    "bias of keys": _features("bias", more=_OF_KEYS),
    "sink": _features("sink"),
    "dropout": _features("dropout"),
    "block mask": _features("block_mask"),
    "block mask, blocks of 64": _features("block_mask", more=_small_blocks),
    "score_mod": _features("score_mod"),
    "score_mod with a tensor": _features("score_mod", more=_loaded),
    "mask_mod": _features("mask_mod"),
    "softcap, window": _features("softcap", "window"),
    "softcap, dropout": _features("softcap", "dropout"),
    "block mask, dropout": _features("block_mask", "dropout"),
    "packed, window, softcap": Form({"packed": True, "feature": ("window", "softcap")}),
    "packed, dropout": Form({"packed": True, "feature": ("dropout",)}),
    "packed, score_mod": Form({"packed": True, "feature": ("score_mod",)}),
    "packed, alibi, dropout": Form({"packed": True, "feature": ("alibi", "dropout")}),
    "grouped, softcap, window": Form({"num_kv_heads": 1, "feature": ("softcap", "window")}),
    "alibi, softcap": _features("alibi", "softcap"),
    "alibi, dropout": _features("alibi", "dropout"),
    "bias, dropout": _features("bias", "dropout"),
    "mask_mod, dropout": _features("mask_mod", "dropout"),
    "chunk, dropout": _features("attention_chunk", "dropout"),
    "score_mod, window": _features("score_mod", "window"),
    "alibi, block mask": _features("alibi", "block_mask"),
    "bias of every score in float32": _features("bias", more=_ALL),
    "deterministic": Form({}, deterministic=True),
    "packed, deterministic": Form({"packed": True}, deterministic=True),
    "softcap, deterministic": _features("softcap", deterministic=True),
    "alibi, deterministic": _features("alibi", deterministic=True),
    "bias, deterministic": _features("bias", deterministic=True),
    "dropout, deterministic": _features("dropout", deterministic=True),
    "softcap, dropout, deterministic": _features("softcap", "dropout", deterministic=True),
    "bias, gradient": _features("bias", more=_ALL, gradients=("bias",)),
    "bias of heads, gradient": _features("bias", more=_OF_HEADS, gradients=("bias",)),
    "bias of keys, gradient": _features("bias", more=_OF_KEYS, gradients=("bias",)),
    "score_mod, gradient": _features("score_mod", more=_loaded, gradients=("aux0",)),
}


@dataclass(frozen=True)
class Case:
    """One kind of call of one kernel, forced where others would come first."""

    arch: str
    name: str
    kernel: str
    head_dim: int
    causal: bool
    form: str
    head_dim_v: int | None = None

    def __str__(self) -> str:
        dims = self.head_dim if self.head_dim_v is None else f"{self.head_dim}x{self.head_dim_v}"
        mask = "causal" if self.causal else "full"
        return f"{self.arch} {self.kernel} {self.name} {dims} {mask} {self.form}"


@dataclass(frozen=True)
class Counted:
    """A build and what it takes."""

    case: Case
    build: str
    found: Resources


def head_dims(kernel: Kernel) -> Sequence[int]:
    """A kernel's own, of many those that tables have."""
    return sorted({padded(d) for d in kernel.head_dims}) if len(kernel.head_dims) > 3 else kernel.head_dims


def cases(options: Namespace) -> Iterator[Case]:
    """All that the flags leave."""
    for name, of in PASSES.items():
        for kernel in of.table():
            dims = options.head_dim or head_dims(kernel)
            for arch in kernel.archs:
                if not {name, kernel.name, arch} <= {*options.passes, *options.kernel, *options.arch}:
                    continue
                for head_dim in (dim for dim in dims if dim in kernel.head_dims):
                    for form in options.form:
                        served = name == "backward" or not FORMS[form].of_gradients
                        for causal in (False, True) if served else ():
                            yield Case(arch, name, kernel.name, head_dim, causal, form)


def bindings_of(case: Case) -> list[Binding]:
    """What a launch of such a call binds, in order; nothing is compiled.

    Raises:
        UnsupportedError: the kernel does not serve such calls.
    """
    form = FORMS[case.form]
    flags = {"batch": BATCH, "seq_len": LENGTH, "num_heads": HEADS, **form.flags}
    dtype = next(k.dtypes[0] for k in PASSES[case.name].table() if k.name == case.kernel)
    described_by = Namespace(
        head_dim=case.head_dim, head_dim_v=case.head_dim_v, causal=case.causal, dtype=dtype, **flags
    )
    asked = request_of(described_by)
    assert asked is not None
    more = form.more(asked)
    request, tensors = described.call_of(asked, **more)
    of = PASSES[case.name]
    if case.name == "backward":
        request, tensors = described.of_backward(request, tensors, more, form.gradients)
        request = replace(request, deterministic=form.deterministic)
    with of.forced.set_to(case.kernel):
        return described.bindings_of(case.arch, request, tensors, of)


def shown(binding: Binding) -> str:
    """A kernel and its tiles."""
    options = binding.statics.get("options")
    names = ("block_m", "block_n", "waves", "consumers", "stages", "results")
    values = {name: getattr(options, name, None) for name in names}
    text = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    return f"{binding.kernel.name} {text}".rstrip()


def count(case: Case) -> list[Counted]:
    """Every build of a case, counted; none where the kernel does not serve such calls."""
    try:
        return [Counted(case, shown(binding), resources_of(case.arch, binding)) for binding in bindings_of(case)]
    except UnsupportedError:
        return []


def resources_of(arch: str, binding: Binding) -> Resources:
    """What a build takes, compiled for a target."""
    key = (arch, binding.kernel.name, binding.specs, *binding.statics.items())
    if key not in _resources:
        built = compile_to_launch(binding.kernel, binding.specs, binding.statics, arch, binding.block)
        is_ptx = arch.startswith("sm_")
        _resources[key] = resources(built.isa, arch, built.dynamic_shared) if is_ptx else built.resources
    return _resources[key]


_resources: dict[Any, Resources] = {}


HEADER = f"{'build':<100} registers  accumulators  scalar  spills  stack"


def line(counted: Counted) -> str:
    """A row of the table."""
    of = counted.found
    registers, more, scalar, spills, stack = (
        "-" if x is None else x
        for x in (of.registers, of.accum_registers, of.scalar_registers, of.spills, of.scratch_bytes)
    )
    name = f"{counted.case}: {counted.build}"
    return f"{name:<100} {registers:>9}  {more:>12}  {scalar:>6}  {spills:>6}  {stack:>5}"


def is_clean(counted: Counted) -> bool:
    """Nothing is spilled, as far as is known."""
    return not (counted.found.spills or counted.found.scratch_bytes)


def _parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels = sorted({kernel.name for of in PASSES.values() for kernel in of.table()})
    for name, accepted in (("arch", TARGETS), ("kernel", kernels), ("pass", tuple(PASSES)), ("form", tuple(FORMS))):
        dest = "passes" if name == "pass" else name
        made.add_argument(
            f"--{name}", nargs="+", choices=accepted, default=accepted, dest=dest, metavar=name.upper(),
            help=f"of these alone: {', '.join(accepted)}",
        )  # fmt: skip
    made.add_argument("--head_dim", nargs="+", type=int, help="of these alone, any that a kernel takes")
    made.add_argument("--only_spills", action="store_true", help="leave out builds without spills and stack")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (one a CPU)")
    return made


def counted(asked: Sequence[Case], jobs: int) -> Iterator[list[Counted]]:
    """The builds of every case."""
    with ProcessPoolExecutor(jobs) as pool:
        yield from map(itemgetter(1), zip(progress(asked, "call"), pool.map(count, asked)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table asked for; returns 1 where a build spills."""
    options = _parser().parse_args(argv)
    needed = {arch for arch in options.arch if arch.startswith("sm_")}
    if needed and shutil.which("ptxas") is None:
        _parser().error(
            f"--arch {' '.join(sorted(needed))}: ptxas, which counts NVIDIA's registers, is not on the PATH"
        )
    print(HEADER)
    builds = spilled = 0
    for found in counted(list(cases(options)), options.jobs):
        spilling = [build for build in found if not is_clean(build)]
        builds, spilled = builds + len(found), spilled + len(spilling)
        for build in spilling if options.only_spills else found:
            say(line(build))
    print(f"{builds} builds, {spilled} with spills")
    return int(spilled > 0)


if __name__ == "__main__":
    sys.exit(main())
