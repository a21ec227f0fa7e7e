"""Host time of a small call's forward and backward pass through autograd, next to torch's SDPA (flash backend).

    python benchmarks/gradient_host.py                      # on a GPU, half a minute
    python benchmarks/gradient_host.py --num_kv_heads 1 --rounds 50
    python benchmarks/gradient_host.py --device cpu --rounds 1 --calls 1    # that it runs, in the emulator

The call is so small that the host decides. In every round each row has one turn of `--calls` calls, in random order,
and the GPU is waited for behind a turn, outside of its time. A line has the best turn's microseconds a call, and the
median and quartiles of a round's ratio to SDPA's row of the same kind, below 1 where ours is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.run_record import versions
from fly.runtime.paired import turns
from kernels.flash_attn_api import flash_attn_func
from kernels.flash_attn_interface import flydsl_flash_attn_func

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Call = Callable[[], object]
PEER = "SDPA flash"
KINDS = ("forward", "grad", "backward")


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Full attention of tensors (B, S, H, D) by torch; on the CPU by whatever torch has there."""
    grouped = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=grouped)
    return out.transpose(1, 2)


ATTENDS: dict[str, Attend] = {
    "flydsl_flash_attn_func": lambda q, k, v: flydsl_flash_attn_func(q, k, v, False),
    "flash_attn_func": flash_attn_func,
    PEER: sdpa,
}


def calls(shape: Sequence[int], kv_heads: int, device: str) -> dict[tuple[str, str], Call]:
    """By (kind, function): a forward pass without gradients, `torch.autograd.grad` of one, and `.backward()`."""
    batch, length, heads, head_dim = shape
    sizes = (heads, kv_heads, kv_heads)
    leaves = [torch.randn(batch, length, n, head_dim, dtype=torch.bfloat16, device=device) for n in sizes]
    dout = torch.randn(*shape, dtype=torch.bfloat16, device=device)
    detached = [x.detach() for x in leaves]
    for x in leaves:
        x.requires_grad_()

    def backward(attend: Attend) -> None:
        attend(*leaves).backward(dout)
        for x in leaves:
            x.grad = None

    made: dict[tuple[str, str], Call] = {}
    for name, attend in ATTENDS.items():
        made["forward", name] = lambda attend=attend: attend(*detached)
        made["grad", name] = lambda attend=attend: torch.autograd.grad(attend(*leaves), leaves, dout)
        made["backward", name] = lambda attend=attend: backward(attend)
    return made


def measure(
    made: dict[tuple[str, str], Call], device: str, rounds: int, count: int
) -> dict[tuple[str, str], list[float]]:
    """Microseconds a call of each in every round."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for call in made.values():
        for _ in range(min(count, 20)):
            call()
        wait()
    names = {f"{kind} {name}": (kind, name) for kind, name in made}
    samples: dict[tuple[str, str], list[float]] = {name: [] for name in made}
    for name in turns(list(names), rounds, seed=0):
        call = made[names[name]]
        start = time.perf_counter()
        for _ in range(count):
            call()
        samples[names[name]].append((time.perf_counter() - start) / count * 1e6)
        wait()
    return samples


def table(samples: dict[tuple[str, str], list[float]]) -> list[str]:
    """Lines of figures."""
    lines = [f"{'kind':8} {'function':22} {'best µs':>8} {'of SDPA':>8} {'quartiles':>14}"]
    for kind in KINDS:
        for name in ATTENDS:
            own, peer = samples[kind, name], samples[kind, PEER]
            ratios = [a / b for a, b in zip(own, peer, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if ratios[1:] else ratios * 3
            lines.append(f"{kind:8} {name:22} {min(own):8.1f} {middle:8.3f} {low:6.3f} to {high:.3f}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seq_len", type=int, default=128)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--num_kv_heads", type=int, help="as many as heads by default")
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=40, help="of a turn; fewer than a GPU's launch queue holds (40)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.calls < 1:
        parser.error(f"--rounds and --calls must be at least 1, got {args.rounds} and {args.calls}")
    gpu = args.device == "cuda"
    print(torch.cuda.get_device_name() if gpu else "emulated,", versions())
    shape = (1, args.seq_len, args.num_heads, args.head_dim)
    made = calls(shape, args.num_kv_heads or args.num_heads, args.device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        samples = measure(made, args.device, args.rounds, args.calls)
    print("\n".join(table(samples)))


if __name__ == "__main__":
    main()
