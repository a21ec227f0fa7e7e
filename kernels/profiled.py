"""Calls that `python -m fly profile` knows by name. Imports nothing heavy before one is made."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fly import config
from fly.errors import ArgumentError
from fly.runtime.library import ProfiledCall
from fly.runtime.shown import shown

if TYPE_CHECKING:
    import torch

    from fly.emulator.timing import Launch

# by name, torch's
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f8e4m3": "float8_e4m3fn",
    "f8e4m3fnuz": "float8_e4m3fnuz",
}
# what a setting of `flash_attention` may be, in words and as a test; None stands for the default
_COUNT = ("a whole number from 1", lambda value: type(value) is int and 1 <= value < 2**31)
_PLACES = ("1 to 65535", lambda value: type(value) is int and 1 <= value < 2**16)  # of a grid that is not folded
_SETTINGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("seq", "seq_kv", "head_dim", "page_size"), _COUNT),
    **dict.fromkeys(("batch", "heads", "heads_kv"), _PLACES),
    "causal": ("True or False", lambda value: type(value) is bool),
    "dtype": (", ".join(_DTYPES), lambda value: value in (*_DTYPES,)),
    "kernel": ("a kernel's name, as in FLY_KERNEL", lambda value: type(value) is str and value != ""),
}
_OPTIONAL = ("seq_kv", "heads_kv", "kernel", "page_size")


def check_settings(**settings: Any) -> None:
    """Check settings of `flash_attention`.

    Raises:
        ArgumentError: a value that is not accepted, or tensors larger than this machine's memory.
    """
    for name, value in settings.items():
        accepted, fits = _SETTINGS[name]
        if not (fits(value) or (value is None and name in _OPTIONAL)):
            raise ArgumentError(f"--set {name}={shown(value)}; accepted: {accepted}")
    chosen = inspect.signature(flash_attention).bind(**settings)
    chosen.apply_defaults()
    size = chosen.arguments
    keys = size["seq_kv"] or size["seq"]
    elements = size["batch"] * size["seq"] * size["heads"] + size["seq"] + 2 * keys
    needed = 4 * elements * size["head_dim"] + 4 * size["batch"] * (-(-keys // (size["page_size"] or keys)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ArgumentError(f"--set: these sizes need about {needed} bytes; this machine has {memory}")


def flash_attention(
    batch: int = 1,
    seq: int = 2048,
    seq_kv: int | None = None,
    heads: int = 8,
    heads_kv: int | None = None,
    head_dim: int = 128,
    causal: bool = False,
    dtype: str = "bf16",
    kernel: str | None = None,
    page_size: int | None = None,
) -> Any:
    """A flash-attention call of these sizes on CPU tensors; returns what owns their memory.

    Args:
        dtype: bf16, f16, f8e4m3 or f8e4m3fnuz. kernel: as `FLY_KERNEL`. page_size: keys in pages of so many, in
            random order.

    Raises:
        ArgumentError: another dtype.
    """
    import torch

    from .flash_attn_interface import flydsl_flash_attn_func

    if dtype not in _DTYPES:
        raise ArgumentError(f"--set dtype={dtype!r}; accepted: {', '.join(_DTYPES)}")
    generator = torch.Generator().manual_seed(0)

    def tensor(length: int, count: int) -> torch.Tensor:
        # heads and batches share one head's memory: only a few workgroups are executed
        one = torch.rand(1, length, 1, head_dim, generator=generator) * 2 - 1
        return one.to(getattr(torch, _DTYPES[dtype])).expand(batch, -1, count, -1)

    q = tensor(seq, heads)
    k, v = (tensor(seq_kv or seq, heads_kv or heads) for _ in range(2))
    pages: dict[str, Any] = {}
    if page_size is not None:
        count = -(-k.shape[1] // page_size)
        lengths = torch.full((batch,), k.shape[1], dtype=torch.int32)
        k, v = (_paged(x, page_size, count) for x in (k, v))
        order = torch.randperm(count, generator=generator).to(torch.int32)
        pages = {"block_table": order.expand(batch, -1).contiguous(), "seqused_kv": lengths}
    with config.KERNEL.set_to(kernel):
        return q, k, v, pages, flydsl_flash_attn_func(q, k, v, causal=causal, **pages)


def _paged(tensor: Any, page_size: int, count: int) -> Any:
    """The first sequence of (B, S, H, D), whose heads share memory, as `count` pages; the last one's rest is zero."""
    one = tensor.new_zeros(count * page_size, 1, tensor.shape[3])
    one[: tensor.shape[1]] = tensor[0, :, :1]
    return one.unflatten(0, (count, page_size)).expand(-1, -1, tensor.shape[2], -1)


def placed(launch: Launch, **settings: Any) -> Launch:
    """A captured flash-attention launch with the query block as each workgroup's place.

    Args:
        settings: of `flash_attention`, for which the launch was captured.
    """
    from fly.backends.target import target
    from fly.emulator.timing.launch import Places

    from .work.tile_scheduler import shared_keys_place

    chosen = inspect.signature(flash_attention).bind(**settings)
    chosen.apply_defaults()
    blocks, heads, _ = launch.grid
    key_heads = chosen.arguments["heads_kv"] or heads
    xcds = target(launch.program.arch).xcds

    def place(workgroup: int) -> int:
        block: int = shared_keys_place(workgroup, launch.grid, key_heads, xcds)[0]
        return blocks - 1 - block if chosen.arguments["causal"] else block

    return replace(launch, places=Places(blocks, place, blocks * (heads // key_heads)))


CALLS = {
    "flash_attn": ProfiledCall(
        flash_attention,
        "--set batch=1 seq=2048 seq_kv=… heads=8 heads_kv=… head_dim=128 causal=False\n"
        "        dtype=bf16|f16|f8e4m3|f8e4m3fnuz kernel=generic|gfx950|gfx950_fp8|… page_size=… (keys in pages)",
        check_settings,
        placed,
    )
}
