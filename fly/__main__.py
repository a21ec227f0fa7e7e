"""`python -m fly`: look at kernels and at the environment."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from fly.runtime import cli


def main(argv: Sequence[str] | None = None) -> int:
    """fly's command line with the commands of the kernel library; see `fly.runtime.cli.main`."""
    return cli.main(argv, importlib.import_module("fly_attention.commands"))


if __name__ == "__main__":
    sys.exit(main())
