"""`@pytest.mark.sample(n)`: of a test's combinations of parameters one in n runs, the others with --exhaustive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

Places = dict[str, int]
"""Of a combination: for each `parametrize` and each fixture with parameters, the number of its value."""


def mark_left_out(items: Sequence[pytest.Item]) -> list[str]:
    """Mark as `exhaustive` what is not in a sample; returns what is wrong with samples, one line for each.

    What needs a GPU is not sampled: that has time for all. A sample has each value of each parameter, but for a test
    with a single parameter, which has one in n of its values.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not any(map(item.get_closest_marker, ("gpu", "exhaustive"))):
            tests[item.nodeid.partition("[")[0]].append(item)
    wrong = []
    for test, combinations in tests.items():
        places = _places(combinations)
        taken = [
            in_sample(place, *item.get_closest_marker("sample").args) for item, place in zip(combinations, places)
        ]
        for item, runs in zip(combinations, taken):
            if not runs:
                item.add_marker(pytest.mark.exhaustive)
        for name in places[0] if len(places[0]) > 1 else ():
            left_out = {p[name] for p in places} - {p[name] for p, runs in zip(places, taken) if runs}
            wrong += [f"{test}: no combination of the sample has value {n} of {name}" for n in sorted(left_out)]
    return wrong


def in_sample(places: Places, n: int) -> bool:
    """Whether a combination is one of the sample: neighbours in a parameter never both are."""
    return sum(places.values()) % n == 0


def _places(combinations: Sequence[pytest.Item]) -> list[Places]:
    """Values are numbered as they come up."""
    numbers: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    found = []
    for item in combinations:
        params = item.callspec.params
        together = [mark.args[0] for mark in item.iter_markers("parametrize")]
        groups = [names.replace(",", " ").split() if isinstance(names, str) else list(names) for names in together]
        alone = set(params).difference(*groups)
        places = {}
        for names in [*groups, *([name] for name in sorted(alone))]:
            values, known = tuple(id(params[name]) for name in names), numbers[",".join(names)]
            places[",".join(names)] = known.setdefault(values, len(known))
        found.append(places)
    return found
