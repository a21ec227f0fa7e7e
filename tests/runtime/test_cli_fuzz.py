"""Bad values on the command line: exit status 2 and one line that names the option, never a traceback."""

from __future__ import annotations

import os
import random
import secrets

import numpy as np
import pytest

from fly.__main__ import main
from fly.emulator import timing
from kernels.work.tile_scheduler import MAX_SPLITS
from tests.emulator.assembly import assemble

BAD = (
    *("", " ", "abc", "-1", "0", "1.5", "1e9", "nan", "inf", "None", "True", "[1]", "{}", "()", "1,2", ":", "=", "²"),
    *("9" * 40, "9" * 5000, "(" * 3000, "0x", "1:2:3", "a,b", "é", "\udcff", "-", "--", "..", "/", "a\0b", "x" * 500),
)
PROFILE_SETTINGS = "batch seq seq_kv heads heads_kv head_dim causal dtype kernel page_size"
INSPECT_SETTINGS = "head_dim causal dtype packed split"
PATHS_SIZES = "head-dim head-dim-v batch seq-len seq-len-kv num-heads num-kv-heads num-kv-splits alignment"
PATHS_NAMES = "arch dtype feature"
LAUNCH = "kernel grid block lds arch"


@pytest.fixture
def status(capsys, monkeypatch, tmp_path):
    """`status(*arguments)`: the exit status of a command and what it printed to stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "k.hsaco").write_bytes(assemble("s_endpgm", "gfx950"))
    np.save(tmp_path / "a.npy", np.zeros(64, np.float32))

    def run(*arguments: str) -> tuple[int, str]:
        try:
            code = main(arguments)
        except SystemExit as exit_:
            code = exit_.code
        return code, capsys.readouterr().err

    return run


def check(status, *arguments: str) -> None:
    code, error = status(*arguments)
    shown = [argument[:60] for argument in arguments]
    assert code == 2, f"{shown}: exit status {code}: {error}"
    assert "error: " in error and "Traceback" not in error, f"{shown}: {error}"
    assert len(error) < 12_000


@pytest.mark.parametrize("name", PROFILE_SETTINGS.split())
def test_settings_of_a_profile(name, status, monkeypatch):
    monkeypatch.setattr(timing, "Session", lambda *_: pytest.fail("a bad value was taken and would be run"))
    optional = ("seq_kv", "heads_kv", "kernel", "page_size")
    for value in BAD:
        if (name, value) != ("causal", "True") and not (value == "None" and name in optional):
            check(status, "profile", "flash_attn", "--set", f"{name}={value}")


@pytest.mark.parametrize("name", INSPECT_SETTINGS.split())
def test_settings_of_an_inspection(name, status):
    for value in BAD:
        if value != "True" or name in ("head_dim", "dtype"):
            check(status, "inspect", "flash_attn", "--set", f"{name}={value}")


@pytest.mark.parametrize("option", ["arch", "stage", "block", "args", "set", "kernel"])
def test_options_of_an_inspection(option, status):
    kernel = "kernels.work.split_combine:split_combine"
    for value in BAD:
        if option == "kernel":
            check(status, "inspect", f"{value or '-'}:x" if value.strip("-") else "x:")
        else:
            check(status, "inspect", kernel, f"--{option}={value}")


def test_code_that_fails_on_a_setting_is_named_with_its_place(status):
    code, error = status(
        *("inspect", "kernels.flash_attn_generic:flash_attn_generic", "--set", "options=3", "--args"),
        "bf16[4] bf16[4] bf16[4] bf16[4] f32[3] f32 none none",
    )
    assert code == 2 and "AttributeError" in error and "flash_attn_generic.py:" in error


@pytest.mark.parametrize("command", ["paths", "inspect"])
@pytest.mark.parametrize("option", [*PATHS_SIZES.split(), *PATHS_NAMES.split()])
def test_options_that_describe_a_call(command, option, status):
    for value in BAD:
        if (option, value) != ("num-kv-splits", "0"):
            check(status, command, f"--{option}={value}")


def test_the_largest_number_of_splits(status):
    assert status("paths", f"--num-kv-splits={MAX_SPLITS}")[0] == 0
    check(status, "paths", f"--num-kv-splits={MAX_SPLITS + 1}")


def test_any_tuning_option_may_be_asked_for(status):
    for value in BAD:
        if value != "--":
            assert status("paths", f"--tuning={value}")[0] == 0


@pytest.mark.parametrize("command", ["emulate", "profile"])
@pytest.mark.parametrize("option", LAUNCH.split())
def test_options_of_launches(command, option, status):
    for value in BAD:
        if (option, value) not in [("kernel", ""), ("lds", "0"), ("block", ""), ("block", "1,2"), ("grid", "1,2")]:
            check(status, command, "k.hsaco", f"--{option}={value}")


FORMS = ("{}", "i32:{}", "f32:{}", "u64:{}", "in:{}", "out:{}", "out:-:f32[{}]", "out:-:{}[4]")


@pytest.mark.parametrize("form", FORMS)
def test_arguments_of_launches(form, status):
    for value in BAD:
        code, error = status("emulate", "k.hsaco", f"--args={form.format(value)}")
        shown = form.format(value)[:60]
        assert code in (0, 2) and "Traceback" not in error, f"{shown}: {code}, {error}"
        assert code == 2 or value in ("nan", "inf") or any(c.isdigit() for c in value), shown


@pytest.mark.parametrize("option", ["budget", "trace-wave", "trace-lanes"])
def test_options_of_the_emulator(option, status):
    for value in BAD:
        if (option, value) not in [
            ("budget", "0"),
            ("trace-lanes", "0"),
            ("trace-lanes", "1,2"),
            ("trace-wave", "0"),
        ]:
            check(status, "emulate", "k.hsaco", "--trace", f"--{option}={value}")


@pytest.mark.parametrize("option", ["workgroup", "resident", "cold", "figure", "cycles"])
def test_options_of_the_model(option, status):
    for value in BAD:
        if (option, value) not in [("workgroup", "0"), ("cold", "0")]:
            check(status, "profile", "k.hsaco", f"--{option}={value}")


@pytest.mark.parametrize("value", BAD)
def test_figures(value, status):
    if value not in ("1.5", "1e9"):
        check(status, "profile", "k.hsaco", "--figure", f"exp={value}")


def test_files(status, tmp_path):
    for value in BAD:
        for command in ("emulate", "profile"):
            check(status, command, "--", value)


def test_damaged_code_objects(status, tmp_path):
    seed = secrets.randbits(32)
    rng = random.Random(seed)
    whole = (tmp_path / "k.hsaco").read_bytes()
    for i in range(150):
        data = bytearray(whole[: rng.choice([len(whole), rng.randrange(5, len(whole))])])
        for _ in range(rng.randint(0, 12)):
            data[rng.randrange(4, len(data))] = rng.randrange(256)
        (tmp_path / "damaged.hsaco").write_bytes(data)
        try:
            code, error = status("emulate", "damaged.hsaco", "--list")
        except Exception as raised:
            raise AssertionError(f"seed {seed}, file {i}: {raised!r}") from raised
        assert code in (0, 1, 2) and "Traceback" not in error, f"seed {seed}, file {i}"


def test_the_environment_is_printed_whatever_it_is(status, monkeypatch):
    for value in ("abc", "-1", "\udcff", "é"):
        monkeypatch.setitem(os.environ, "FLY_CACHE_SIZE_MB", value)
        monkeypatch.setitem(os.environ, "FLY_LLD", value)
        assert status("env")[0] == 0
