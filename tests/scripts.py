"""Scripts run from anywhere, many of them for one import of torch."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# an interpreter that has loaded torch, which takes longer than what scripts do; each is a fork of it
_PROGRAM = """
import json, os, runpy, sys, tempfile, traceback
import torch

results = []
for script in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv, sys.path[0], status = [script, "--help"], os.path.dirname(script), 1
            try:
                runpy.run_path(script, run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status if isinstance(status, int) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    results.append([status, *texts])
print(json.dumps(results))
"""


@dataclass(frozen=True)
class Ended:
    """How a script ended, and what it printed."""

    status: int
    output: str
    errors: str


@functools.cache
def with_help(*scripts: Path) -> Mapping[Path, Ended]:
    """Each script with `--help`, in a process of its own outside of the checkout, which is not on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", _PROGRAM, *map(str, scripts)]
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=True)
    return {script: Ended(*ended) for script, ended in zip(scripts, json.loads(done.stdout), strict=True)}
