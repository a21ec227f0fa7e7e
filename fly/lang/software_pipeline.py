"""Software pipelines from a table of stages: prologue, steady state and epilogue (modulo scheduling).

A loop over tiles is written as stages, each with a delay: step i of the pipeline runs a stage for tile i - delay, so
that several tiles are on their way at once. What a stage makes for a tile reaches the later stages of that tile,
through as many steps as their delays differ by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fly.errors import PipelineError
from fly.ir.control import cond
from fly.ir.control import range as run_time_range
from fly.ir.value import Value


@dataclass(frozen=True)
class Stage:
    """One row of the table: in step i, `run(tile, *values)` for the tile number i - `delay`.

    `takes` and `gives` name, separated by spaces, the values that it gets (in this order) and returns (one value, or
    a tuple for several names). A name that the pipeline starts with is a running value: the stage gets what the
    stage before left of it. Any other is made for each tile by one stage. Stages are listed by `cluster`.
    `past_end`: the stage may run for tiles past the last one, as what it makes of them is not used (copies).
    `shared`: it also runs for tiles that a wave leaves out (see `Pipeline.run`), because others need what it does.
    """

    name: str
    run: Callable[..., Any]
    takes: str = ""
    gives: str = ""
    delay: int = 0
    cluster: int = 0
    past_end: bool = False
    shared: bool = False


@dataclass(frozen=True)
class PipelineTile:
    """What a stage knows of its tile: `number` (traced i32, or an integer before the loop), and two static facts.

    `slot` is its number modulo the unrolling, `place` that of the step: which tile of the loop's body it is. `last`:
    there is none behind it.
    """

    number: Any
    slot: int
    place: int
    last: bool = False


class Pipeline:
    """A table of stages, checked.

    `unroll` steps make one turn of the loop; with more than one, buffers can be chosen at compile time by
    `tile.slot`. `boundary(cluster, step)` is called at the end of every cluster of every step, first to last; `step`
    counts those before the loop, and is None from there on. `spares`: `run` is told which waves
    have no part in the last tile.

    Raises:
        PipelineError: stages out of order, a name given twice, or a value taken that is not there yet.
    """

    def __init__(
        self,
        stages: list[Stage],
        *,
        running: tuple[str, ...] = (),
        unroll: int = 1,
        boundary: Callable[[int, int | None], None] | None = None,
        spares: bool = False,
    ):
        if not stages:
            raise PipelineError("a pipeline needs at least one stage")
        if not isinstance(unroll, int) or unroll < 1:
            raise PipelineError(f"unroll is {unroll!r}; expected a positive number of steps")
        self.stages = stages
        self.running = running
        self.unroll = unroll
        self.boundary = boundary
        self.spares = spares
        self.clusters = 1 + max(stage.cluster for stage in stages)
        self.depth = max(stage.delay for stage in stages)
        self._lead = min((stage.delay for stage in stages if not stage.past_end), default=0)
        self._ages = self._check()

    def _check(self) -> dict[str, int]:
        """For each value of tiles, the steps between where it is made and where it is last taken."""
        makers: dict[str, tuple[int, Stage]] = {}
        seen: set[str] = set()
        for position, stage in enumerate(self.stages):
            if stage.name in seen:
                raise PipelineError(f"two stages are named {stage.name!r}")
            seen.add(stage.name)
            if stage.delay < 0 or stage.cluster < 0:
                raise PipelineError(
                    f"stage {stage.name!r} has delay {stage.delay} and cluster {stage.cluster}; neither is negative"
                )
            if position and stage.cluster < self.stages[position - 1].cluster:
                raise PipelineError(
                    f"stage {stage.name!r} of cluster {stage.cluster} comes after "
                    f"{self.stages[position - 1].name!r} of cluster {self.stages[position - 1].cluster}; "
                    "stages are listed in the order in which they run"
                )
            for name in stage.gives.split():
                if name in makers:
                    raise PipelineError(
                        f"stages {makers[name][1].name!r} and {stage.name!r} both give {name!r}; what several "
                        "stages change is a running value"
                    )
                if name not in self.running:
                    makers[name] = position, stage
        ages = dict.fromkeys(makers, 0)
        for position, stage in enumerate(self.stages):
            for name in stage.takes.split():
                if name in self.running:
                    continue
                if name not in makers:
                    known = ", ".join((*self.running, *makers)) or "nothing"
                    raise PipelineError(
                        f"stage {stage.name!r} takes {name!r}, which no stage gives; there is {known}"
                    )
                made_at, maker = makers[name]
                if (stage.delay, position) <= (maker.delay, made_at):
                    raise PipelineError(
                        f"stage {stage.name!r} (delay {stage.delay}) takes {name!r} before stage {maker.name!r} "
                        f"(delay {maker.delay}) gives it"
                    )
                ages[name] = max(ages[name], stage.delay - maker.delay)
        return ages

    @property
    def fewest(self) -> int:
        """The number of tiles that prologue and epilogue alone work through."""
        return self.depth - self._lead

    def _turns(self, tiles: Any) -> Any:
        return (tiles - self.fewest + (self.unroll - 1)) // self.unroll

    def rounded(self, tiles: Any) -> Any:
        """The number of tiles that `run(tiles)` works through."""
        return self._turns(tiles) * self.unroll + self.fewest

    def run(self, tiles: Any, *, spare: Callable[[], Value] | None = None, **running: Any) -> dict[str, Any]:
        """Emit the pipeline for `tiles` (static or traced i32) tiles; returns the running values after the last.

        There are at least `fewest` tiles (`tiles` is more than `fewest` - `unroll`), and from there on they come in
        turns of `unroll`: stages see the tiles that this adds, with their numbers, and must make nothing of them.
        Where `spare()` (i1, the same in a wave, asked for behind the loop) holds, only stages that are `shared` run
        in the steps that have none but the last tile; what the others made of it before is not used.

        Raises:
            PipelineError: the starting values are not those of the table's `running`, or `spare` is given to a
                pipeline without `spares`, or not given to one with them.
        """
        if (spare is not None) != self.spares:
            raise PipelineError(f"spare is {spare!r}; expected one where the pipeline has spares, and only there")
        if set(running) != set(self.running):
            raise PipelineError(
                f"the pipeline starts with {', '.join(sorted(running)) or 'nothing'}; its running values are "
                f"{', '.join(self.running) or 'none'}"
            )
        turns = self._turns(tiles)
        # per name: what the steps before made, the latest first
        past: dict[str, list[Any]] = {name: [] for name in self._ages}
        for step in range(self.depth):
            past, running = self._step(step, step - self.depth, past, running, last_delay=step)
        carry = (past, running)
        done = turns * self.unroll + self.depth
        # the loop counts steps: with turns, a stage's number of its tile would be a second counter
        bounds = self.depth, done, self.unroll
        if self._empty(carry):
            for first in run_time_range(*bounds):
                self._turn(first, past, running)
        else:
            for first, (past, running) in (loop := run_time_range(*bounds, carry=carry)):
                loop.next(self._turn(first, past, running))
            past, running = loop.results
        if spare is None:
            return self._finish(range(self.fewest), done, past, running)[1]
        # the last tile is alone from the step on in which the one before has ended
        alone = max(stage.delay for stage in self.stages) - 1 - self._lead
        past, running = self._finish(range(alone), done, past, running)
        rest = range(alone, self.fewest)
        ended: dict[str, Any] = cond(
            spare(),
            lambda: self._finish(rest, done, past, running, own=False)[1],
            lambda: self._finish(rest, done, past, running)[1],
        )
        return ended

    def _finish(
        self, steps: Sequence[int], done: Any, past: dict[str, list[Any]], running: dict[str, Any], own: bool = True
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Some of the steps behind the loop, of which the first has number `done`; without `own`, shared stages."""
        for step in steps:
            first = self._lead + step + 1
            past, running = self._step(done + step, step, past, running, first_delay=first, own=own)
        return past, running

    @staticmethod
    def _empty(carry: tuple[dict[str, list[Any]], dict[str, Any]]) -> bool:
        past, running = carry
        return not running and not any(past.values())

    def _turn(
        self, first: Value, past: dict[str, list[Any]], running: dict[str, Any]
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        for step in range(self.unroll):
            past, running = self._step(first + step, step, past, running)
        return past, running

    def _step(
        self,
        number: Any,
        place: int,
        past: dict[str, list[Any]],
        running: dict[str, Any],
        first_delay: int = 0,
        last_delay: int | None = None,
        own: bool = True,
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """One step: the stages whose delay is in range; `place` counts steps from the loop's first one. Without
        `own` only shared ones run.
        """
        made: dict[str, Any] = {}
        makers = {name: stage for stage in self.stages for name in stage.gives.split()}
        running = dict(running)
        for cluster in range(self.clusters):
            for stage in self.stages:
                if stage.cluster != cluster or stage.delay < first_delay:
                    continue
                if last_delay is not None and stage.delay > last_delay:
                    continue
                if not own and not stage.shared:
                    continue
                tile = PipelineTile(
                    number - stage.delay,
                    (place + self.depth - stage.delay) % self.unroll,
                    place % self.unroll,
                    stage.delay == first_delay > 0,
                )
                values = []
                for name in stage.takes.split():
                    if name in running:
                        values.append(running[name])
                        continue
                    age = stage.delay - makers[name].delay
                    values.append(made[name] if age == 0 else past[name][age - 1])
                names = stage.gives.split()
                result = stage.run(tile, *values)
                results = (result,) if len(names) == 1 else (result or ())
                if len(results) != len(names):
                    raise PipelineError(
                        f"stage {stage.name!r} gives {', '.join(names) or 'nothing'}, but returned "
                        f"{len(results)} values"
                    )
                for name, value in zip(names, results, strict=True):
                    (running if name in running else made)[name] = value
            if self.boundary is not None:
                self.boundary(cluster, last_delay)
        return {name: self._older(past[name], made, name) for name in self._ages}, running

    def _older(self, values: list[Any], made: dict[str, Any], name: str) -> list[Any]:
        """What later steps find of a name: one step older each; the epilogue makes no new ones."""
        latest = [made.get(name)] if name in made or values else []
        return (latest + values)[: self._ages[name]]
