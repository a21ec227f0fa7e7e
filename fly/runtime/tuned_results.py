"""What was found by `@fly.tune`, kept for each device in a file beside the disk cache, and carried between machines.

A file is JSON: `schema`, and by device, by kernel and by what decides a choice, the chosen candidate and its trials.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fly import config
from fly.backends import records
from fly.errors import ArgumentError
from fly.runtime.cache import write_whole

SCHEMA = 1
_MOST_BYTES = 1 << 26
_OF_RESULT = ("arguments", "chosen", "speed", "unit", "trials")
Result = Mapping[str, Any]
"""`arguments`: what it is for, for people; `chosen`: the candidate as text; `speed`: its, over the first one's;
`unit`: of the trials' times; `trials`: by candidate, its time, or why it has none."""


def kept(device: str) -> dict[str, dict[str, Result]]:
    """By kernel and key, what is kept for a device.

    Raises:
        ArgumentError: the file is damaged.
    """
    path = _path(device)
    return _read(path).get(device, {}) if path is not None and path.exists() else {}


def keep(found: Mapping[str, Mapping[str, Mapping[str, Result]]]) -> None:
    """Add results, by device, kernel and key, to what is kept; nothing where the cache is off (`FLY_CACHE=0`)."""
    for device, by_kernel in found.items():
        path = _path(device)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            merged = {name: dict(of) for name, of in kept(device).items()}
            for name, results in by_kernel.items():
                merged.setdefault(name, {}).update(results)
            write_whole(path, _text({device: merged}))


def export_tuned(path: str | os.PathLike[str]) -> int:
    """Write what is kept for all devices to a JSON file; returns the number of results.

    Raises:
        ArgumentError: a file of results is damaged.
    """
    found = _all()
    write_whole(Path(path).absolute(), _text(found))
    return _count(found)


def import_tuned(path: str | os.PathLike[str]) -> int:
    """Add the results of a file that `export_tuned` wrote, in the place of those for the same; returns their number.

    Kernels look at what is kept when they are first launched in a process.

    Raises:
        ArgumentError: no such file, or not one of results.
    """
    found = _read(Path(path))
    keep(found)
    return _count(found)


def add_command(commands: Any) -> None:
    """Add `tuned` to an argparse subparsers object."""
    parser = commands.add_parser(
        "tuned",
        help="show what @fly.tune has found on this machine's devices, or carry it to other machines",
        description="Results are kept beside the disk cache, a file for each device.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--export", metavar="FILE", help="write the results of all devices to a JSON file")
    which.add_argument("--import", metavar="FILE", dest="taken", help="add the results of such a file")
    parser.set_defaults(run=_command)


def _command(options: Namespace) -> None:
    if options.export is not None:
        print(f"{export_tuned(options.export)} results in {options.export}")
    elif options.taken is not None:
        print(f"{import_tuned(options.taken)} results from {options.taken}")
    else:
        found = _all()
        for device, by_kernel in found.items():
            print(device)
            for name, results in by_kernel.items():
                for result in results.values():
                    print(f"  {name} ({result['arguments']})\n    {result['chosen']}: {result['speed']:.3f}")
        if not found:
            print(f"no results in {_folder()}")


def _all() -> dict[str, Any]:
    """Of all devices."""
    found: dict[str, Any] = {}
    for file in sorted(_folder().glob("*.json")):
        found |= _read(file)
    return found


def _count(found: Mapping[str, Any]) -> int:
    return sum(len(results) for by_kernel in found.values() for results in by_kernel.values())


def _folder() -> Path:
    folder: Path = config.CACHE_DIR.get() / "tuned"
    return folder


def _path(device: str) -> Path | None:
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return _folder() / f"{name}.json" if config.CACHE.get() else None


def _text(devices: Mapping[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, "devices": devices}, indent=1, sort_keys=True).encode()


def _read(path: Path) -> dict[str, Any]:
    try:
        whole = records.record(
            "the file", records.parse(records.read_regular(path, _MOST_BYTES)), ("schema", "devices")
        )
        records.whole("schema", whole["schema"], SCHEMA, SCHEMA)
        devices = records.record("devices", whole["devices"])
        for device, by_kernel in devices.items():
            for name, results in records.record(device, by_kernel).items():
                for key, result in records.record(name, results).items():
                    records.text("chosen", records.record(key, result, _OF_RESULT)["chosen"])
    except OSError as error:
        raise ArgumentError(f"{path}: tuning results cannot be read: {error.strerror}") from None
    except ArgumentError as error:
        raise ArgumentError(f"{path}: not a file of tuning results: {error}") from None
    return dict(devices)
