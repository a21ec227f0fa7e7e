"""The search behind `benchmarks/tune.py`: candidates, trials in processes of their own, the rule of replacement.

A kernel's *table* maps keys, such as ("nvvm", 64), to *tiles*, the fields of its options dataclass that were chosen
for them. A candidate is the tiles of a key with one or a few choices changed. It replaces the incumbent only when
paired timings say so, twice.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import geomean
from benchmarks.workload import Workload

Key = tuple[Any, ...]
Tiles = Mapping[str, Any]
Choices = Mapping[str, Sequence[Tiles]]

LINE_LENGTH = 118
MIN_GAIN = 1.02  # geometric mean over a key's cells
MAX_LOSS = 0.95  # in any one of them
OK, FAILED, TIMED_OUT, WRONG = "ok", "failed", "timed out", "WRONG"
WORKER = Path(__file__).with_name("tune.py")


@dataclass(frozen=True)
class Gpu:
    """What decides on a key besides the workload: `backend` ("nvvm" or "rocdl") and the number of compute units."""

    backend: str
    units: int


def _any_tiles(key: Key, tiles: Tiles) -> bool:
    return True


@dataclass(frozen=True)
class Adapter:
    """What the search must know of a kernel.

    `kernel` is its name in the dispatch table. `table` is the module whose `TILES` the kernel reads at every
    preparation: a dict from key to tiles; `keys` says what its keys are. `key(workload, gpu)` is the key that serves
    a workload. `choices` are the things to vary: name → alternatives, each some fields with values. Candidates that
    `fits(key, tiles)` refuses are passed over.
    """

    kernel: str
    table: str
    keys: str
    key: Callable[[Workload, Gpu], Key]
    choices: Choices
    fits: Callable[[Key, Tiles], bool] = _any_tiles

    def tiles(self) -> dict[Key, Tiles]:
        """The kernel's table itself: what is put into it is what the kernel then uses.

        Raises:
            LookupError: the kernel has no such table here.
        """
        try:
            table = getattr(importlib.import_module(self.table), "TILES", None)
        except ModuleNotFoundError as error:
            if error.name != self.table:
                raise
            table = None
        if not isinstance(table, dict):
            raise LookupError(f"the {self.kernel} kernel cannot be tuned: {self.table} has no dict TILES")
        return table


def _changed(tiles: Tiles, changes: Sequence[Tiles]) -> Tiles:
    merged = dict(tiles)
    for change in changes:
        merged |= change
    return {name: value for name, value in merged.items() if value is not None}


def candidates(tiles: Tiles, choices: Choices, reach: int = 1) -> Iterator[Tiles]:
    """Tiles that differ from `tiles` in at most `reach` choices, fewest changes first, each once.

    A field set to None falls back to the options' default.
    """
    seen = [dict(tiles)]
    for count in range(1, reach + 1):
        for names in itertools.combinations(choices, count):
            for changes in itertools.product(*(choices[name] for name in names)):
                candidate = _changed(tiles, changes)
                if candidate not in seen:
                    seen.append(candidate)
                    yield candidate


@dataclass(frozen=True)
class Trial:
    """Work for one process: two tiles of a key, and the workloads to time them on."""

    kernel: str
    key: Key
    incumbent: Tiles
    candidate: Tiles
    workloads: tuple[Workload, ...]
    iters: int = 30
    seed: int = 0
    device: str = "cuda"

    def to_json(self) -> str:
        """As text, for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """What `to_json` gave."""
        given = json.loads(text)
        workloads = [w | {"lengths": tuple(map(tuple, w["lengths"]))} for w in given["workloads"]]
        return cls(**given | {"key": tuple(given["key"]), "workloads": tuple(Workload(**w) for w in workloads)})


