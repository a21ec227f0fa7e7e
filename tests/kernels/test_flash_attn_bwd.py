"""Flash attention's gradients against autograd's: a command line, and the tests of it.

python tests/kernels/test_flash_attn_bwd.py --help
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.kernels.harness import BACKWARD_SUITE, main

if __name__ == "__main__":
    sys.exit(main(suite=BACKWARD_SUITE))
