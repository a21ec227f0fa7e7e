"""Compiles `benchmarks/triton_attention.py` for an AMD GPU, without one; `objects.py` runs this in its own process.

    python -m benchmarks.foreign.compile_triton JSON

Needs triton and torch. Writes a code object for each of the kernel's configurations and of AMD_TILES.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# BLOCK_M, BLOCK_N, waves, stages beside those of `triton_attention`, which are for NVIDIA's shared memory: the fewer
# keys and stages that Triton's own tutorial tries on AMD GPUs, and blocks of 256 rows
AMD_TILES = (
    (128, 64, 4, 1), (128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (128, 64, 8, 2),
    (256, 64, 8, 2),
)  # fmt: skip


def main(chosen: dict[str, Any]) -> None:
    """Compile, and print what a launch of each configuration needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks import triton_attention

    function = triton_attention._forward.fn
    pointers, numbers = ("q", "k", "v", "out"), ("seq_len", "seq_len_kv")
    strides = [f"{tensor}{axis}" for tensor in "qkvo" for axis in "bsh"]
    given = {
        **dict.fromkeys(pointers, "*bf16"),
        "scale": "fp32",
        **dict.fromkeys(("heads", *numbers, *strides), "i32"),
    }
    made = []
    amd = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w, num_stages=s) for m, n, w, s in AMD_TILES]
    for config in [*triton_attention.CONFIGS, *amd]:
        # the launcher makes a constant of an argument that is 1, here the heads that share keys
        constants = {"group": 1, "CAUSAL": chosen["causal"], "HEAD_DIM": chosen["head_dim"], **config.kwargs}
        signature = {name: "constexpr" if name in constants else given[name] for name in function.arg_names}
        divisible = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(function.arg_names)
            if name in (*pointers, *numbers, *strides)
        }
        source = ASTSource(function, signature, constants, divisible)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        done = triton.compile(source, target=GPUTarget("hip", chosen["arch"], 64), options=options)
        path = Path(chosen["directory"], f"triton-{len(made)}.hsaco")
        path.write_bytes(done.asm["hsaco"])
        rows = config.kwargs["BLOCK_M"]
        made.append({
            "path": str(path), "rows": rows, "threads": 64 * config.num_warps, "lds": done.metadata.shared,
            "arguments": [name for name in function.arg_names if name not in constants],
            "tiles": f"{rows} x {config.kwargs['BLOCK_N']}, {config.num_warps} waves, {config.num_stages} stages",
        })  # fmt: skip
    print(json.dumps(made))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
