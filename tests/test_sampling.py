"""The marker `sample`: which combinations run, and that none of a parameter's values is left out unseen."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from tests.sampling import in_sample, mark_left_out


class Item:
    """What sampling asks of a collected test, with parameters `a, b` together, `c`, and a fixture's `f`."""

    def __init__(self, ab: int, c: int, f: int, n: int, *others: pytest.MarkDecorator):
        self.nodeid = f"tests/test_some.py::test_some[{ab}-{c}-{f}]"
        self.callspec = SimpleNamespace(params={"a": ab, "b": ab, "c": c, "f": f})
        parametrized = (pytest.mark.parametrize("a, b", ()), pytest.mark.parametrize(["c"], ()))
        self.marks = [d.mark for d in (pytest.mark.sample(n), *parametrized, *others)]

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name):
        return next(self.iter_markers(name), None)

    def add_marker(self, decorator):
        self.marks.append(decorator.mark)


def items(sizes, n, *others):
    return [Item(*places, n, *others) for places in itertools.product(*map(range, sizes))]


def runs(item):
    return item.get_closest_marker("exhaustive") is None


def test_one_combination_in_n_runs_and_neighbours_differ():
    made = items((4, 3, 2), 3)
    assert mark_left_out(made) == []
    assert sum(map(runs, made)) == len(made) // 3
    for item in filter(runs, made):
        places = item.callspec.params
        assert (places["a"] + places["c"] + places["f"]) % 3 == 0


@pytest.mark.parametrize("n", [1, 2, 5])
def test_samples_are_one_in_n(n):
    taken = [in_sample({"a": i, "b": j}, n) for i in range(10) for j in range(10)]
    assert sum(taken) == 100 // n


def test_a_value_that_no_combination_has_is_named():
    left_out = mark_left_out(items((4, 1, 2), 4))
    assert left_out == [
        f"tests/test_some.py::test_some: no combination of the sample has value {place} of a,b" for place in (1, 2)
    ]


def test_what_needs_a_gpu_or_is_exhaustive_anyhow_is_left_alone():
    made = items((2, 2, 2), 2, pytest.mark.gpu)
    assert mark_left_out(made) == [] and all(map(runs, made))
    made = items((2, 2, 2), 2, pytest.mark.exhaustive)
    assert mark_left_out(made) == [] and all(len(item.marks) == 4 for item in made)


def test_a_test_with_one_parameter_has_one_in_n_of_its_values():
    made = items((7, 1, 1), 3)
    for item in made:
        item.callspec.params = {name: item.callspec.params[name] for name in "ab"}
        item.marks.pop(2)
    assert mark_left_out(made) == []
    assert [item.callspec.params["a"] for item in filter(runs, made)] == [0, 3, 6]
