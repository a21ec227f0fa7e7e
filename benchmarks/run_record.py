"""What a run's figures belong to: day, machine, versions and commit, which every CSV file has as columns."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
MODEL = "timing model"  # the device of figures that are predicted
PACKAGES = ("triton", "flash-attn", "flash-attn-4", "aiter")  # peers that do not come with torch
# `preset`: what was run; `date`: UTC; `versions`: of torch, what comes with it, and peers; `commit`: of this
# repository, with a + where files differed from it; `note`: empty for what the benchmark itself wrote
RUN_COLUMNS = ("preset", "date", "device", "driver", "versions", "commit", "note")


def versions() -> str:
    """torch, what it is built on, and the peers that are installed, with their versions, on one line."""
    found = {
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "ROCm": torch.version.hip,
        "cuDNN": torch.backends.cudnn.version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return " ".join(f"{name}={value}" for name, value in found.items() if value is not None)


def said(command: Sequence[str]) -> str:
    """What a command prints, without the blanks around it; "" where it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def driver() -> str:
    """The version of NVIDIA's driver, or of AMD's kernel module; "" where nothing says it."""
    nvidia = said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"])
    amd = Path("/sys/module/amdgpu/version")
    return nvidia or (amd.read_text().strip() if amd.exists() else "")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def commit() -> str:
    """The checkout's commit, with a + where tracked files differ from it; "" outside a checkout."""
    head = said(["git", "rev-parse", "--short=10", "HEAD"])
    return head + "+" * bool(head and said(["git", "status", "--porcelain", "--untracked-files=no"]))


def modelled_record(preset: str, peers: str) -> dict[str, str]:
    """`RUN_COLUMNS` of a run on the timing model, now; `peers`: the versions of what was compared."""
    return {
        "preset": preset,
        "date": _now(),
        "device": MODEL,
        "driver": "",
        "versions": peers,
        "commit": commit(),
        "note": "",
    }


def run_record(preset: str, of_commit: str | None = None) -> dict[str, str]:
    """`RUN_COLUMNS` of a run on the current GPU, now; `of_commit` where the checkout has no git."""
    return {
        "preset": preset,
        "date": _now(),
        "device": torch.cuda.get_device_name(),
        "driver": driver(),
        "versions": versions(),
        "commit": commit() if of_commit is None else of_commit,
        "note": "",
    }
