"""Locks of the process that a child of `os.fork` can take."""

from __future__ import annotations

import os
import threading


def lock_of_process() -> threading.RLock:
    """A reentrant lock that a fork waits for, so that no thread which the child does not have holds it there."""
    lock = threading.RLock()
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
