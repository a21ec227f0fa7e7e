"""Values as messages show them: short, and whatever their own code does."""

from __future__ import annotations

from typing import Any

_MOST = 100  # characters


def shown(value: Any) -> str:
    """`repr(value)`, cut where it is long; the type where there is none, as for ints of thousands of digits."""
    try:
        text = repr(value)
    except Exception:  # an author's own class may raise anything here, and the message is about something else
        return f"<{type(value).__qualname__}>"
    return text if len(text) <= _MOST else f"{text[:_MOST]}…"
