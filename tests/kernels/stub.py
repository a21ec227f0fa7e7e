"""A stand-in for a compiled kernel, so that what surrounds kernels is tested without a device."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels import dispatch, flash_attn_interface
from kernels.call import plan
from kernels.problem.contract import Launch, Request, Tensors
from tests.kernels.packed import packed_attention
from tests.kernels.reference import attention


class StubKernel:
    """Takes the generic kernel's place: records what is prepared and launched, and computes in torch."""

    def __init__(self) -> None:
        self.prepared: list[Request] = []
        self.launches: list[int | None] = []
        self.workspace_bytes = 0
        self.workspaces: list[torch.Tensor | None] = []

    def prepare(self, tensors: Tensors, request: Request) -> Launch:
        self.prepared.append(request)

        def run(tensors: Tensors, stream: int | None) -> None:
            self.launches.append(stream)
            self.workspaces.append(tensors.get("workspace"))
            options = {"causal": request.causal, "softmax_scale": request.softmax_scale}
            inputs, offsets = (
                [tensors.get(n) for n in names] for names in ("qkv", ("cu_seqlens_q", "cu_seqlens_kv"))
            )
            if offsets[0] is None:
                result, result_lse = attention(*inputs, **options)
            else:
                result, result_lse = packed_attention(*inputs, *offsets, **options)
            tensors["out"].copy_(result)
            if tensors.get("lse") is not None:
                tensors["lse"].copy_(result_lse)

        return Launch(run, self.workspace_bytes)


def rows() -> tuple[dispatch.Kernel, ...]:
    """A dispatch table that stays as it is while kernels come and grow: one that works, behind two unbuilt ones."""
    known = {kernel.name: kernel for kernel in dispatch.KERNELS}
    generic = replace(known["generic"], head_dims=(64, 128), features=("packed", "split_kv"), needs=())
    return replace(known["gfx950"], module=None), replace(known["sm90"], module=None), generic


def install(monkeypatch: pytest.MonkeyPatch, target: str = "gfx950") -> StubKernel:
    """Put a stub in the generic kernel's place on `target`, with no plan kept from before; the table is `rows()`."""
    stub = StubKernel()
    monkeypatch.setattr(dispatch, "KERNELS", rows())
    monkeypatch.setitem(sys.modules, "kernels.flash_attn_generic", SimpleNamespace(prepare=stub.prepare))
    monkeypatch.setattr(plan, "device_of", lambda place: SimpleNamespace(target=target))
    monkeypatch.setattr(flash_attn_interface, "_plans", {})
    for variable in ("FLY_KERNEL", "FLYDSL_DISABLE_DUALWAVE_SWP", "FLY_ARCH"):
        monkeypatch.delenv(variable, raising=False)
    return stub
