"""What holds for the whole test run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import sampling

# Every process of pytest-xdist has a core: more threads in each wait for one another. Before torch and NumPy load.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Traced modules and decoded programs are many objects that stay. At Python's own thresholds, looking through them for
# garbage is a tenth of the run.
gc.set_threshold(50_000, 20, 50)


# An hour, in place of the limit in pyproject.toml, for a test that runs every combination.
EXHAUSTIVE_SECONDS = 3600


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--exhaustive`: also every combination that a sample stands for otherwise."""
    parser.addoption("--exhaustive", action="store_true", help="run the tests marked exhaustive too (minutes)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `exhaustive` unless they are asked for; then they have more time."""
    asked = config.getoption("--exhaustive")
    left_out = sampling.mark_left_out(items)
    if left_out and not config.getoption("lf", False) and not any("::" in argument for argument in config.args):
        raise pytest.UsageError("\n".join(left_out))
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(
                pytest.mark.timeout(EXHAUSTIVE_SECONDS)
                if asked
                else pytest.mark.skip(reason="runs with --exhaustive")
            )


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run's own disk cache: it starts empty, its processes share it, and the user's is left alone.

    Nor do the user's other settings reach the tests, but for where the linker is.
    """
    from fly import config

    base = tmp_path_factory.getbasetemp()
    # every worker of pytest-xdist has a directory inside the run's
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fly-cache"
    with pytest.MonkeyPatch.context() as patch:
        for variable in config.VARIABLES:
            if variable is not config.LLD:
                patch.delenv(variable.name, raising=False)
        patch.setenv("FLY_CACHE_DIR", str(directory))
        yield directory
