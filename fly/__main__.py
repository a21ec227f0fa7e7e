"""`python -m fly`: look at kernels and at the environment."""

from __future__ import annotations

import sys

from fly.runtime.cli import main

sys.exit(main())
