"""The builds of the Hopper kernel: its static parameters, and which build serves which shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fly.backends.nvvm.intrinsics import WARPGROUP
from fly.backends.nvvm.wgmma import PanelTile
from fly.errors import ShapeError
from kernels.dispatch import Request


@dataclass(frozen=True)
class Sm90Options:
    """The static parameters of one build.

    `consumers` warpgroups of 64 query rows, tiles of `block_n` keys, `stages` slots in each of the K and V rings and
    `q_stages` in Q's; `ping_pong`: consumers take turns in starting products; `lazy_rescale`: O keeps its scale while
    maxima grow little; `hold`: a tile's exponentials come before the wait for the last one's product.
    """

    head_dim: int
    head_dim_v: int
    causal: bool
    consumers: int
    block_n: int
    stages: int
    q_stages: int
    ping_pong: bool = True
    lazy_rescale: bool = True
    hold: bool = False

    def __post_init__(self):
        if self.consumers not in (1, 2, 3):
            raise ShapeError(f"consumers is {self.consumers}; expected 1, 2 or 3")

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def tiles(self) -> tuple[PanelTile, PanelTile, PanelTile]:
        """Of Q, K and V in shared memory."""
        return (
            PanelTile.widest(self.block_m, self.head_dim),
            PanelTile.widest(self.block_n, self.head_dim),
            PanelTile.widest(self.block_n, self.head_dim_v),
        )

    @property
    def registers(self) -> tuple[int, int]:
        """Registers a thread of the producer and of a consumer: 512 a lane of the four schedulers in all."""
        return {1: (56, 256), 2: (40, 232), 3: (32, 160)}[self.consumers]


@dataclass(frozen=True)
class Build:
    """A candidate of a shape: its static parameters, for up to how many keys, and what a tile of it costs.

    `cost` is a tile's time against the shape's largest tile: what decides when the launch does not fill the device.
    """

    consumers: int
    block_n: int
    stages: int
    q_stages: int
    cost: float = 1.0
    longest: float = math.inf
    ping_pong: bool = True
    lazy_rescale: bool = True
    hold: bool = False


# By (head_dim, head_dim_v, causal); of builds with as many consumers the first that is long enough counts. Measured
# on an H200.
BUILDS: Mapping[tuple[int, int, bool], tuple[Build, ...]] = {
    (64, 64, False): (Build(3, 128, 2, 2), Build(2, 128, 2, 2, 0.87), Build(1, 128, 2, 2, 0.6)),
    (64, 64, True): (
        Build(2, 128, 2, 2, 0.74, longest=1024, hold=True),
        Build(3, 128, 2, 2),
        Build(2, 128, 2, 2, 0.87),
        Build(1, 128, 2, 2, 0.6),
    ),
    (96, 96, False): (Build(2, 160, 2, 2), Build(1, 160, 2, 2, 0.75)),
    (96, 96, True): (Build(2, 128, 2, 2), Build(1, 128, 2, 2, 0.75)),
    (128, 128, False): (
        Build(2, 128, 2, 2, longest=1024, lazy_rescale=False),
        Build(2, 160, 2, 2, longest=4096, lazy_rescale=False),
        Build(2, 176, 2, 1, lazy_rescale=False),
        Build(1, 128, 2, 2, 0.75),
    ),
    (128, 128, True): (
        Build(2, 128, 2, 2, longest=2048, lazy_rescale=False),
        Build(2, 160, 2, 2, lazy_rescale=False),
        Build(1, 128, 2, 2, 0.75),
    ),
    **dict.fromkeys([(192, 128, False), (192, 128, True)], (Build(2, 128, 2, 1), Build(1, 128, 2, 1, 0.75))),
    **dict.fromkeys([(192, 192, False), (192, 192, True)], (Build(2, 96, 2, 1), Build(1, 96, 2, 1, 0.75))),
    **dict.fromkeys([(256, 256, False), (256, 256, True)], (Build(2, 64, 2, 1), Build(1, 64, 2, 1, 0.75))),
}


def options_for(
    head_dim: int, head_dim_v: int, causal: bool, seq_len: int, seq_len_kv: int, slices: int, units: int
) -> Sm90Options:
    """The build for a shape: `slices` (sequences x heads x splits) of `seq_len` rows, on `units` multiprocessors."""
    builds: dict[int, Build] = {}
    for build in BUILDS[head_dim, head_dim_v, causal]:
        if seq_len_kv <= build.longest:
            builds.setdefault(build.consumers, build)

    def time(build: Build) -> float:
        rounds = -(-seq_len // (64 * build.consumers)) * slices / units
        # causal tiles differ in length, and short ones fill the gaps
        return build.cost * (max(1.0, rounds) if causal else math.ceil(rounds))

    best = asdict(min(builds.values(), key=time))
    del best["cost"], best["longest"]
    return Sm90Options(head_dim, head_dim_v, causal, **best)


_SECTION_BYTES = {False: 8 << 20, True: 16 << 20}  # by causality
_LEAST_CAUSAL = 32


def section_for(request: Request, head_dim_v: int) -> int:
    """How many heads to work on at a time: those whose K and V stay in the second-level cache.

    Causal tiles differ in length: with fewer than 32 heads a section ends with too few blocks at work. Measured on an
    H200 for 512 to 16384 keys.
    """
    heads = request.batch * request.num_heads
    head_bytes = 2 * request.seq_len_kv * (request.head_dim + head_dim_v)
    section = _SECTION_BYTES[request.causal] // max(1, head_bytes)
    return min(max(section, _LEAST_CAUSAL if request.causal else 1), heads)
