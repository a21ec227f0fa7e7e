"""The generic kernel's choice of tiles: fields of its options; those not named keep their default.

Keys are (backend, head dimension, a multiple of 32).
Written by `benchmarks/tune.py generic --write`. `NOTES` says what was measured for a key.
"""

from __future__ import annotations

from typing import Any

# fmt: off
TILES: dict[tuple[Any, ...], dict[str, Any]] = {
    ("rocdl", 32): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 2},
    ("rocdl", 64): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 2},
    ("rocdl", 96): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 2},
    ("rocdl", 128): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 2},
    ("rocdl", 160): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 1},
    ("rocdl", 192): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 1},
    ("rocdl", 224): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 1},
    ("rocdl", 256): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 1, "lazy": True, "waves_per_eu": 1},
    ("nvvm", 32): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 2, "lazy": True},
    ("nvvm", 64): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 2, "lazy": True, "late": True},
    ("nvvm", 96): {"block_m": 128, "block_n": 64, "waves": 4, "stages": 2, "queries": "shared", "lazy": True},
    ("nvvm", 128): {"block_m": 128, "block_n": 32, "waves": 4, "stages": 2, "queries": "shared", "lazy": True},
    ("nvvm", 160): {"block_m": 64, "block_n": 64, "waves": 4, "stages": 1, "alternate": True, "queries": "shared"},
    ("nvvm", 192): {"block_m": 64, "block_n": 64, "waves": 4, "stages": 1, "alternate": True, "queries": "shared"},
    ("nvvm", 224): {
        "block_m": 64,
        "block_n": 64,
        "waves": 4,
        "stages": 1,
        "alternate": True,
        "queries": "shared",
        "lazy": True,
    },
    ("nvvm", 256): {"block_m": 64, "block_n": 64, "waves": 4, "stages": 1, "alternate": True, "queries": "shared"},
}
NOTES: dict[tuple[Any, ...], str] = {
}