@dataclass(frozen=True)
class Outcome:
    """What came of a trial; `ratios` are the candidate's speed over the incumbent's, one for each workload."""

    status: str
    ratios: tuple[float, ...] = ()
    reason: str = ""

    @property
    def gain(self) -> float:
        """The geometric mean of the ratios; 0 without any."""
        return geomean(self.ratios) if self.ratios else 0.0

    @property
    def better(self) -> bool:
        """The rule: at least `MIN_GAIN` over all workloads, and none below `MAX_LOSS`."""
        return self.status == OK and self.gain >= MIN_GAIN and min(self.ratios) >= MAX_LOSS


def run_trial(
    trial: Trial, timeout: float, command: Sequence[str] = (sys.executable, str(WORKER), "--worker")
) -> Outcome:
    """Have a fresh process do the trial. What it leaves running after `timeout` seconds is killed with it."""
    environment = os.environ | {"FLY_KERNEL": trial.kernel}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(trial.to_json(), timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Outcome(TIMED_OUT, reason=f"after {timeout:g} s")
    if process.returncode:
        told = errors.strip().splitlines()
        return Outcome(FAILED, reason=(told[-1] if told else f"exit code {process.returncode}")[:200])
    given = json.loads(out.splitlines()[-1])
    return Outcome(given["status"], tuple(given["ratios"]), given["reason"])


@dataclass
class Search:
    """Hill climbing from a key's incumbent: `incumbent` and `gain` over the first one change as candidates win.

    Candidates that `fits(key, tiles)` refuses are passed over.
    """

    key: Key
    incumbent: Tiles
    fits: Callable[[Key, Tiles], bool] = _any_tiles
    gain: float = 1.0
    trials: list[tuple[Tiles, Outcome]] = field(default_factory=list)
    finished: bool = False

    def run(
        self,
        choices: Choices,
        reach: int,
        attempt: Callable[[Tiles, Tiles, int], Outcome],
        within: Callable[[], bool],
    ) -> None:
        """Try candidates until none is left or `within()` is false; restart around each new incumbent.

        `attempt(incumbent, candidate, seed)` is a trial. A candidate that is better must be so once more, with
        another seed, and the smaller gain counts.
        """
        tried: list[Tiles] = []
        while True:
            fresh = (c for c in candidates(self.incumbent, choices, reach) if c not in tried)
            candidate = next((c for c in fresh if self.fits(self.key, c)), None)
            if candidate is None:
                self.finished = True
                return
            if not within():
                return
            tried.append(candidate)
            outcome = attempt(self.incumbent, candidate, 0)
            self.trials.append((candidate, outcome))
            if not outcome.better:
                continue
            again = attempt(self.incumbent, candidate, 1)
            self.trials.append((candidate, again))
            if again.better:
                self.gain *= min(outcome.gain, again.gain)
                tried.append(self.incumbent)
                self.incumbent = candidate


def _literal(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    return repr(value)


def _entry(key: Key, tiles: Tiles) -> list[str]:
    fields = [f"{_literal(name)}: {_literal(value)}" for name, value in tiles.items()]
    line = f"    {_literal(key)}: {{{', '.join(fields)}}},"
    if len(line) <= LINE_LENGTH:
        return [line]
    return [f"    {_literal(key)}: {{", *(f"        {text}," for text in fields), "    },"]


def format_table(adapter: Adapter, table: Mapping[Key, Tiles], notes: Mapping[Key, str]) -> str:
    """The source of a table module: the tiles, and for what was measured where and with what gain."""
    return "\n".join(
        [
            f'"""The {adapter.kernel} kernel\'s choice of tiles: fields of its options; those not named keep their '
            "default.",
            "",
            f"Keys are {adapter.keys}.",
            f"Written by `benchmarks/tune.py {adapter.kernel} --write`. `NOTES` says what was measured for a key.",
            '"""',
            "",
            "from __future__ import annotations",
            "",
            "from typing import Any",
            "",
            "# fmt: off",
            "TILES: dict[tuple[Any, ...], dict[str, Any]] = {",
            *(line for key, tiles in table.items() for line in _entry(key, tiles)),
            "}",
            "NOTES: dict[tuple[Any, ...], str] = {",
            *(f"    {_literal(key)}: {_literal(note)}," for key, note in notes.items()),
            "}",
            "",
        ]
    )
