"""Environment variables: set for a while, and as hot paths read them."""

from __future__ import annotations

import os

import pytest

from fly import config

NAME = config.KERNEL.name


@pytest.mark.parametrize("before", [None, "generic"])
@pytest.mark.parametrize("text", [None, "sm90"])
def test_a_variable_is_set_for_a_while(monkeypatch, before, text):
    monkeypatch.delenv(NAME, raising=False) if before is None else monkeypatch.setenv(NAME, before)
    with pytest.raises(KeyError), config.KERNEL.set_to(text):
        assert os.environ.get(NAME) == (before if text is None else text)
        raise KeyError
    assert os.environ.get(NAME) == before


def test_the_raw_value_follows_the_environment(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    read = [config.raw_value(config.KERNEL.raw_name)]
    for text in ("generic", "sm90"):
        monkeypatch.setenv(NAME, text)
        read.append(config.raw_value(config.KERNEL.raw_name))
    assert read[0] is None and len(set(read)) == 3
