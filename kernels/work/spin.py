"""Waiting for what other blocks of the launch do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fly


def spin(look: Callable[[], fly.Value], wanted: Any) -> None:
    """By one thread: until what it looks at, each time by an acquiring load, is what is `wanted`.

    Only for what a block does that runs by then, in whatever order a device starts blocks, or it never ends.
    """
    for _ in (turns := fly.while_((look(),), lambda seen: seen[0] != wanted)):
        turns.next(look())
