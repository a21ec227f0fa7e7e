"""Which kernel serves the backward pass of which call, and what `python -m fly paths --backward` says about it."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from fly import config
from fly.__main__ import main
from fly.errors import ConfigError, UnsupportedError
from kernels import dispatch
from kernels.arguments.callers import plain
from kernels.dispatch import AMD, BACKWARD, BACKWARD_KERNELS, NVIDIA, as_backward, choose
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.problem.catalogue import BY_NAME
from tests.kernels.call.test_dispatch import REQUEST

GENERIC = BACKWARD_KERNELS[-1]
# stands for a kernel that is faster where it serves
FAST = replace(GENERIC, name="fast", archs=("sm_90a",), head_dims=(64, 128), features=("packed",))


@pytest.fixture
def two(monkeypatch):
    """A table of two kernels, of which any may be forced."""
    monkeypatch.delenv(config.BACKWARD_KERNEL.name, raising=False)
    monkeypatch.setattr(dispatch, "BACKWARD_KERNELS", (FAST, GENERIC))
    monkeypatch.setattr(dispatch, "BACKWARD", replace(BACKWARD, forced=replace(config.BACKWARD_KERNEL, parse=str)))
    return dispatch.BACKWARD


@pytest.mark.parametrize("arch", AMD + NVIDIA)
def test_every_target_has_a_backward_kernel_that_can_be_loaded(arch):
    assert callable(dispatch.serve(arch, REQUEST, BACKWARD))


def test_rows_name_known_features_and_a_module():
    for kernel in BACKWARD_KERNELS:
        assert set(kernel.features) <= set(BY_NAME) and kernel.reason and not kernel.tuning
        assert callable(importlib.import_module(kernel.module, "kernels").prepare)


def test_the_first_kernel_that_can_is_chosen(two):
    assert choose("sm_90a", REQUEST, two).name == "fast"
    assert choose("gfx950", REQUEST, two).name == "generic"
    assert choose("sm_90a", replace(REQUEST, features=("softcap",)), two).name == "generic"


def test_a_kernel_can_be_forced(two, monkeypatch):
    monkeypatch.setenv(two.forced.name, "generic")
    assert choose("sm_90a", REQUEST, two).name == "generic"
    monkeypatch.setenv(two.forced.name, "fast")
    with pytest.raises(UnsupportedError) as caught:
        choose("gfx950", REQUEST, two)
    assert str(caught.value) == (
        "FLY_BACKWARD_KERNEL=fast: the fast kernel runs on sm_90a, not on gfx950; unset FLY_BACKWARD_KERNEL, and the "
        "backward pass chooses its kernel for target gfx950"
    )


def test_each_kernel_says_why_it_does_not_serve_a_call(two):
    with pytest.raises(UnsupportedError) as caught:
        choose("sm_90a", replace(REQUEST, features=("paged",), head_dim=32), two)
    text = str(caught.value)
    assert text.startswith(
        "no backward kernel serves this call on target sm_90a: the fast kernel takes head_dim 64, 128"
    )
    assert "; the generic kernel does not do keys in pages (block_table) yet: gather a sequence's pages" in text
    with pytest.raises(
        UnsupportedError, match="the backward pass has no kernel for target gfx90a; targets: gfx942, "
    ):
        choose("gfx90a", REQUEST, two)


def test_every_variables_value_is_a_kernels_name():
    for kernel in BACKWARD_KERNELS:
        with config.BACKWARD_KERNEL.set_to(kernel.name):
            assert choose(kernel.archs[0], REQUEST, BACKWARD) is kernel
    accepted = ", ".join(repr(name) for name in ("", *(kernel.name for kernel in BACKWARD_KERNELS)))
    with (
        config.BACKWARD_KERNEL.set_to("sm80"),
        pytest.raises(ConfigError, match=f"FLY_BACKWARD_KERNEL='sm80': expected one of {accepted}$"),
    ):
        choose("sm_90a", REQUEST, BACKWARD)


def test_what_the_forward_kernel_is_told_does_not_decide():
    """Its tuning is not the backward kernel's, and what is not aligned is copied."""
    asked = replace(REQUEST, tuning={"waves_per_eu": 2}, alignment=2, kv_alignment=2)
    needing = replace(GENERIC, needs=(dispatch.aligned(16),))
    assert dispatch.refusal(needing, "gfx950", asked) is not None
    assert dispatch.refusal(needing, "gfx950", as_backward(asked)) is None


