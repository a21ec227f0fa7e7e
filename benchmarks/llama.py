"""A Llama of real layer sizes with random weights: prompts and decoding through SDPA, on fly and on its peers.

    python benchmarks/llama.py                           # 32 layers of Llama 3.1 8B, some 20 GB
    python benchmarks/llama.py --layers 4 --context 2048

Every provider runs the same model of plain torch, captured in a CUDA graph, so that the host costs none of them
anything: fly by `fly_attention.activate()`, FlashAttention-2 as torch has it, and cuDNN. They take turns, and ratios
are medians of each turn's. Decoding is one token a sequence over a cache of `--context` tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fly_attention

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
BACKENDS = {
    "fly": SDPBackend.FLASH_ATTENTION,
    "FA2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}


@contextmanager
def attention_of(provider: str) -> Iterator[None]:
    """torch's SDPA is this provider's."""
    if provider == "fly":
        fly_attention.activate()
    try:
        with sdpa_kernel(BACKENDS[provider]):
            yield
    finally:
        if provider == "fly":
            fly_attention.deactivate()


def weights(*shape: int) -> torch.Tensor:
    """Random ones, of a layer's scale."""
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=shape[-1] ** -0.5)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    qkv: torch.Tensor
    out: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def random(cls) -> Layer:
        """A new one."""
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        shapes = (width, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)
        return cls(*(weights(*shape) for shape in shapes))


@dataclass(frozen=True)
class Llama:
    """A model, its cache (layers, 2, B, tokens, Hkv, D), and the angles of its rotary embedding."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    head: torch.Tensor
    cache: torch.Tensor
    angles: torch.Tensor

    @classmethod
    def random(cls, layers: int, batch: int, context: int) -> Llama:
        """A new one."""
        cache = torch.randn((layers, 2, batch, context, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda")
        rates = 500_000 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
        angles = torch.outer(torch.arange(context, device="cuda"), rates)
        return cls(
            weights(VOCABULARY, HIDDEN),
            tuple(Layer.random() for _ in range(layers)),
            weights(VOCABULARY, HIDDEN),
            cache,
            angles,
        )

    def logits(self, tokens: torch.Tensor, first: int) -> torch.Tensor:
        """(B, vocabulary) of the last of `tokens` (B, S), which are at positions from `first` on."""
        batch, count = tokens.shape
        angles = self.angles[first : first + count, None]
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        x = F.embedding(tokens, self.embedding)
        for layer, (keys, values) in zip(self.layers, self.cache):
            qkv = F.linear(F.rms_norm(x, (HIDDEN,)), layer.qkv).view(batch, count, -1, HEAD_DIM)
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 2)
            keys[:batch, first : first + count] = rotated(k, cos, sin)
            values[:batch, first : first + count] = v
            seen = (part[:batch, : first + count].transpose(1, 2) for part in (keys, values))
            q = rotated(q, cos, sin).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(q, *seen, is_causal=count > 1, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(batch, count, -1), layer.out)
            up, gate = F.linear(F.rms_norm(x, (HIDDEN,)), layer.up).chunk(2, -1)
            x = x + F.linear(up * F.silu(gate), layer.down)
        return F.linear(F.rms_norm(x[:, -1], (HIDDEN,)), self.head)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """With the rotary embedding, the halves of a head as pairs."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@dataclass
class Captured:
    """A model's step as a graph, and its result."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    @classmethod
    def of(cls, provider: str, step: Callable[[], torch.Tensor]) -> Captured:
        """One of a provider."""
        with attention_of(provider):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = step()
        return cls(graph, result)

    def seconds(self, times: int) -> float:
        """Of one replay."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / times


def compared(what: str, tokens: int, steps: dict[str, Captured], rounds: int, times: int) -> None:
    """Print tokens per second of every provider, and fly's ratio to the others."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for name in steps:
        steps[name].seconds(1)
    for turn in range(rounds):
        order = list(steps)[turn % len(steps) :] + list(steps)[: turn % len(steps)]
        for name in order:
            found[name].append(tokens / steps[name].seconds(times))
    exact = steps["fly"].result.float()
    for name, rates in found.items():
        ratio = statistics.median(a / b for a, b in zip(found["fly"], rates))
        other = steps[name].result.float()
        far = ((other - exact).norm() / exact.norm()).item()
        same = (other.argmax(-1) == exact.argmax(-1)).float().mean().item()
        rate = f"{statistics.median(rates):12.0f} tokens/s, fly {ratio:.3f} of it"
        print(f"{what:28}{name:6}{rate}; logits differ from fly's by {far:.4f}, {same:.0%} of tokens are the same")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="sequences that decode")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt_batch", type=int, default=1)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Time prompts and decoding."""
    given = _parser().parse_args(arguments)
    torch.manual_seed(0)
    with torch.inference_mode():
        model = Llama.random(given.layers, max(given.batch), given.context)
        draws = torch.randint(VOCABULARY, (max(given.batch), given.context), device="cuda")
        kinds = [("prompt", given.prompt_batch, given.context, 0, 1)]
        kinds += [("decoding", batch, 1, given.context - 1, 8) for batch in given.batch]
        for what, batch, count, first, times in kinds:
            steps = {}
            for name in BACKENDS:
                try:
                    ids = draws[:batch, :count].contiguous()
                    steps[name] = Captured.of(name, lambda ids=ids, first=first: model.logits(ids, first))
                except RuntimeError as error:
                    print(f"{name} does not run {what} of {batch}: {str(error)[:300]}", flush=True)
            compared(f"{what} {batch} x {given.context}", batch * count, steps, given.rounds, times)
            del steps
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
