"""A small GPT in plain torch, trained on fly's attention and on torch's: the same weights, the same batches.

    python examples/04_train.py                 # on a GPU: 85 M parameters, 300 steps of 16384 characters
    python examples/04_train.py --device cpu    # in the emulator: a toy, 30 steps, about a minute

Weights and what the optimizer keeps are float32, products are bfloat16 (autocast); the two runs differ in `attend`
alone. The text is made up: words whose spelling there is to learn. It prints both losses at every tenth step and
steps a second, and draws the curves. Exit code 1 where a loss does not fall, or where the two are further apart than
1 % at a tenth step.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _device
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.progress import progress, say
from benchmarks.report import plot_missing
from fly_attention import flash_attn_func

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
APART, EVERY = 0.01, 10  # how far losses may be apart, and after how many steps that is looked at
FALLEN = 0.9  # what is left of the first loss in the end, at most
WARM_STEPS = 3  # that are not timed: the first ones compile


@dataclass(frozen=True)
class Size:
    """Of a run: the network's, a batch's, and the optimizer's."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    steps: int
    rate: float
    warmup: int


TOY = Size(layers=2, width=64, heads=2, length=64, batch=2, steps=30, rate=4e-3, warmup=5)
REAL = Size(layers=12, width=768, heads=12, length=1024, batch=16, steps=300, rate=3e-4, warmup=30)


def with_fly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(batch, length, heads, head dimension) in and out."""
    return flash_attn_func(q, k, v, causal=True)


def with_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same on torch's FlashAttention."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


ATTENTION: dict[str, Attend] = {"fly": with_fly, "torch": with_torch}


class Block(nn.Module):
    """Attention and a network of two layers, each added to what comes in."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads, width = size.heads, size.width
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_network(x))))


class GPT(nn.Module):
    """Characters in, a score for each that may come next out."""

    def __init__(self, size: Size, characters: int):
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.last, self.scores = nn.LayerNorm(size.width), nn.Linear(size.width, characters, bias=False)
        for weights in (self.characters.weight, self.places.weight, self.scores.weight):
            nn.init.normal_(weights, std=0.02)

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attend)
        return self.scores(self.last(x))


def made_up(length: int) -> str:
    """At least so many characters, the same ones every time: words of two or three syllables, few of them often."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.choice((2, 3)))) for _ in range(100)]
    often = [1 / (place + 1) for place in range(len(words))]
    return " ".join(draw.choices(words, often, k=length // len("ba be") + 1))


def train(name: str, size: Size, steps: int, device: str, seed: int) -> tuple[list[float], float]:
    """(the loss of every step, steps a second)."""
    text = made_up(size.steps * size.batch * size.length)  # so that nothing is read often enough to be known by heart
    known = {character: i for i, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([known[character] for character in text], device=device)
    torch.manual_seed(seed)
    model = GPT(size, len(known)).to(device)  # drawn on the CPU, so that every device has the same
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95))
    draw, losses, start = torch.Generator().manual_seed(seed), [], time.perf_counter()
    for step in progress(range(steps), f"step on {name}"):
        if step == min(WARM_STEPS, steps - 1):
            start = now(device)
        places = torch.randint(len(tokens) - size.length, (size.batch, 1), generator=draw).to(device)
        part = tokens[places + torch.arange(size.length + 1, device=device)]
        with torch.autocast(device, torch.bfloat16):
            scores = model(part[:, :-1], ATTENTION[name])
        loss = F.cross_entropy(scores.float().flatten(0, 1), part[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = size.rate * min((step + 1) / size.warmup, 1 - step / steps)
        optimizer.step()
        losses.append(loss.detach())  # not read yet: that would wait for the GPU
    timed = steps - min(WARM_STEPS, steps - 1)
    return torch.stack(losses).tolist(), timed / (now(device) - start)


def now(device: str) -> float:
    """Seconds, when all that was queued is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def mistakes(losses: dict[str, list[float]]) -> list[str]:
    """What is wrong with losses of the same batches; those of every tenth step are printed side by side."""
    wrong = []
    for name, of in losses.items():
        if not of[-1] <= FALLEN * of[0]:
            wrong.append(f"the loss on {name} went from {of[0]:.3f} to {of[-1]:.3f}, and not to {FALLEN} of it")
    fly, other = losses["fly"], losses["torch"]
    for step in range(EVERY - 1, len(fly), EVERY):
        apart = abs(fly[step] - other[step]) / other[step]
        say(f"step {step + 1:4}: {fly[step]:.4f} on fly, {other[step]:.4f} on torch, {apart:.3%} apart")
        if not apart <= APART:
            wrong.append(f"at step {step + 1} losses are {apart:.2%} apart; allowed: {APART:.0%}")
    return wrong


def draw_curves(path: Path, losses: dict[str, list[float]]) -> None:
    """Both losses against the step, as a picture."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4), layout="constrained")
    axis = picture.subplots()
    for (name, of), style in zip(losses.items(), ("-", "--"), strict=True):
        axis.plot(range(1, len(of) + 1), of, style, label=name)
    axis.set(xlabel="step", ylabel="loss, nats a character", title="The same GPT on two attentions")
    axis.legend()
    picture.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on fly's attention and on torch's.")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU if there is one; cpu is emulated")
    parser.add_argument("--size", choices=("toy", "real"), help="toy on the CPU, real on a GPU")
    parser.add_argument("--steps", type=int, metavar="N", help="instead of the size's 30 or 300")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of weights and batches (0)")
    parser.add_argument("--picture", type=Path, metavar="FILE", default=Path("train.png"), help="(train.png)")
    args = parser.parse_args()
    if args.steps is not None and args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    device = args.device or _device.place()
    if device is None:
        sys.exit("Nothing here can run it: that needs a GPU, or fly's emulator.")
    size = {"toy": TOY, "real": REAL}[args.size or ("real" if device == "cuda" else "toy")]
    losses, speeds = {}, {}
    for name in ATTENTION:
        losses[name], speeds[name] = train(name, size, args.steps or size.steps, device, args.seed)
    wrong = mistakes(losses)
    print(", ".join(f"{name}: {speed:.2f} steps/s" for name, speed in speeds.items()))
    if missing := plot_missing():
        print(f"no picture: {missing}")
    else:
        draw_curves(args.picture, losses)
        print(f"both losses are drawn in {args.picture}")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"both losses fell, and were within {APART:.0%} of each other at every tenth step")


if __name__ == "__main__":
    main()
