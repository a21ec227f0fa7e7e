"""Compiles one of FlyDSL's forward kernels, without a GPU; `objects.py` runs this in a process of its own.

    python compile_flydsl.py CHECKOUT JSON

Importing this needs nothing; running it needs flydsl and torch, and the environment that `objects.flydsl` sets. What
is compiled is found in FLYDSL_DUMP_DIR afterwards. Which kernel and tiles serve a shape, FlyDSL's own dispatch says.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(checkout: str, chosen: dict[str, Any]) -> None:
    """Compile, and print how to launch it: rows and threads of a workgroup, and whether the kernel is dual-wave."""
    sys.path.insert(0, checkout)
    import torch

    from kernels.attention import flash_attn_interface as interface

    heads, head_dim, causal, batch, length = (chosen[n] for n in ("heads", "head_dim", "causal", "batch", "length"))
    q, k, v, out = (torch.zeros(batch, length, heads, head_dim, dtype=torch.bfloat16) for _ in range(4))
    sizes = {"num_heads": heads, "num_kv_heads": heads, "head_dim": head_dim}
    common = {**sizes, "causal": causal, "dtype_str": "bf16"}
    if chosen["arch"] == "gfx950" and interface._dense_routes_to_dualwave(batch, length):
        from kernels.attention.flash_attn_gfx950 import build_flash_attn_dualwave_swp_module

        rows, threads, dual_wave = 256, 512, True
        swizzle = -(-length // rows) >= interface.MIN_Q_BLOCKS_XCD_SWIZZLE
        build = build_flash_attn_dualwave_swp_module(**common, _xcd_swizzle=swizzle)
    else:
        from kernels.attention.flash_attn_generic import build_flash_attn_func_module

        dual_wave = False
        rows, threads, tag = interface._dense_generic_tile(batch, length, heads, head_dim, "bf16", q.device)
        # as its launcher chooses for these lengths, all multiples of 64
        skip = None if causal else True
        tiles = {"block_m": rows, "flat_work_group_size": threads, "path_tag": tag, "skip_kv_pad_mask": skip}
        build = build_flash_attn_func_module(**common, **tiles)
    build.compile(q, k, v, out, batch, length)
    print(json.dumps({"rows": rows, "threads": threads, "dual_wave": dual_wave}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
