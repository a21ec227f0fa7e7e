"""The tuner: candidates, the rule of replacement, trials that hang, fail or lie, and the table that it writes."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import tune, tuning
from benchmarks.tuning import FAILED, OK, TIMED_OUT, Adapter, Gpu, Outcome, Search, Trial
from benchmarks.workload import Workload
from fly.runtime.paired import paired_ratio
from kernels.flash_attn_generic import GenericOptions
from kernels.generic import tiles as flash_attn_generic_tiles
from kernels.sm90 import builds as sm90_builds
from kernels.sm90 import tiles as flash_attn_sm90_tiles

CHOICES = {
    "keys": ({"n": 32}, {"n": 64}),
    "copies": ({"stages": 2, "alternate": None}, {"stages": 1, "alternate": True}),
}
START = {"n": 32, "stages": 2}
CELLS = (Workload(1, 8, 8, 1, 1, 64, "f16", False),)
H200 = Gpu("nvvm", 132)


def with_table(monkeypatch, table):
    """An adapter of a kernel that reads this table."""
    monkeypatch.setitem(sys.modules, "some_tiles", SimpleNamespace(TILES=table))
    return Adapter("some", "some_tiles", "(name)", lambda workload, gpu: next(iter(table)), CHOICES)


def listed(tiles, reach):
    return list(tuning.candidates(tiles, CHOICES, reach))


def test_candidates_change_few_choices_and_never_nothing():
    one = [{"n": 64, "stages": 2}, {"n": 32, "stages": 1, "alternate": True}]
    assert listed(START, 1) == one
    assert listed(START, 2) == [*one, {"n": 64, "stages": 1, "alternate": True}]
    assert listed(START, 5) == listed(START, 2)
    assert {"n": 32, "stages": 2} in listed({"n": 32, "stages": 1, "alternate": True}, 1)


@pytest.mark.parametrize("adapter", tune.ADAPTERS.values(), ids=lambda adapter: adapter.kernel)
def test_choices_are_consistent(adapter):
    for alternatives in adapter.choices.values():
        assert len({frozenset(tiles.items()) for tiles in alternatives}) == len(alternatives) > 1
        assert len({tuple(tiles) for tiles in alternatives}) == 1


def test_generic_candidates_are_options():
    adapter = tune.ADAPTERS["generic"]
    table = adapter.tiles()
    assert table is flash_attn_generic_tiles.TILES
    accepted = 0
    for candidate in tuning.candidates(table["nvvm", 64], adapter.choices):
        try:
            GenericOptions(64, True, **candidate)
        except ValueError:
            continue  # a combination that no build has: its trial fails
        accepted += 1
    assert accepted >= 15


def test_cells_of_the_generic_kernel():
    workloads = tune.sweep("bf16", (True, False), (512, 1024), (40, 64))
    cells = tune.cells_by_key(tune.ADAPTERS["generic"], workloads, H200)
    assert list(cells) == [("nvvm", 64)] and cells["nvvm", 64] == tuple(workloads)


def test_cells_of_the_sm90_kernel():
    """Each key has the lengths that its build serves, and no others."""
    adapter = tune.ADAPTERS["sm90"]
    assert adapter.tiles() is flash_attn_sm90_tiles.TILES
    workloads = tune.sweep("bf16", (True, False), (512, 1024, 2048, 4096, 8192), (128,))
    cells = tune.cells_by_key(adapter, workloads, H200)
    assert {key: [workload.seq_len for workload in of] for key, of in cells.items()} == {
        (128, 128, True, 2, 4096): [512, 1024, 2048, 4096],
        (128, 128, True, 3, None): [8192],
        (128, 128, False, 2, 1024): [512, 1024],
        (128, 128, False, 3, 4096): [2048, 4096],
        (128, 128, False, 3, None): [8192],
    }
    few = Workload(1, 512, 512, 2, 2, 128, "bf16", False)
    assert list(tune.cells_by_key(adapter, [few], H200)) == [(128, 128, False, 1, None)]


@pytest.mark.parametrize("key", flash_attn_sm90_tiles.TILES, ids=str)
def test_sm90_candidates_are_builds_that_fit(key):
    adapter = tune.ADAPTERS["sm90"]
    start = adapter.tiles()[key]
    assert adapter.fits(key, start)
    fit = [tiles for tiles in tuning.candidates(start, adapter.choices) if adapter.fits(key, tiles)]
    options = [sm90_builds.options_of(key, tiles) for tiles in fit]
    assert {(o.head_dim, o.head_dim_v, o.causal, o.consumers) for o in options} == {key[:4]}
    assert {tiles.get("cost") for tiles in fit} == {start.get("cost")}  # so that it serves the same cells
    assert {o.rescale for o in options} == set(sm90_builds.RESCALES)
    assert {o.hold for o in options} == {True, False}
    assert len({o.block_n for o in options}) > 2
    dims = key[0] + key[1]
    for o in options:
        q, kv = 64 * o.consumers * o.q_stages * key[0] * 2, o.stages * o.block_n * dims * 2
        assert q + kv <= o.tile_bytes < 227 << 10
        assert (q + kv == o.tile_bytes) == (key[0] % 32 == key[1] % 32 == 0)  # rows that fill their lines


def test_what_does_not_fit_is_passed_over():
    attempts = []

    def attempt(incumbent, candidate, seed):
        attempts.append(candidate)
        return Outcome(OK, (1.0,))

    search = Search(("k",), START, lambda key, tiles: key == ("k",) and tiles["n"] == 32)
    search.run(CHOICES, 2, attempt, lambda: True)
    assert attempts == [{"n": 32, "stages": 1, "alternate": True}] and search.finished


def test_the_sm90_kernel_takes_what_the_table_says(monkeypatch):
    key = (128, 128, False, 2, 1024)
    assert sm90_builds.key_for(128, 128, False, 1024, 1024, 256, 132) == key
    assert sm90_builds.key_for(128, 128, False, 1024, 1025, 256, 132) == (128, 128, False, 2, 4096)
    changed = {"block_n": 48, "stages": 3, "q_stages": 1, "hold": True, "cost": 0.5}
    monkeypatch.setitem(flash_attn_sm90_tiles.TILES, key, changed)
    wanted = sm90_builds.Sm90Options(128, 128, False, 2, 48, 3, 1, hold=True)
    assert sm90_builds.options_of(key) == wanted
    # cheap enough for what one consumer served
    assert sm90_builds.key_for(128, 128, False, 64, 64, 1, 132) == key


def test_paired_ratio_is_the_median_of_rounds():
    assert paired_ratio([2.0, 4.0, 8.0], [1.0, 4.0, 2.0]) == 2.0
    assert paired_ratio([2.0, 8.0], [1.0, 1.0]) == pytest.approx(4.0)
    # clocks that fall during a run move both
    assert paired_ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0]) == 0.5


@pytest.mark.parametrize(
    "ratios, better",
    [
        ((1.02, 1.02), True),
        ((1.019, 1.019), False),
        ((1.10, 0.96), True),
        ((1.20, 0.94), False),
        ((1.5, 0.5), False),
    ],
)
def test_the_rule(ratios, better):
    assert Outcome(OK, ratios).better is better
    assert not Outcome(tuning.WRONG, ratios).better and not Outcome(FAILED).better


def climbing(speeds, noise=lambda seed: 1.0):
    """Run a search in which tiles have these speeds; gives it and every (candidate, seed) that was tried."""
    tried = []

    def attempt(incumbent, candidate, seed):
        tried.append((candidate["n"], candidate["stages"], seed))
        speed = [speeds[tiles["n"], tiles["stages"]] for tiles in (incumbent, candidate)]
        return Outcome(OK, (speed[1] / speed[0] * noise(seed),))

    search = Search(("k",), START)
    search.run(CHOICES, 1, attempt, lambda: True)
    return search, tried


def test_climbs_from_winner_to_winner():
    speeds = {(32, 2): 100, (64, 2): 110, (32, 1): 90, (64, 1): 121}
    search, tried = climbing(speeds)
    assert search.incumbent == {"n": 64, "stages": 1, "alternate": True}
    assert search.gain == pytest.approx(1.21) and search.finished
    assert tried == [(64, 2, 0), (64, 2, 1), (64, 1, 0), (64, 1, 1), (32, 1, 0)]


def test_a_gain_must_repeat():
    speeds = {(32, 2): 100, (64, 2): 100, (32, 1): 100, (64, 1): 100}
    search, tried = climbing(speeds, noise=lambda seed: 1.05 if seed == 0 else 1.0)
    assert search.incumbent == START and search.gain == 1 and len(tried) == 4
    search, _ = climbing({**speeds, (64, 2): 101.9})
    assert search.incumbent == START


def test_stops_when_time_is_up():
    search = Search(("k",), START)
    search.run(CHOICES, 1, lambda *_: Outcome(OK, (1.0,)), iter([True, False]).__next__)
    assert len(search.trials) == 1 and not search.finished


TRIAL = Trial("generic", ("nvvm", 64), START, {"n": 64}, (Workload.packed([(3, 5)], 2, 1, 64, "f16", True), *CELLS))


def process(program, timeout=30.0):
    return tuning.run_trial(TRIAL, timeout, (sys.executable, "-c", program))


def test_a_trial_goes_to_its_process_and_back():
    assert Trial.from_json(TRIAL.to_json()) == TRIAL
    program = (
        "import json, os, sys; trial = json.load(sys.stdin); print('chatter');"
        "print(json.dumps({'status': os.environ['FLY_KERNEL'], 'ratios': [2], 'reason': trial['key'][0]}))"
    )
    assert process(program) == Outcome("generic", (2,), "nvvm")


def test_a_trial_that_fails_says_why():
    assert process("raise ValueError('too many registers')") == Outcome(FAILED, (), "ValueError: too many registers")
    assert process("import os; os._exit(7)").reason == "exit code 7"
    assert process("import os; os.abort()").status == FAILED


def test_a_trial_that_hangs_is_killed_with_its_children(tmp_path):
    """The child holds a lock that it leaves by dying, or after half a minute, when it also leaves a file."""
    held, alive = tmp_path / "held", tmp_path / "alive"
    child = (
        f"import fcntl, time; lock = open({str(held)!r}, 'w'); fcntl.flock(lock, fcntl.LOCK_EX);"
        f"time.sleep(30); open({str(alive)!r}, 'w')"
    )
    outcome = process(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", timeout=1.0)
    assert outcome == Outcome(TIMED_OUT, (), "after 1 s")
    with held.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert not alive.exists()


def test_keys_share_the_budget(monkeypatch, capsys):
    table = {("a",): START, ("b",): START}
    adapter = with_table(monkeypatch, table)
    seconds = iter(range(100))
    attempts = []

    def attempt(trial):
        attempts.append(trial)
        return Outcome(FAILED, reason="no registers")

    cells = dict.fromkeys(table, CELLS)
    searches = tune.tune(
        adapter, cells, reach=2, attempt=attempt, budget=8, iters=5, clock=lambda: float(next(seconds))
    )
    assert [trial.key for trial in attempts] == [("a",)] * 3 + [("b",)] * 2  # the first key has no more candidates
    assert [search.finished for search in searches] == [True, False]
    assert "('a',) {'n': 64}: failed no registers" in capsys.readouterr().out
    lines = tune.summary(searches, cells)
    assert lines[0] == "('a',): 1.000 with {'n': 32, 'stages': 2}" and lines[1] == "  3 trials on 1 cells"
    assert lines[3] == "  2 trials on 1 cells (time ran out)"


def load(path):
    spec = importlib.util.spec_from_file_location("table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_written_and_read_back(tmp_path, monkeypatch):
    path = tmp_path / "some_tiles.py"
    table = {
        ("nvvm", 64): START,
        (64, 128, True): {f"field_{i}": i for i in range(12)},
        ("x",): {"queries": "shared"},
    }
    adapter = with_table(monkeypatch, table)
    path.write_text(tuning.format_table(adapter, table, {("x",): 'a "note"'}))
    assert max(map(len, path.read_text().splitlines())) <= 118
    module = load(path)
    assert table == module.TILES and module.NOTES == {("x",): 'a "note"'}
    assert "Keys are (name).\n" in module.__doc__

    monkeypatch.setitem(sys.modules, "some_tiles", module)
    won = Search(("nvvm", 64), {"n": 64}, gain=1.05)
    assert tune.write_table(adapter, [won, Search(("x",), {"lost": 1})], "GPU") == path
    module = load(path)
    assert {**table, ("nvvm", 64): {"n": 64}} == module.TILES
    assert module.NOTES["x",] == 'a "note"' and module.NOTES["nvvm", 64].startswith(
        "GPU: 1.050 of the speed before, "
    )


@pytest.mark.parametrize("adapter", tune.ADAPTERS.values(), ids=lambda adapter: adapter.kernel)
def test_tables_are_as_the_tuner_writes_them(adapter):
    module = importlib.import_module(adapter.table)
    with open(module.__file__) as file:
        assert file.read() == tuning.format_table(adapter, module.TILES, module.NOTES)


def test_a_kernel_without_a_table(monkeypatch):
    adapter = Adapter("some", "no_such_module", "", tune._sm90_key, CHOICES)
    with pytest.raises(LookupError, match="the some kernel cannot be tuned: no_such_module has no dict TILES"):
        adapter.tiles()
    monkeypatch.setitem(sys.modules, "mixed", SimpleNamespace(TILES={}))
    with pytest.raises(LookupError, match="mixed is not a table module"):
        tune.write_table(Adapter("some", "mixed", "", tune._sm90_key, CHOICES), [], "GPU")


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_EMULATOR_CHECKS", "0")


def test_a_real_trial_in_its_process(emulated):
    key = ("rocdl", 64)
    incumbent = flash_attn_generic_tiles.TILES[key]
    cells = (Workload(1, 40, 70, 1, 1, 64, "f16", True),)
    trial = Trial("generic", key, incumbent, incumbent | {"block_n": 32}, cells, iters=2, device="cpu")
    outcome = tuning.run_trial(trial, timeout=120)
    assert outcome.status == OK and len(outcome.ratios) == 1 and outcome.ratios[0] > 0, outcome


def test_a_build_with_another_result_is_wrong(monkeypatch):
    table = {("k",): {"right": True}}
    adapter = with_table(monkeypatch, table)

    def attend(q, k, v, causal, softmax_scale):
        return q if table["k",]["right"] else -q

    monkeypatch.setattr("kernels.flash_attn_interface.flydsl_flash_attn_func", attend)
    for right, status in ((True, OK), (False, tuning.WRONG)):
        trial = Trial("some", ("k",), {"right": True}, {"right": right}, CELLS, iters=1, device="cpu")
        assert tune.work(trial, adapter).status == status
    assert table == {("k",): {"right": True}}


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=132))


def smaller_is_faster(trial, timeout):
    sizes = [tiles["block_n"] for tiles in (trial.incumbent, trial.candidate)]
    return Outcome(OK, (1 + (sizes[0] - sizes[1]) / 320,))


def test_a_run(pretended_gpu, monkeypatch, capsys, tmp_path):
    """The command line from flags to the last line, on a pretended GPU and without processes."""
    monkeypatch.setattr(tune, "run_trial", smaller_is_faster)
    log = tmp_path / "log"
    assert tune.main(["generic", "--head_dim", "64", "--log", str(log)]) == 0
    printed = capsys.readouterr().out
    assert "('nvvm', 64) {'block_n': 32}: ok 1.100 (worst 1.100)" in printed
    assert "('nvvm', 64): 1.100 with {'block_m': 128, 'block_n': 32" in printed
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) > 10 and records[0]["on"] == "pretended GPU" and records[0]["key"] == ["nvvm", 64]


def test_a_run_of_the_sm90_kernel(pretended_gpu, monkeypatch, capsys):
    monkeypatch.setattr(tune, "run_trial", smaller_is_faster)
    assert tune.main(["sm90", "--head_dim", "128", "--seq_len", "1024", "--no-causal"]) == 0
    printed = capsys.readouterr().out
    assert "(128, 128, False, 2, 1024) {'block_n': 48}: ok 1.250 (worst 1.250)" in printed
    winner = "{'block_n': 48, 'stages': 2, 'q_stages': 2, 'rescale': 'scaled rows', 'hold': True, 'cost': 0.73}"
    assert f"with {winner}" in printed
    assert "'block_n': 192" not in printed  # two stages of 96 KiB and 64 KiB of queries


@pytest.mark.parametrize(
    "flags, message",
    [
        (["gfx950"], "invalid choice: 'gfx950'"),
        (["generic", "--budget", "0"], "--budget must be positive, got 0"),
        (["generic", "--head_dim", "512"], "the generic kernel's table has no ('nvvm', 512)"),
        (["sm90", "--head_dim", "264"], "the sm90 kernel's table has no (264, 264, True) for 512 keys"),
        (["generic", "--seq_len", "-1"], "seq_len must be at least 1, got -1"),
    ],
)
def test_bad_flags(flags, message, pretended_gpu, capsys):
    with pytest.raises(SystemExit) as exit_:
        tune.main(flags)
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_no_gpu_is_said(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["generic"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
