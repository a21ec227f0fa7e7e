"""CPU seconds of first calls, forward and backward, each in a process of its own and without the disk cache.

    python benchmarks/cold_compiles.py                          # on a GPU, the driver's part among them
    python benchmarks/cold_compiles.py --head_dim 64 128 --jobs 16 --most 3
    python benchmarks/cold_compiles.py --device cpu --head_dim 64 --form plain     # for the emulated or simulated GPU

A line is one kind of call. "loading" is what the process's first kernel takes, a small one, with MLIR, LLVM and the
driver; it is in neither of the others. In the emulator the kernels' run is in the figures. Exit code 1 where a pass
takes more than `--most` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script
    sys.path.insert(0, str(ROOT))

FORMS = ("plain", "packed", "dropout", "window", "functions")
TOKENS, HEADS = 256, 4


def options_of(form: str, tokens: int, device: str) -> dict[str, Any]:
    """Keyword arguments of `flydsl_flash_attn_func` for a form of call."""
    import torch

    import fly

    if form == "packed":
        ends = torch.tensor([0, tokens // 3, tokens], dtype=torch.int32, device=device)
        longest = {"max_seqlen_q": tokens, "max_seqlen_kv": tokens}
        return {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, **longest}
    dropout = {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2], device=device)}
    functions = {
        "score_mod": lambda score, b, h, q, k: score - abs(q - k).to(fly.f32) * 0.01,
        "mask_mod": lambda b, h, q, k: (q + k) % 7 != 0,
    }
    return {
        "plain": {},
        "dropout": dropout,
        "window": {"window_size": (tokens // 4, 3), "softcap": 5.0},
        "functions": functions | dropout,
    }[form]


def compiled_here(head_dim: int, form: str, causal: bool, device: str) -> dict[str, float]:
    """CPU seconds of this process: its first kernel, the first forward pass with a gradient, and its backward."""
    import torch

    from kernels.flash_attn_interface import flydsl_flash_attn_func
    from kernels.merging import merge_states

    torch.set_num_threads(1)
    tokens = TOKENS if device == "cuda" else TOKENS // 8
    shape = (tokens, HEADS, head_dim) if form == "packed" else (1, tokens, HEADS, head_dim)
    leaves = [torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3)]
    # torch's own first calls: at the first gradient that it is given, it loads modules for more than a second
    squares = [x.float().square() for x in leaves]
    torch.autograd.grad(squares, leaves, [*map(torch.ones_like, squares)])
    options = options_of(form, tokens, device)

    def loading() -> None:
        x = torch.randn(tokens, 1, 64, device=device).bfloat16()
        lse = torch.randn(1, tokens, device=device)
        merge_states([x, x], [lse, lse])

    found: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        found[name] = time.process_time() - start
        return result

    timed("loading", loading)
    out = timed("forward", lambda: flydsl_flash_attn_func(*leaves, causal, **options))
    timed("backward", lambda: torch.autograd.grad(out, leaves, torch.randn_like(out)))
    return found


def in_a_process(case: tuple[int, str, bool], device: str) -> dict[str, float]:
    """`compiled_here` in a process of its own.

    Raises:
        RuntimeError: it ended with an error, whose text is the message.
    """
    environment = {**os.environ, "FLY_CACHE": "0"}
    command = [sys.executable, str(Path(__file__).resolve()), "--one", json.dumps([*case, device])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stderr.strip()}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument("--head_dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--most", type=float, metavar="S", default=float("inf"), help="CPU seconds of a pass")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    args = _parser().parse_args(arguments)
    if args.one:
        print(json.dumps(compiled_here(*json.loads(args.one))))
        return 0
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    cases = [(dim, form, args.causal) for dim in args.head_dim for form in args.form]
    print(f"{'dim':>4} {'form':10} {'loading s':>9} {'forward s':>9} {'backward s':>10}")
    worst = 0.0
    with ThreadPoolExecutor(args.jobs) as pool:
        for (dim, form, _), found in zip(cases, pool.map(lambda case: in_a_process(case, device), cases)):
            worst = max(worst, found["forward"], found["backward"])
            figures = f"{found['loading']:9.2f} {found['forward']:9.2f} {found['backward']:10.2f}"
            print(f"{dim:4} {form:10} {figures}", flush=True)
    print(f"the slowest pass: {worst:.2f} s")
    return int(worst > args.most)


if __name__ == "__main__":
    sys.exit(main())
