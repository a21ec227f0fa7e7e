"""The example that trains: a few steps in the emulator, and what it says of losses that are wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.training import example

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "04_train.py"
needs_emulator = pytest.mark.skipif(find_spec("tinygrad") is None, reason="needs the emulator")


@pytest.fixture
def train():
    """The script as a module."""
    return example()


def tiny(train):
    return train.Size(layers=1, width=32, heads=1, length=16, batch=1, steps=2, rate=1e-2, warmup=1)


@needs_emulator
def test_both_attentions_train_alike(train, monkeypatch, tmp_path, capsys):
    """The whole script on a network that takes seconds: losses of every step, speeds and the picture."""
    monkeypatch.setenv("FLY_ARCH", "gfx950")
    monkeypatch.setattr(train, "TOY", tiny(train))
    monkeypatch.setattr(train, "EVERY", 1)
    monkeypatch.setattr(train, "FALLEN", 2.0)  # two steps are not enough for that
    picture = tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cpu", "--picture", str(picture)])
    train.main()
    printed = capsys.readouterr().out
    assert re.findall(r"^step +(\d+): \d\.\d{4} on fly, \d\.\d{4} on torch, 0\.\d{3}% apart$", printed, re.M) == [
        "1",
        "2",
    ]
    assert re.search(r"^fly: [\d.]+ steps/s, torch: [\d.]+ steps/s$", printed, re.M)
    assert printed.endswith("both losses fell, and were within 1% of each other at every tenth step\n")
    assert picture.read_bytes().startswith(b"\x89PNG") or find_spec("matplotlib") is None


def test_networks_and_batches_are_the_same_and_learn(train, monkeypatch):
    """Nothing of a run depends on the one before it, and a loss falls."""
    monkeypatch.setitem(train.ATTENTION, "fly", train.with_torch)
    size = train.Size(layers=1, width=32, heads=1, length=32, batch=4, steps=30, rate=1e-2, warmup=2)
    losses = {name: train.train(name, size, size.steps, "cpu", 3)[0] for name in train.ATTENTION}
    assert losses["fly"] == losses["torch"] and train.mistakes(losses) == []
    assert train.train("torch", size, 2, "cpu", 4)[0] != losses["torch"][:2]  # another seed


@pytest.mark.parametrize(
    ("fly", "message"),
    [
        ([3.0] * 9 + [2.01] + [1.0] * 10, []),
        ([3.0] * 9 + [2.03] + [1.0] * 10, ["at step 10 losses are 1.50% apart; allowed: 1%"]),
        ([3.0] * 9 + [2.0] + [3.0] * 9 + [1.02], ["at step 20 losses are 2.00% apart; allowed: 1%"]),
        ([1.0] * 9 + [2.0] + [1.0] * 10, ["the loss on fly went from 1.000 to 1.000, and not to 0.9 of it"]),
        ([3.0] * 9 + [2.0] + [1.0] * 9 + [float("nan")], ["the loss on fly went from 3.000 to nan", "nan% apart"]),
    ],
)
def test_losses_that_are_wrong_are_named(train, fly, message, capsys):
    found = train.mistakes({"fly": fly, "torch": [3.0] * 9 + [2.0] + [1.0] * 10})
    assert len(found) == len(message)
    for text, wanted in zip(found, message, strict=True):
        assert wanted in text
    assert len(re.findall("apart", capsys.readouterr().out)) == 2


@pytest.mark.parametrize(("flag", "value"), [("--steps", "0"), ("--size", "huge"), ("--device", "tpu")])
def test_bad_flags(train, flag, value, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), flag, value])
    with pytest.raises(SystemExit):
        train.main()
    assert flag in capsys.readouterr().err


def test_it_is_short_enough_to_read():
    assert len(SCRIPT.read_text().splitlines()) <= 210


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_training_on_a_gpu(tmp_path):
    """At its full size, as a user runs it."""
    command = [sys.executable, str(SCRIPT), "--picture", str(tmp_path / "losses.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
