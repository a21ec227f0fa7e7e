"""How fast flash attention is next to its peers, all taking turns in one process.

    python benchmarks/flash_attn_fwd.py --preset h200 --csv forward.csv --plot forward.png
    python benchmarks/flash_attn_fwd.py --preset short --kernel generic
    python benchmarks/flash_attn_fwd.py --host

Whether results are right is for tests/kernels/test_flash_attn_fwd.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.comparison import main
from benchmarks.providers import FORWARD

if __name__ == "__main__":
    sys.exit(main(of=FORWARD))
