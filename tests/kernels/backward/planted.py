"""Calls in which a bug is planted: nothing that was planned or traced outlives them, and how a bug shows."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from fly import config
from fly.errors import EmulatorError, SimulatorReportError
from fly.lang.kernel import Kernel
from kernels import dispatch, flash_attn_interface
from kernels.call import gradients as calls
from tests.kernels.sm90.planting import Bug

Cases = Mapping[str, Callable[[int], bool]]  # by name: whether something is wrong in a call with this seed


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls plan and trace everything anew, and what they made is forgotten when the test ends.

    Results of the backward pass have memory of their own, so that what is not written of them is found.
    """
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    monkeypatch.setattr(calls, "_kinds", {})
    monkeypatch.setattr(calls, "MOST_SHARED", 0)
    for row in (*dispatch.KERNELS, *dispatch.BACKWARD_KERNELS):  # a module that a test loads would stay as it is
        importlib.import_module(row.module, dispatch.__package__)
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "kernels"]
    kernels = {id(x): x for module in modules for x in vars(module).values() if isinstance(x, Kernel)}
    for kernel in kernels.values():
        monkeypatch.setattr(kernel, "launcher", None)


@contextmanager
def running(arch: str, backward: str = "generic", forward: str = "generic") -> Iterator[None]:
    """CPU tensors belong to an emulated GPU with these kernels; "" leaves one to its dispatch table."""
    with (
        config.ARCH.set_to(arch),
        config.BACKWARD_KERNEL.set_to(backward),
        config.KERNEL.set_to(forward),
    ):
        yield


def shown(cases: Cases, bug: Bug, monkeypatch: pytest.MonkeyPatch, seed: int) -> str:
    """How a planted bug shows in its case: "wrong", the kind of a simulator's report, a "report", or "nothing"."""
    bug.plant(monkeypatch)
    try:
        return "wrong" if cases[bug.case](seed) else "nothing"
    except SimulatorReportError as error:
        return error.reports[0].kind
    except EmulatorError:
        return "report"
