"""Steps of training the GPT of `examples/04_train.py`: fly's attention and its peers', in turns.

    python benchmarks/training.py                           # the example's real size, a minute on a GPU
    python benchmarks/training.py --head_dim 128 --length 4096

One model with the same batch for all. A round times every provider's forward and backward pass of the whole model
some times over, and the same with the optimizer's step; lines are medians, and ratios are medians of each round's.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional as F

from benchmarks.providers import FORWARD, Provider
from benchmarks.workload import Workload

PROVIDERS = ("fly", "FA4", "SDPA cuDNN", "SDPA flash")
CHARACTERS = 64
KINDS = ("forward and backward", "whole step")
Samples = list[list[float]]
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example() -> ModuleType:
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("train_example", EXAMPLES / "04_train.py")
        assert spec is not None and spec.loader is not None
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        return found
    finally:
        sys.path.remove(str(EXAMPLES))


@dataclass(frozen=True)
class Training:
    """A model, what trains it, and a batch of it on a device."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    workload: Workload

    @staticmethod
    def of(train: ModuleType, size: Any, device: str) -> Training:
        """Of one of the example's sizes."""
        torch.manual_seed(0)
        model = train.GPT(size, CHARACTERS).to(device)
        tokens = torch.randint(CHARACTERS, (size.batch, size.length + 1), device=device)
        heads, length = size.heads, size.length
        workload = Workload(size.batch, length, length, heads, heads, size.width // heads, "bf16", True)
        return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens, workload)

    def step(self, provider: Provider, kind: str) -> torch.Tensor:
        """The loss, with gradients of the model's weights or one step of the optimizer behind."""

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = provider.bind(self.workload, *qkv)()
            return out

        with torch.autocast(self.tokens.device.type, torch.bfloat16):
            scores = self.model(self.tokens[:, :-1], attend)
        loss = F.cross_entropy(scores.float().flatten(0, 1), self.tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if kind == KINDS[1]:
            self.optimizer.step()
        return loss.detach()


def milliseconds(step: Callable[[], object], times: int, device: str) -> float:
    """Of one step."""

    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = wait()
    for _ in range(times):
        step()
    return (wait() - start) / times * 1000


def times_of(training: Training, providers: Sequence[Provider], kind: str, rounds: int, times: int) -> Samples:
    """The milliseconds of each round's step, of each provider."""
    found: Samples = [[] for _ in providers]
    for turn in range(rounds + 1):
        for i in range(len(providers)):
            at = (i + turn) % len(providers)
            took = milliseconds(partial(training.step, providers[at], kind), times, training.tokens.device.type)
            if turn > 0:  # the first one compiles
                found[at].append(took)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--head_dim", type=int, help="instead of the example's 64, with as many columns")
    parser.add_argument("--length", type=int, help="of a sequence, instead of the example's, with as many tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--times", type=int, default=10, help="steps that a round times (10)")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    options = _parser().parse_args(arguments)
    for name in ("rounds", "times"):
        if getattr(options, name) < 1:
            _parser().error(f"--{name} must be at least 1, got {getattr(options, name)}")
    train = example()
    size = train.REAL if options.device == "cuda" else train.TOY
    tokens = size.batch * size.length
    for name, whole in (("head_dim", size.width), ("length", tokens)):
        given = getattr(options, name)
        if given is not None and (given < 1 or whole % given):
            _parser().error(f"--{name} must divide {whole}, got {given}")
    if options.length:
        size = replace(size, length=options.length, batch=tokens // options.length)
    if options.head_dim:
        size = replace(size, heads=size.width // options.head_dim)
    training = Training.of(train, size, options.device)
    wanted = FORWARD.named(PROVIDERS)
    missing = {provider.name: provider.missing(options.device) for provider in wanted}
    providers = tuple(provider for provider in wanted if missing[provider.name] is None)
    for name, why in missing.items():
        if why is not None:
            print(f"without {name}: {why}")
    print(f"{size.layers} layers, {training.workload}")
    for kind in KINDS:
        samples = times_of(training, providers, kind, options.rounds, options.times)
        for provider, of in zip(providers, samples, strict=True):
            ratio = statistics.median(theirs / ours for theirs, ours in zip(of, samples[0], strict=True))
            print(f"{kind:22}{provider.name:12}{statistics.median(of):9.3f} ms   fly is {ratio:.3f} times as fast")


if __name__ == "__main__":
    main()
