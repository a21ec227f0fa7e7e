"""aiter's backward kernels, of which its repository has the code objects: launched with our inputs.

Nothing of that project is executed but those objects. A call is up to three launches: the rows' dO·O, the gradients,
and the conversion of dQ's sums. Arguments lie 16 bytes apart, in the order of aiter's `fmha_bwd_dqdkdv_args`.
"""

from __future__ import annotations

import csv
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.foreign.objects import ForeignError
from fly.emulator import Program, Region
from fly.emulator.timing import Launch

_THREADS = 256


@dataclass(frozen=True)
class Mode:
    """How dQ is summed, in 32 bits or 16, and how gfx942 rounds to bf16, which gfx950 does in hardware."""

    wide: bool
    rounding: str = "rtna"


@dataclass(frozen=True)
class Gradients:
    """One head's tensors, (1, S, 1, D) bf16, with what the kernels write.

    `sums` of dQ are f32 or bf16 (1, 1, S, D); `lse` and `delta` f32 (1, 1, S).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    sums: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor

    @staticmethod
    def of(length: int, head_dim: int, mode: Mode) -> Gradients:
        """Inputs uniform in [-1, 1); statistics zero, which says nothing about time."""
        generator = torch.Generator().manual_seed(0)
        size = 1, length, 1, head_dim
        inputs = [(torch.rand(size, generator=generator) * 2 - 1).to(torch.bfloat16) for _ in range(5)]
        rows = [torch.zeros(1, 1, length) for _ in range(2)]
        sums = torch.zeros(1, 1, length, head_dim, dtype=torch.float32 if mode.wide else torch.bfloat16)
        dq = torch.zeros(size, dtype=torch.bfloat16)  # gfx942 adds to it in 16 bits
        return Gradients(*inputs, *rows, sums, dq, *[torch.full_like(dq, math.nan) for _ in range(2)])

    def regions(self) -> list[Region]:
        """All of them as memory."""
        return [Region(t.data_ptr(), t.numel() * t.element_size(), name) for name, t in vars(self).items()]


def _packed(values: list[torch.Tensor | float | int | None]) -> bytes:
    """A tensor's address, an f32 or a u32, each at 16 bytes; None is no pointer."""
    words = []
    for value in values:
        if value is None or isinstance(value, torch.Tensor):
            words.append(struct.pack("<QQ", 0 if value is None else value.data_ptr(), 0))
        else:
            words.append(struct.pack("<f" if isinstance(value, float) else "<I", value) + bytes(12))
    return b"".join(words)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Bytes from head to head, batch to batch and row to row of (B, S, H, D)."""
    batch, row, head, _ = (stride * tensor.element_size() for stride in tensor.stride())
    return head, batch, row


@dataclass(frozen=True)
class Aiter:
    """A checkout of aiter."""

    checkout: Path

    def _row(self, arch: str, table: str, **wanted: str) -> Mapping[str, str]:
        """The first row of a table that is as wanted; | parts values that will do.

        Raises:
            ForeignError: no such table or row.
        """
        path = self._folder(arch) / f"fmha_bwd_{table}.csv"
        if not path.exists():
            raise ForeignError(f"{path} does not exist; expected a checkout of aiter with its code objects")
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if all(row[name] in values.split("|") for name, values in wanted.items()):
                    return row
        raise ForeignError(f"{path} has no row with {wanted}")

    def _folder(self, arch: str) -> Path:
        return self.checkout / "hsa" / arch / "fmha_v3_bwd"

    def launches(self, arch: str, t: Gradients, causal: bool, mode: Mode) -> Iterator[tuple[str, Launch]]:
        """(what, launch) of one head of a call, in order.

        Raises:
            ForeignError: there is no object for this.
        """
        length, head_dim = t.q.shape[1], t.q.shape[3]
        dense = {"mode": "0", "hdim_q": str(head_dim), "dtype": "bf16"}
        cvt = {"bf16_cvt": f"{('rtne', 'rtna', 'rtz').index(mode.rounding)}|3"}
        row = self._row(arch, "odo", **dense)
        values = [t.out, t.dout, t.delta, *_strides(t.out), *_strides(t.dout), length * 4, 0, 4, length, head_dim]
        yield "dO·O", self._launch(arch, row, _blocks(length, row), [*values, None, None], t)

        # its dispatch: a length that the unit does not divide needs a kernel that masks; no padding, if there is such
        table = {**dense, **cvt, "hdim_v": str(head_dim), "mask": str(int(causal)), "atomic32": str(int(mode.wide))}
        rows = int(self._row(arch, "dqdkdv", **table)["ts"])
        whole = length % (64 if arch == "gfx942" and not mode.wide else rows) == 0
        try:
            row = self._row(arch, "dqdkdv", **table, pssk=str(int(not whole)), pddv="0")
        except ForeignError:
            row = self._row(arch, "dqdkdv", **table, pssk="0|1" if whole else "1")
        converted = mode.wide or arch == "gfx950"
        key, value, gradient = _strides(t.k), _strides(t.v), _strides(t.dk)
        values = [
            t.sums if converted else t.dq, t.dk, t.dv, t.q, t.k, t.v, t.dout, t.lse, t.delta, head_dim**-0.5,
            math.log2(math.e), length, rows * key[2], *_strides(t.q), 1, *key, gradient[2], length, head_dim,
            head_dim, 1, *value, *_strides(t.dout), *gradient[:2], *_strides(t.dv), length * 4, *[None] * 4,
            length, 0, 0,
        ]  # fmt: skip
        blocks = _blocks(length, row)
        # under a causal mask a workgroup takes a long and a short block
        yield "gradients", self._launch(arch, row, -(-blocks // 2) if causal else blocks, values, t)

        if converted:
            post = {"dtype": "bf16", **dense, **cvt} if mode.wide else {"hdim_q": str(head_dim), "mode": "0"}
            row = self._row(arch, "dq_convert" if mode.wide else "dq_shuffle", **post)
            pitch = head_dim * t.sums.element_size()
            values = [t.sums, t.dq, length * pitch, 0, pitch, *_strides(t.dq), length, head_dim, None, None]
            yield "dQ", self._launch(arch, row, _blocks(length, row), values, t)

    def _launch(
        self,
        arch: str,
        row: Mapping[str, str],
        blocks: int,
        values: list[torch.Tensor | float | int | None],
        t: Gradients,
    ) -> Launch:
        program = Program((self._folder(arch) / row["co_name"]).read_bytes(), arch)
        (kernel,) = program.kernels
        return Launch(program, kernel, (blocks, 1, 1), (_THREADS, 1, 1), _packed(values), t.regions(), 0, (t,))


def _blocks(length: int, row: Mapping[str, str]) -> int:
    return -(-length // int(row["ts"]))
