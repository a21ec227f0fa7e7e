"""Which registers of a group's waves hold values that somebody wrote.

`g.written` is a bit mask of registers that are defined in every wave, which is all that most instructions need to
look at. Waves that came here on different paths may differ in more: `g.variants` then lists (mask, waves) classes,
where a wave's registers are those of its class and those of `g.written`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fly.emulator.state import Group

Variants = tuple[tuple[int, np.ndarray], ...]


def undefined(g: Group, bits: int) -> tuple[int, np.ndarray]:
    """(those of `bits` that some wave lacks, bool (W,): the waves that lack one)."""
    if not g.variants:
        return bits & ~g.written, np.full(g.waves, bool(bits & ~g.written))
    missing, waves = 0, np.zeros(g.waves, bool)
    for mask, where in g.variants:
        lacking = bits & ~(mask | g.written)
        if lacking:
            missing |= lacking
            waves |= where
    return missing, waves


def spread(g: Group, writes: int, waves: np.ndarray) -> None:
    """An instruction has written `writes`; in `waves`, bool (W,), the results are undefined."""
    parts = []
    for mask, where in g.variants or ((0, np.ones(g.waves, bool)),):
        parts.append(((mask | g.written) & ~writes, where & waves))
        parts.append((mask | g.written | writes, where & ~waves))
    g.written &= ~writes
    g.variants = _classes(parts, g.waves)
    _simplify(g)


def take(g: Group, a: Group, index: np.ndarray) -> None:
    """Definedness of `g`, the waves of `a` at `index`."""
    g.written = a.written
    g.variants = tuple((mask, where[index]) for mask, where in a.variants if where[index].any())
    _simplify(g)


def join(g: Group, a: Group, b: Group) -> None:
    """Definedness of `g`, the waves of `a` in front of those of `b`."""
    g.written, g.variants = a.written & b.written, ()
    if a.written == b.written and not a.variants and not b.variants:
        return
    parts = []
    for part, start in ((a, 0), (b, a.waves)):
        for mask, where in part.variants or ((part.written, np.ones(part.waves, bool)),):
            waves = np.zeros(g.waves, bool)
            waves[start : start + part.waves] = where
            parts.append((mask | part.written, waves))
    g.variants = _classes(parts, g.waves)
    _simplify(g)


def _classes(parts: list[tuple[int, np.ndarray]], waves: int) -> Variants:
    """Classes of equal masks together, without those that no wave is in."""
    classes: dict[int, np.ndarray] = {}
    for mask, where in parts:
        if where.any():
            classes[mask] = classes.get(mask, np.zeros(waves, bool)) | where
    return tuple(classes.items())


def _simplify(g: Group) -> None:
    if len(g.variants) == 1:
        g.written |= g.variants[0][0]
        g.variants = ()