@pytest.mark.parametrize("feature", [name for name in BY_NAME if name not in GENERIC.features])
def test_missing_features_are_refused_with_an_alternative(feature):
    what, instead = map(plain, BY_NAME[feature].told)
    text = f"does not do {what} yet: {instead}"
    assert dispatch.refusal(GENERIC, "gfx942", replace(REQUEST, features=(feature,))) == text


def small(length: int) -> list[torch.Tensor]:
    return [torch.randn(1, length, 1, 32).bfloat16().requires_grad_() for _ in range(3)]


def test_calls_go_by_the_table(emulate, monkeypatch):
    """A kind of call is prepared by the chosen kernel once for each target and each value of the variable."""
    emulate("gfx950", "generic")
    made = []

    def prepare_function(kernel):
        def prepare(tensors, request):
            made.append((config.ARCH.get(), kernel.name) if "dout" in tensors else None)
            return of_kernel(tensors, request)

        of_kernel = original(kernel)
        return prepare

    original = dispatch.prepare_function
    monkeypatch.setattr(dispatch, "prepare_function", prepare_function)
    for arch, forced in (("gfx950", ""), ("gfx950", ""), ("gfx950", "generic"), ("gfx942", "generic")):
        monkeypatch.setenv(config.ARCH.name, arch)
        monkeypatch.setenv(config.BACKWARD_KERNEL.name, forced)
        flydsl_flash_attn_func(*small(length=9)).sum().backward()
    assert [x for x in made if x] == [("gfx950", "generic"), ("gfx950", "generic"), ("gfx942", "generic")]


def test_a_call_is_refused_when_it_is_made(emulate, monkeypatch):
    """Not when someone asks for its gradients."""
    emulate("gfx950", "generic")
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, "generic")
    monkeypatch.setattr(dispatch, "BACKWARD_KERNELS", (replace(GENERIC, head_dims=(64,)),))
    with pytest.raises(UnsupportedError, match="FLY_BACKWARD_KERNEL=generic: the generic kernel takes head_dim 64"):
        flydsl_flash_attn_func(*small(length=10))
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, "sm80")
    with pytest.raises(ConfigError, match="expected one of '', 'gfx942', 'gfx950', 'sm90', 'sm90_wide', 'generic'"):
        flydsl_flash_attn_func(*small(length=10))


def shown(capsys, *arguments: str) -> list[str]:
    """The lines that `python -m fly paths --backward` prints."""
    assert main(["paths", "--backward", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_paths_shows_the_table(capsys):
    text = "\n".join(shown(capsys))
    for kernel in BACKWARD_KERNELS:
        assert kernel.name in text and kernel.archs[0] in text
    assert "dropout" in text and "gfx950_fp8" not in text


def test_paths_says_what_is_chosen_and_why_others_are_not(capsys, monkeypatch):
    monkeypatch.delenv(config.BACKWARD_KERNEL.name, raising=False)
    flags = ("--arch", "gfx950", "--head-dim", "128")
    assert [line.split()[:3] for line in shown(capsys, *flags)] == [
        ["gfx950", "gfx950", "chosen"],
        ["gfx950", "generic", "could"],
    ]
    # neither is the backward pass's
    assert "chosen" in shown(capsys, *flags, "--alignment", "2", "--tuning", "daz")[0]
    paged = shown(capsys, *flags, "--feature", "paged")
    assert "no: it does not do keys in pages (block_table) yet: gather" in paged[0]
    assert paged[-1].split()[:3] == ["gfx950", "(none)", "such"]
    monkeypatch.setenv(config.BACKWARD_KERNEL.name, "generic")
    forced = shown(capsys, *flags, "--feature", "paged")
    assert "FLY_BACKWARD_KERNEL=generic: the generic kernel does not do keys in pages" in " ".join(forced)
    assert forced[-1] == "FLY_BACKWARD_KERNEL=generic is set"
