"""How fast flash attention's gradients are next to its peers', all taking turns in one process.

    python benchmarks/flash_attn_bwd.py --csv backward.csv --plot backward.png
    python benchmarks/flash_attn_bwd.py --peers "SDPA flash,SDPA cuDNN" --iters 10
    python benchmarks/flash_attn_bwd.py --head_dim 128 --peers FA4,Triton

A call is torch.autograd.grad of one forward pass's output: statistics of the rows, products and conversions of
results are all in it, and the forward pass is not. Arithmetic is counted as five products. Whether results are right
is for tests/kernels/test_flash_attn_bwd.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison import main
from benchmarks.providers import BACKWARD

if __name__ == "__main__":
    sys.exit(main(of=BACKWARD))
