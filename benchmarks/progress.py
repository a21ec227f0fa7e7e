"""A progress bar where there is a terminal, and lines that do not break it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

try:
    from tqdm import tqdm
except ImportError:  # everything works without a progress bar
    tqdm = None

Item = TypeVar("Item")


def progress(items: Sequence[Item], unit: str) -> Iterator[Item]:
    """The items, under a progress bar on a terminal when there are several."""
    if tqdm is None or len(items) <= 1:
        yield from items
        return
    with tqdm(items, unit=unit, disable=None, file=sys.stderr) as bar:
        for item in bar:
            bar.set_postfix_str(str(item))
            yield item


def say(text: str) -> None:
    """Print a line above the bar."""
    if tqdm is None:
        print(text, flush=True)
    else:
        tqdm.write(text, file=sys.stdout)
