"""Random valid and invalid calls of the public functions: `python tests/kernels/fuzz_calls.py --help`.

Call `i` of a seed is the same on every machine and device; `--only i` makes it alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from fly import config
from fly.errors import UnsupportedError
from fly.runtime.device import device_of
from kernels.flash_attn_interface import flydsl_flash_attn_workspace
from tests.kernels import fp8_reference
from tests.kernels.cache.kv_cache_cases import Case, failures
from tests.kernels.cache.kv_cache_cases import Problem as AppendProblem
from tests.kernels.fuzz.fuzz_bounds import exact
from tests.kernels.fuzz.fuzz_draws import APPEND, Build, Draw, draw_build
from tests.kernels.fuzz.fuzz_maker import draw_problem
from tests.kernels.fuzz.fuzz_mistakes import draw_mistake, judge_mistake, without_kernels
from tests.kernels.fuzz.fuzz_problems import Problem, outside, result_of
from tests.kernels.reference import check

CALLS = 10  # of a build
SECONDS = 300  # a call that takes longer hangs


@dataclass(frozen=True)
class Setting:
    """What calls are drawn from: a seed, the target, the longest sequence, and whether numbers may be extreme."""

    seed: int
    arch: str
    device: str = "cpu"
    most: int = 150
    extremes: bool = True


@dataclass(frozen=True)
class Outcome:
    """What became of a call: "right", or else with a description.

    `excess`: its largest error in units of what is allowed, see `Exact.excess`.
    """

    index: int
    verdict: str
    what: str = ""
    excess: float = 0.0


def describe(problem: Problem) -> str:
    """The call in a line of Python-like text."""

    def short(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            content = value.tolist() if value.dtype == torch.int32 and value.numel() < 12 else ""
            return f"{str(value.dtype)[6:]}{tuple(value.shape)}{content}/{value.stride()}"
        return getattr(value, "__name__", None) or repr(value)[:80]

    function, given = problem.call()
    kernel = f" FLY_KERNEL={problem.build.kernel}" if problem.build.kernel else ""
    return f"{function.__name__}({', '.join(f'{k}={short(v)}' for k, v in given.items())}){kernel}"


def judge(problem: Problem) -> tuple[str, float]:
    """(what is wrong with the call's result, or nothing; its error in units of what is allowed)."""
    function, given = problem.call()
    if problem.build.workspace:
        size = flydsl_flash_attn_workspace(**given)
        given["workspace"] = torch.full((size,), 255, dtype=torch.uint8, device=problem.q.device)
    result = function(**given)
    out, lse = result_of(result, problem)
    found = problem.side_effects() + outside(problem, out)
    q, k, v, options = problem.reference()
    if problem.build.dtype == "f8e4m3":
        expected = fp8_reference.reference(q, k, v, causal=problem.build.causal, **options)
        report = check(out.cpu(), expected, None if lse is None else lse.cpu())
        return "; ".join([*found, *([] if report.ok else [str(report)])]), report.error / report.bound
    expected = exact(q, k, v, problem.build.causal, options, problem.ordinary)
    for name, tensor, shape in (("out", out, expected.out.shape), ("lse", lse, expected.lse.shape)):
        if tensor is not None and tensor.shape != shape:
            return f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}", 0.0
    errors = expected.excess(out.cpu(), None if lse is None else lse.cpu())
    found += [f"{name} is {e:.3g} of what is allowed" for name, e in zip(("out", "lse"), errors) if not e <= 1.0]
    return "; ".join(found), max(errors)


def append_case(draw: Draw, build: Build) -> Case:
    """A call of `append_to_cache` under a build."""
    return Case(
        head_dim=build.head_dim,
        rotary_dim=build.rotary,
        interleaved=build.interleaved,
        each_query=build.causal,
        dtype=torch.bfloat16 if build.dtype == "bf16" else torch.float16,
        batch=draw.randint(1, 4),
        queries=draw.choice((0, 1, 2, 5, 40)),
        new=draw.choice((0, 1, 1, 2, 7, 33)),
        heads=(kv_heads := draw.randint(1, 3)) * draw.randint(1, 4),
        kv_heads=kv_heads,
        length=draw.randint(40, 130),
        page=build.page,
        batch_idx=draw.chance(0.3),
        one_length=draw.chance(0.3),
        head_dim_v=build.head_dim_v,
        shift=draw.choice((1, 2, 4)) if build.odd else 0,
    )


def one(setting: Setting, index: int) -> Outcome:
    """Make call `index` and judge it."""
    group, _ = divmod(index, CALLS)
    device = setting.device
    build = draw_build(Draw(f"{setting.seed}/{group}"), setting.arch, setting.most)
    draw = Draw(f"{setting.seed}/{group}/{index}")
    environment = {config.KERNEL.name: build.kernel}
    if device == "cpu":
        environment |= {config.ARCH.name: setting.arch, config.EMULATOR_CHECKS.name: "1"}
    before = dict(os.environ)
    os.environ |= environment
    text = str(build)
    try:
        if build.function == APPEND:
            case = append_case(draw, build)
            text = str(case)
            found = "; ".join(failures(AppendProblem(case, draw.getrandbits(31), device)))
            excess = 0.0
        else:
            problem = draw_problem(draw, build, device, setting.extremes)
            text = describe(problem)
            found, excess = judge(problem)
    except TimeoutError:
        return Outcome(index, "hung", f"longer than {SECONDS} s\n  {text}")
    except Exception as error:
        verdict = "refused" if isinstance(error, UnsupportedError) else "raised"
        where = "".join(traceback.format_exception(error)[-4:]) if verdict == "raised" else ""
        return Outcome(index, verdict, f"{type(error).__name__}: {str(error)[:400]}\n  {text}\n{where}")
    finally:
        os.environ.clear()
        os.environ |= before
    return Outcome(index, "wrong" if found else "right", f"{found}\n  {text}" if found else "", excess)


