"""The Hopper kernel's cost model follows from the committed times, and fits find what times say."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks import fit_costs
from kernels.problem.contract import Request
from kernels.sm90 import cost
from kernels.sm90.builds import build_for
from kernels.sm90.cost import DECODE_TIMES, KEYS_ALONE, DecodeTimes, rounds
from kernels.sm90.tiles import TILES

FILES = ("causal_rounds", "decode_splits", "keys_alone")


def test_fits_to_the_committed_times_give_the_committed_numbers(capsys):
    assert fit_costs.main([]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(FILES)


def test_the_committed_numbers_lose_next_to_nothing_on_the_committed_times():
    """Among short causal launches some choices are close."""
    for chosen, mean, most in (
        (fit_costs.causal_choices(fit_costs.read("causal_rounds")), 0.002, 1.03),
        (fit_costs.split_choices(fit_costs.read("decode_splits"), DECODE_TIMES), 0.002, 1.012),
    ):
        assert fit_costs.loss(chosen) < mean and max(taken / best for taken, best in chosen) < most


def test_the_table_of_wider_tiles_follows_from_the_ratios_by_the_rule():
    assert fit_costs.keys_alone(fit_costs.read("keys_alone")) == KEYS_ALONE


def test_worse_numbers_are_fitted_away(monkeypatch, capsys):
    """Combining for nothing makes more parts than measured times say."""
    worse = DecodeTimes(alone=0.95, part=0.0, combine=0.0, combine_split=0.0)
    rows = fit_costs.read("decode_splits")

    def losses(model):
        return fit_costs.loss(fit_costs.split_choices(rows, model))

    assert losses(worse) > fit_costs.MARGIN + losses(DECODE_TIMES)
    fitted = fit_costs.fit(worse, losses)
    assert fitted != worse and losses(fitted) <= losses(DECODE_TIMES) + fit_costs.MARGIN
    monkeypatch.setattr(cost, "DECODE_TIMES", worse)
    assert fit_costs.main([]) == 1
    assert "committed alone=0.95, part=0, combine=0" in capsys.readouterr().out


def test_costs_that_measured_times_contradict_are_said(monkeypatch, capsys):
    """Three consumers' tiles do not take as little time as two consumers'."""
    for key in [key for key in TILES if key[2:4] == (True, 3)]:
        monkeypatch.setitem(TILES, key, TILES[key] | {"cost": 0.7})
    assert fit_costs.main([]) == 1


def times_of(model: DecodeTimes):
    """Rows of measured times that are exactly what `model` says."""
    for blocks in (8, 24, 32, 96, 128, 136):
        for key_tiles in (4, 13, 52, 205, 820):
            launch = {"blocks": blocks, "key_tiles": key_tiles, "tile_bytes": 40 << 10, "units": 132}
            for splits in (n for n in fit_costs.SPLITS if n <= key_tiles):
                yield launch | {"splits": splits, "microseconds": model.of(splits, **launch)}


def test_a_fit_of_decoding_finds_choices_as_good_as_those_of_what_made_the_times():
    rows = list(times_of(DecodeTimes(alone=0.95, part=2.5, combine=9.0, combine_split=0.05)))

    def losses(model):
        return fit_costs.loss(fit_costs.split_choices(rows, model))

    assert losses(DECODE_TIMES) > fit_costs.MARGIN
    fitted = fit_costs.fit(DECODE_TIMES, losses)
    assert fitted != DECODE_TIMES and losses(fitted) < losses(DECODE_TIMES) - fit_costs.MARGIN
    # fewest parts that are within 2 percent: even the true numbers lose that
    assert losses(fitted) < 0.01


def test_numbers_on_which_no_choice_depends_stay():
    rows = list(times_of(DECODE_TIMES))
    assert fit_costs.fit(DECODE_TIMES, lambda m: fit_costs.loss(fit_costs.split_choices(rows, m))) == DECODE_TIMES


def ratio(value, seq_len, block_n=112, spilled=0, consumers=2):
    sizes = {"head_dim": 128, "head_dim_v": 128, "causal": True, "consumers": consumers, "block_n": block_n}
    row = {"kind": "bias", **sizes, "seq_len": seq_len, "ratio": value, "spilled_words": spilled}
    return {name: str(of) for name, of in row.items()}


BUILD = (128, 128, True, 2)


@pytest.mark.parametrize(
    ("rows", "table"),
    [
        ([ratio(0.9, 4096), ratio(0.95, 2048)], {(*BUILD, None): 112}),
        ([ratio(0.9, 4096), ratio(1.01, 2048)], {(*BUILD, 2048): 64, (*BUILD, None): 112}),
        ([ratio(0.9, 4096), ratio(1.01, 1024)], {}),  # nobody knows about 2048
        ([ratio(1.01, 4096), ratio(0.9, 2048)], {}),  # wide tiles are for long sequences
        ([ratio(0.9, 4096), ratio(1.01, 4096)], {}),  # one kind of call is slower
        ([ratio(0.98, 4096)], {}),  # not by enough
        ([ratio(0.9, 4096, spilled=2)], {}),
        ([ratio(0.9, 4096), ratio(0.8, 4096, 96)], {(*BUILD, None): 96}),
        ([ratio(0.9, 4096, spilled=2), ratio(0.95, 4096, 96)], {(*BUILD, None): 96}),
    ],
)
def test_the_rule_of_wider_tiles(rows, table):
    assert fit_costs.keys_alone(rows) == ({"bias": table} if table else {})


@pytest.mark.parametrize(
    ("queries", "keys", "slices", "units", "full", "late", "ahead"),
    [
        (128, 256, 132, 132, 1, 1, 1),
        (128, 256, 133, 132, 2, 2, 2),  # all are as long
        (256, 256, 3, 3, 2, 1.5, 1.5),  # a long one and a short one each
        (256, 256, 4, 3, 3, 2, 2),  # two long ones on one, and four short ones on two
        (256, 128 << 20, 3, 3, 2, 2, 2),  # nearly as long as each other
        # 4, 3, 2 and 1 key tiles, on two: 4 + 1 and 3 + 2; taken ahead, 4 + 2 and 3 + 1
        (512, 512, 1, 2, 2, 5 / 4, 6 / 4),
        (33 * 128, 33 * 128, 50, 5, 330, 170, 170),
        (1, 1, 1, 132, 1, 1, 1),
        (300, 200, 1, 1, 3, 4 * 128 / 200, 4 * 128 / 200),  # 2 key tiles, 1, and one in which nothing is seen
    ],
)
def test_whole_rounds_where_tiles_are_as_long_and_fewer_where_they_are_not(
    queries, keys, slices, units, full, late, ahead
):
    """Tiles of 128 x 128; how long a launch takes next to a tile with all keys."""
    given = queries, keys, (128, 128), slices, units
    assert rounds(*given, False) == full
    assert rounds(*given, True, late=True) == pytest.approx(late, rel=1e-3)
    assert rounds(*given, True) == pytest.approx(ahead, rel=1e-3)


@pytest.mark.parametrize("name", FILES)
def test_committed_times_say_when_and_on_what(name):
    rows = fit_costs.read(name)
    assert rows and all(row["date"] and row["device"] for row in rows)
    assert set(fit_costs.COST_COLUMNS) <= set(rows[0])


def test_only_one_row_serves_a_shape_while_it_is_measured():
    call = Request(64, "bf16", True, False, False, 1, 2048, 2048, 16, 16, 1.0)
    before = dict(TILES)
    for consumers, key in fit_costs._rows_for(64, 64, 2048).items():
        with fit_costs.only(key):
            assert build_for(call, 132)[0].consumers == consumers
            assert (128, 128, False, 2, None) in TILES
        assert before == TILES and list(before) == list(TILES)
    assert set(fit_costs._rows_for(64, 64, 2048)) == {1, 2, 3}


def test_a_run_of_measurements(monkeypatch, tmp_path):
    """From the flag to the file, on a pretended GPU; the file is read as times of a fit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "pretended GPU")
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    record = {"blocks": 96, "key_tiles": 52, "tile_bytes": 40960, "units": 132, "splits": 1, "microseconds": 48.8}
    monkeypatch.setitem(fit_costs.MEASURED, "splits", lambda units: [record, record | {"splits": units}])
    path = tmp_path / "decode_splits.csv"
    assert fit_costs.main(["--measure", "splits", "--csv", str(path), "--commit", "v1"]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["splits"], row["device"], row["commit"]) for row in rows] == [
        ("1", "pretended GPU", "v1"),
        ("132", "pretended GPU", "v1"),
    ]
    assert fit_costs.split_choices(fit_costs.read("decode_splits", tmp_path), DECODE_TIMES)


def test_measuring_needs_a_gpu_and_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fit_costs.main(["--measure", "rounds", "--csv", str(tmp_path / "x.csv")]) == 2
    assert "no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fit_costs.main(["--measure", "rounds"])
    assert "--measure needs --csv FILE" in capsys.readouterr().err
