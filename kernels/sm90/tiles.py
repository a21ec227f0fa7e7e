"""The sm90 kernel's choice of tiles: fields of its options; those not named keep their default.

Keys are (head_dim, head_dim_v, causal, consumers, most keys or None), see `kernels/sm90/builds.py`.
Written by `benchmarks/tune.py sm90 --write`. `NOTES` says what was measured for a key.
"""

from __future__ import annotations

from typing import Any

# fmt: off
TILES: dict[tuple[Any, ...], dict[str, Any]] = {
    (64, 64, False, 3, None): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "scaled rows"},
    (64, 64, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "always", "cost": 0.79},
    (64, 64, False, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "always", "cost": 0.6},
    (64, 64, True, 3, 2048): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "scaled rows"},
    (64, 64, True, 3, None): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "wave"},
    (64, 64, True, 2, 1024): {"block_n": 128, "stages": 3, "q_stages": 2, "hold": True, "cost": 0.7},
    (64, 64, True, 2, 2048): {"block_n": 128, "stages": 3, "q_stages": 2, "hold": True, "cost": 0.77},
    (64, 64, True, 2, None): {"block_n": 128, "stages": 3, "q_stages": 2, "hold": True, "cost": 0.815},
    (64, 64, True, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "always", "cost": 0.47},
    (96, 96, False, 3, None): {"block_n": 112, "stages": 2, "q_stages": 2, "without": ("paged", "bias")},
    (96, 96, False, 2, 1024): {"block_n": 128, "stages": 2, "q_stages": 2, "hold": True, "cost": 0.71},
    (96, 96, False, 2, None): {"block_n": 176, "stages": 2, "q_stages": 2, "cost": 0.73},
    (96, 96, False, 1, None): {"block_n": 160, "stages": 2, "q_stages": 2, "cost": 0.55},
    (96, 96, True, 3, None): {
        "block_n": 112,
        "stages": 2,
        "q_stages": 2,
        "without": ("paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (96, 96, True, 2, 2048): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.725},
    (96, 96, True, 2, None): {"block_n": 160, "stages": 2, "q_stages": 2, "cost": 0.68},
    (96, 96, True, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.56},
    (120, 120, False, 3, None): {
        "block_n": 96,
        "stages": 2,
        "q_stages": 2,
        "without": ("paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (120, 120, True, 3, None): {
        "block_n": 96,
        "stages": 2,
        "q_stages": 2,
        "without": ("paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (128, 128, False, 3, 4096): {
        "block_n": 80,
        "stages": 2,
        "q_stages": 2,
        "without": ("packed", "paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (128, 128, False, 3, None): {
        "block_n": 80,
        "stages": 2,
        "q_stages": 2,
        "without": ("paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (128, 128, False, 2, 1024): {
        "block_n": 128,
        "stages": 2,
        "q_stages": 2,
        "rescale": "scaled rows",
        "hold": True,
        "cost": 0.73,
    },
    (128, 128, False, 2, 4096): {"block_n": 160, "stages": 2, "q_stages": 2, "rescale": "scaled rows", "cost": 0.72},
    (128, 128, False, 2, None): {"block_n": 176, "stages": 2, "q_stages": 1, "rescale": "scaled rows", "cost": 0.7},
    (128, 128, False, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.54},
    (128, 128, True, 3, None): {
        "block_n": 80,
        "stages": 2,
        "q_stages": 2,
        "without": ("paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (128, 128, True, 2, 4096): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "scaled rows", "cost": 0.675},
    (128, 128, True, 2, None): {"block_n": 128, "stages": 2, "q_stages": 2, "rescale": "scaled rows", "cost": 0.7},
    (128, 128, True, 1, None): {"block_n": 128, "stages": 2, "q_stages": 2, "cost": 0.5},
    (144, 144, False, 3, None): {
        "block_n": 80,
        "stages": 2,
        "q_stages": 1,
        "without": ("packed", "paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (144, 144, True, 3, None): {
        "block_n": 80,
        "stages": 2,
        "q_stages": 1,
        "without": ("packed", "paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (152, 152, False, 2, None): {"block_n": 112, "stages": 2, "q_stages": 1, "cost": 0.75},
    (152, 152, True, 2, None): {"block_n": 112, "stages": 2, "q_stages": 1, "cost": 0.73},
    (160, 160, False, 3, None): {
        "block_n": 64,
        "stages": 2,
        "q_stages": 1,
        "without": ("packed", "paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (160, 160, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "cost": 0.71},
    (160, 160, False, 1, None): {"block_n": 112, "stages": 2, "q_stages": 1, "cost": 0.54},
    (160, 160, True, 3, None): {
        "block_n": 64,
        "stages": 2,
        "q_stages": 1,
        "without": ("packed", "paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (160, 160, True, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "cost": 0.69},
    (160, 160, True, 1, None): {"block_n": 112, "stages": 2, "q_stages": 1, "cost": 0.5},
    (192, 128, False, 3, None): {
        "block_n": 80,
        "stages": 2,
        "q_stages": 1,
        "without": ("packed", "paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (192, 128, False, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "rescale": "always", "cost": 0.715},
    (192, 128, False, 1, None): {"block_n": 128, "stages": 2, "q_stages": 1, "cost": 0.54},
    (192, 128, True, 3, None): {
        "block_n": 80,
        "stages": 2,
        "q_stages": 1,
        "rescale": "scaled rows",
        "without": ("packed", "paged", "softcap", "alibi", "bias", "dropout", "score_mod", "mask_mod"),
    },
    (192, 128, True, 2, 4096): {"block_n": 128, "stages": 2, "q_stages": 1, "rescale": "always", "cost": 0.675},
    (192, 128, True, 2, None): {"block_n": 128, "stages": 2, "q_stages": 1, "rescale": "always", "cost": 0.69},
    (192, 128, True, 1, None): {"block_n": 128, "stages": 2, "q_stages": 1, "cost": 0.5},
    (192, 192, False, 2, None): {"block_n": 96, "stages": 2, "q_stages": 1},
    (192, 192, False, 1, None): {"block_n": 96, "stages": 2, "q_stages": 1, "cost": 0.75},
    (192, 192, True, 2, None): {"block_n": 96, "stages": 2, "q_stages": 1},
    (192, 192, True, 1, None): {"block_n": 96, "stages": 2, "q_stages": 1, "cost": 0.75},
    (256, 256, False, 2, None): {"block_n": 64, "stages": 2, "q_stages": 1},
    (256, 256, False, 1, None): {"block_n": 64, "stages": 2, "q_stages": 1, "cost": 0.75},
    (256, 256, True, 2, None): {"block_n": 64, "stages": 2, "q_stages": 1},
    (256, 256, True, 1, None): {"block_n": 64, "stages": 2, "q_stages": 1, "cost": 0.75},
}
NOTES: dict[tuple[Any, ...], str] = {
}
