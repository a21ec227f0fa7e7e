"""One random valid call: its tensors, its options as the reference takes them, and how it is made of a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import kernels.flash_attn_api
from kernels.flash_attn_interface import flydsl_flash_attn_func
from kernels.integrations import vllm
from tests.kernels.feature_cases import Pair
from tests.kernels.fuzz.fuzz_caches import Appended
from tests.kernels.fuzz.fuzz_draws import CACHE, OURS, VLLM, Build, Placed, bits

NAMES_OF_FLASH_ATTENTION = {
    "num_kv_splits": "num_splits",
    "seqused_kv": "seqused_k",
    "sink": "learnable_sink",
    "cu_seqlens_kv": "cu_seqlens_k",
    "max_seqlen_kv": "max_seqlen_k",
    "return_lse": "return_attn_probs",
}
NAMES = {
    VLLM: NAMES_OF_FLASH_ATTENTION | {"sink": "s_aux", "return_lse": "return_softmax_lse"},
    CACHE: NAMES_OF_FLASH_ATTENTION
    | {
        "k": "k_cache",
        "v": "v_cache",
        "seqused_kv": "cache_seqlens",
        "kv_batch_idx": "cache_batch_idx",
        "return_lse": "return_softmax_lse",
    },
}


@dataclass
class Problem:
    """A call. `exact`: options of the reference; `given`: what kernels get besides, or instead.

    `whole`: the tensor that q, k and v, or k and v, are parts of. `placed`: memory that must not change. `new`: what
    is appended to a cache before.
    """

    build: Build
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    whole: torch.Tensor | None
    exact: dict[str, Any]
    given: dict[str, Any]
    placed: list[Placed]
    ordinary: bool
    new: Appended | None = None
    out: Placed | None = None
    caches: list[Placed] = field(default_factory=list)

    def call(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function and its keyword arguments."""
        build = self.build
        given = {"q": self.q, "k": self.k, "v": self.v, "causal": build.causal, "return_lse": build.lse}
        given |= self.exact | self.given
        for name in ("score_mod", "mask_mod"):
            if isinstance(given.get(name), Pair):
                given[name] = given[name].kernel
        given = {name: value for name, value in given.items() if value is not None}
        if build.function == OURS:
            return flydsl_flash_attn_func, given
        names = NAMES.get(build.function, NAMES_OF_FLASH_ATTENTION)
        given = {names.get(name, name): value for name, value in given.items()}
        if build.function == VLLM:
            return vllm.flash_attn_varlen_func, given
        function = getattr(kernels.flash_attn_api, build.function)
        if self.new is not None:
            given |= self.new.arguments()
        if "kvpacked" in build.function and "qkvpacked" not in build.function:
            del given["k"], given["v"]
            given["kv"] = self.whole
        elif "qkvpacked" in build.function:
            del given["q"], given["k"], given["v"]
            given["qkv"] = self.whole
            if build.packed:
                given["cu_seqlens"], given["max_seqlen"] = given.pop("cu_seqlens_q"), given.pop("max_seqlen_q")
                del given["cu_seqlens_k"], given["max_seqlen_k"]
        elif build.packed and build.function != CACHE:
            given.setdefault("cu_seqlens_k", None)
        return function, given

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """(q, k, v, options) on the CPU, as the reference takes them, after the call."""
        exact = {name: on_device(value, "cpu") for name, value in self.exact.items() if value is not None}
        for name in ("score_mod", "mask_mod"):
            if isinstance(exact.get(name), Pair):
                exact[name] = exact[name].torch
        q = self.q if self.new is None else self.new.rotated_queries(self.q)
        return q.cpu(), self.k.cpu(), self.v.cpu(), exact

    def side_effects(self) -> list[str]:
        """What the call changed that it must not change, and what it should have written into a cache."""
        found = ["an input, or memory around it, was changed"] if any(p.changed() for p in self.placed) else []
        if self.new is not None:
            found += self.new.failures((self.k, self.v), self.caches)
        return found


def on_device(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
        return tuple(x.to(device) for x in value)
    return value


def result_of(result: Any, problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse) of what a function returned."""
    if not problem.build.lse:
        return result, None
    return result[0], result[1]


def outside(problem: Problem, out: torch.Tensor) -> list[str]:
    """What is wrong with an `out` of the caller's: another tensor, or memory around it."""
    if problem.out is None:
        return []
    mine: Mapping[str, Any] = problem.given
    if out is not mine["out"]:
        return ["the result is not `out`"]
    expected = problem.out.before.clone()
    torch.as_strided(expected, out.shape, out.stride(), out.storage_offset()).copy_(out)
    return [] if torch.equal(bits(expected), bits(problem.out.memory)) else ["memory around out was changed"]
