"""`@fly.tune` in the emulator, whose measure is the timing model's cycles."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fly
from fly.__main__ import main
from fly.errors import ArgumentError, KernelDefinitionError, ShapeError
from fly.runtime import paired, tune, tuned_results
from fly.runtime.device import CPU, device_for
from fly.runtime.launch import bindings
from fly.runtime.planned import planning

CANDIDATES = [{"vector": 1}, {"vector": 4}, {"vector": 3}]


@fly.kernel
def scale(x: fly.Tensor, factor: fly.f32, *, vector: int, offset: float = 0.0):
    """x = x * factor + offset, by threads that each move `vector` elements at a time, eight times as many in all."""
    if vector == 3:
        raise ShapeError("vector is 3; accepted: powers of two")
    (threads, _, _) = fly.block_dim()
    tile = fly.Layout((threads, vector), (vector, 1))
    for turn in range(8 // vector):
        part = x.tile(tile.size, fly.block_id.x * (8 // vector) + turn).share(tile, fly.thread_id.x)
        part.store(part.load() * factor + offset)


@pytest.fixture(autouse=True)
def own_results(tmp_path, monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setenv("FLY_CACHE_DIR", str(tmp_path / "cache"))


def tuned(candidates=CANDIDATES, **options):
    return fly.tune(candidates, **options)(scale)


def results():
    """What is kept, as (kernel's name, result)."""
    kept = tuned_results.kept(tune.device_name(device_for(CPU), CPU))
    return [(name.rpartition(".")[2], result) for name, of in kept.items() for result in of.values()]


def test_the_fewest_cycles_win_and_contents_are_put_back():
    kernel, x = tuned(), torch.ones(64 * 8)
    kernel[1, 64](x, 2.0)
    assert (x == 2).all()
    ((name, result),) = results()
    cycles = result["trials"]
    assert name == "scale" and result["unit"] == "cycles"
    assert cycles["vector=int 3"] == "ShapeError: vector is 3; accepted: powers of two" or "ShapeError" in str(cycles)
    assert (
        result["chosen"] == "vector=int 4" and result["speed"] == cycles["vector=int 1"] / cycles["vector=int 4"] > 1
    )


def test_a_choice_is_made_once_and_kept_for_other_processes(monkeypatch):
    kernel, array = tuned(), np.ones(64 * 8, np.float32)
    kernel[1, 64](array, 2.0)
    assert (array == 2).all()
    monkeypatch.setattr(tune.Tuned, "_tried", lambda *_: pytest.fail("tried again"))
    kernel[1, 64](array, 2.0)
    tuned()[1, 64](array, factor=0.25)
    assert (array == 1).all()


def test_what_by_says_and_other_static_parameters_have_a_choice_of_their_own():
    kernel = tuned(by=lambda x, factor: x.shape)
    for count, offset in ((1, 0.0), (2, 0.0), (2, 1.0)):
        kernel[count, 64](torch.ones(64 * 8 * count), 2.0, offset=offset)
    assert len(results()) == 3


def test_grid_and_block_may_follow_the_candidate():
    kernel, x = tuned([{"vector": 4, "block": 64}, {"vector": 8, "block": 32}]), torch.ones(64 * 8)
    kernel[lambda chosen: 64 // chosen["block"], None](x, 3.0)
    assert (x == 3).all()
    with pytest.raises(ArgumentError, match=r"both the launch and the candidate .* says the block"):
        kernel[1, 64](torch.ones(64 * 4), 3.0)
    with pytest.raises(ArgumentError, match="neither the launch nor the candidate"):
        tuned()[1, None](x, 3.0)


def test_the_first_candidate_is_taken_where_nothing_can_be_timed(monkeypatch):
    monkeypatch.setenv("FLY_ARCH", "sm_80")
    x = torch.ones(64 * 8)
    tuned()[1, 64](x, 2.0)
    assert (x == 2).all() and results() == []


def test_a_planned_launch_plans_all_candidates():
    with planning("sm_90a"), bindings() as found:
        tuned()[1, 64](torch.ones(64 * 8), 2.0)
        tuned()[1, 64](torch.ones(64 * 8), 2.0)
    assert [one.statics["vector"] for one in found] == [4, 3, 1] * 2
    assert results() == []


def test_candidates_that_all_fail_say_why_the_first_does():
    with pytest.raises(ShapeError, match="vector is 3"):
        tuned([{"vector": 3}])[1, 64](torch.ones(64), 1.0)


@pytest.mark.parametrize(
    ("candidates", "rounds", "message"),
    [
        ([], 15, "has 0 candidates and 15 rounds"),
        (CANDIDATES, 0, "has 3 candidates and 0 rounds"),
        ([{"width": 1}], 15, "no static parameter 'width'; it has vector, offset"),
    ],
)
def test_mistakes_are_named_where_the_kernel_is_defined(candidates, rounds, message):
    with pytest.raises(KernelDefinitionError, match=message):
        tuned(candidates, rounds=rounds)
    with pytest.raises(ArgumentError, match=r"takes \[grid, block\]"):
        tuned()[1]


def test_results_are_carried_to_another_machine(tmp_path, monkeypatch, capsys):
    tuned()[1, 64](torch.ones(64 * 8), 2.0)
    file = tmp_path / "tuned.json"
    assert main(["tuned"]) == 0 and "vector=int 4: 1." in capsys.readouterr().out
    assert main(["tuned", "--export", str(file)]) == 0
    monkeypatch.setenv("FLY_CACHE_DIR", str(tmp_path / "there"))
    assert results() == [] and main(["tuned"]) == 0 and "no results in" in capsys.readouterr().out
    assert main(["tuned", "--import", str(file)]) == 0 and "1 results from" in capsys.readouterr().out
    monkeypatch.setattr(tune.Tuned, "_tried", lambda *_: pytest.fail("tried again"))
    tuned()[1, 64](torch.ones(64 * 8), 2.0)
    monkeypatch.setenv("FLY_CACHE", "0")
    assert results() == [] and fly.import_tuned(file) == fly.export_tuned(tmp_path / "all.json") == 1


def test_files_of_results_are_checked(tmp_path):
    file = tmp_path / "tuned.json"
    with pytest.raises(ArgumentError, match="cannot be read"):
        fly.import_tuned(file)
    for text in ("[", "{}", '{"schema": 2, "devices": {}}', '{"schema": 1, "devices": {"a": {"k": {"x": {}}}}}'):
        file.write_text(text)
        with pytest.raises(ArgumentError, match="not a file of tuning results"):
            fly.import_tuned(file)


def test_a_choice_that_is_no_candidate_any_more_is_made_again(tmp_path):
    tuned()[1, 64](torch.ones(64 * 8), 2.0)
    (path,) = (tmp_path / "cache" / "tuned").glob("*.json")
    path.write_text(path.read_text().replace('"chosen": "vector=int 4"', '"chosen": "vector=int 16"'))
    tuned()[1, 64](torch.ones(64 * 8), 2.0)
    assert json.loads(path.read_text())["schema"] == 1
    assert results()[0][1]["chosen"] == "vector=int 4"


def test_turns_are_rounds_in_an_order_of_their_own():
    order = paired.turns(["a", "b", "c"], 20, seed=0)
    rounds = [tuple(order[i : i + 3]) for i in range(0, 60, 3)]
    assert all(set(one) == {"a", "b", "c"} for one in rounds) and len(set(rounds)) > 1


def test_a_device_is_named_by_torch_where_it_knows_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda ordinal: f"GPU {ordinal}")
    device = SimpleNamespace(target="sm_90a", compute_units=132)
    assert tune.device_name(device, ("cuda", 3)) == "GPU 3"
    assert tune.device_name(device, CPU) == "emulated or simulated sm_90a, 132 compute units"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_times_candidates_in_turns():
    x = torch.ones(64 * 8, device="cuda")
    kernel = tuned()
    kernel[1, 64](x, 2.0)
    assert (x == 2).all()
    kept = tuned_results.kept(torch.cuda.get_device_name())
    ((result,),) = (of.values() for of in kept.values())
    assert result["unit"] == "ms" and result["chosen"] in ("vector=int 1", "vector=int 4")
    graph = torch.cuda.CUDAGraph()
    other = tuned([{"vector": 2}, {"vector": 8}])
    other[1, 64](torch.ones(64 * 8, device="cuda"), 1.0, stream=torch.cuda.current_stream())
    with torch.cuda.graph(graph):
        other[1, 64](x, 2.0)
    graph.replay()
    assert (x == 4).all()