def one_mistake(setting: Setting, index: int) -> Outcome:
    """Make invalid call `index` and judge its error."""
    draw = Draw(f"{setting.seed}/mistake/{index}")
    build = draw_build(draw, setting.arch, 20)
    before = dict(os.environ)
    os.environ[config.ARCH.name] = setting.arch
    text = ""
    try:
        with torch.no_grad():
            mistake = draw_mistake(draw, build)
        text = str(mistake)
        with torch.enable_grad():
            found = judge_mistake(mistake)
    except Exception as error:
        where = "".join(traceback.format_exception(error)[-3:])
        return Outcome(index, "raised", f"{type(error).__name__}: {str(error)[:400]}\n  {text}\n{where}")
    finally:
        os.environ.clear()
        os.environ |= before
    return Outcome(index, "wrong" if found else "right", f"{found}\n  {text}" if found else "")


def _expire(signum: int, frame: Any) -> None:
    raise TimeoutError


def several(setting: Setting, indices: Iterable[int]) -> list[Outcome]:
    """Valid calls, best those of one build, each within `SECONDS`."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _expire)
    outcomes = []
    with torch.no_grad():
        for index in indices:
            signal.alarm(SECONDS)
            try:
                outcomes.append(one(setting, index))
            finally:
                signal.alarm(0)
    return outcomes


def mistakes(setting: Setting, indices: Iterable[int]) -> list[Outcome]:
    """Invalid calls; no kernel runs."""
    torch.set_num_threads(1)
    with without_kernels():
        return [one_mistake(setting, index) for index in indices]


Make = Callable[[Setting, Iterable[int]], list[Outcome]]


def run(make: Make, setting: Setting, number: int, workers: int) -> Iterator[Outcome]:
    """The outcomes of `number` calls, in order."""
    groups = [range(first, min(first + CALLS, number)) for first in range(0, number, CALLS)]
    if workers == 1:
        for group in groups:
            yield from make(setting, group)
        return
    with _processes(workers) as pool:
        futures = [pool.submit(make, setting, group) for group in groups]
        for group, future in zip(groups, futures):
            try:
                yield from future.result()
            except BrokenProcessPool:
                yield from _alone(make, setting, group)


def _processes(number: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(number, mp_context=get_context("spawn"))


def _alone(make: Make, setting: Setting, group: Iterable[int]) -> Iterator[Outcome]:
    """Calls one by one, each in a process of its own."""
    for index in group:
        with _processes(1) as pool:
            try:
                yield from pool.submit(make, setting, [index]).result()
            except BrokenProcessPool:
                yield Outcome(index, "died", "the process")


def main() -> int:
    """Run what the command line says; the exit code is 1 when a call failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--valid", type=int, default=0, help="valid calls")
    parser.add_argument("--invalid", type=int, default=0, help="invalid calls")
    parser.add_argument("--only", type=int, help="make this valid call alone")
    parser.add_argument("--only-invalid", type=int, help="make this invalid call alone")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--arch", default="gfx950", choices=("gfx942", "gfx950", "sm_90a"), help="of the GPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ordinary", action="store_true", help="numbers of ordinary magnitude only")
    parser.add_argument("--most", type=int, default=Setting.most, help="tokens of the longest sequence")
    given = parser.parse_args()
    arch = given.arch if given.device == "cpu" else device_of(torch.device(given.device)).target
    setting = Setting(given.seed, arch, given.device, given.most, not given.ordinary)
    print(f"seed {given.seed}, {arch}", flush=True)
    for make, index in ((several, given.only), (mistakes, given.only_invalid)):
        if index is not None:
            (outcome,) = make(setting, [index])
            print(outcome.verdict, outcome.what, f"(error {outcome.excess:.3g} of what is allowed)")
            return outcome.verdict != "right"
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault(config.CACHE_DIR.name, cache)
        failed = summary("--only-invalid", "invalid", run(mistakes, setting, given.invalid, given.workers))
        failed += summary("--only", "valid", run(several, setting, given.valid, given.workers))
    return min(failed, 1)


def _cpu_seconds() -> float:
    """Of this process and those that it waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def summary(only: str, kind: str, outcomes: Iterator[Outcome]) -> int:
    """Print failures as they come, and counts at the end; how many there are."""
    start, cpu = time.time(), _cpu_seconds()
    counts = dict.fromkeys(("right", "wrong", "raised", "refused", "hung", "died"), 0)
    largest: list[tuple[float, int]] = []
    for outcome in outcomes:
        counts[outcome.verdict] += 1
        largest.append((outcome.excess, outcome.index))
        if outcome.verdict != "right":
            print(f"{only} {outcome.index}: {outcome.verdict}: {outcome.what}", flush=True)
    if not largest:
        return 0
    print(
        f"{len(largest)} {kind} calls:",
        ", ".join(f"{n} {name}" for name, n in counts.items() if n),
        f"({time.time() - start:.0f} s, {_cpu_seconds() - cpu:.0f} s of CPU)",
    )
    if kind == "valid":
        worst = ", ".join(f"{e:.2f} (call {i})" for e, i in sorted(largest)[-5:])
        print(f"largest errors, in units of what is allowed: {worst}")
    return len(largest) - counts["right"]


if __name__ == "__main__":
    sys.exit(main())
