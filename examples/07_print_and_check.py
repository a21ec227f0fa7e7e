"""Looking into a running kernel: `fly.print` shows values, `fly.check` stops the launch that breaks a rule.

    y[i] = table[index[i]],  where an index outside of the table is a mistake of the caller's

Both work the same on every GPU and in the emulator. Threads write to a log; the launch waits for the kernel, prints
the lines block by block and thread by thread, and raises a `fly.errors.CheckError` if a check failed. A thread goes
on after a failed check, so what would do harm is under `fly.when`. Kernels without them have no log and do not wait.

    python examples/07_print_and_check.py                  # --device cuda or cpu chooses where
"""

import sys

import _device
import torch

import fly
from fly.errors import CheckError

THREADS = 64


@fly.kernel
def gather(table: fly.Tensor, index: fly.Tensor, y: fly.Tensor):
    """One element a thread."""
    i = fly.block_id.x * THREADS + fly.thread_id.x
    with fly.when(i < index.shape[0]):
        row = index.load(i)
        inside = (row >= 0) & (row < table.shape[0])
        fly.check(inside, "index[{}] is {}, the table has {} rows", i, row, table.shape[0])
        with fly.when(inside):
            value = table.load(row)
            # from some threads only: every thread that comes to a print makes a line
            fly.print("y[{}] = table[{}] = {:.3f}", i, row, value, when=i % 50 == 0)
            y.store(value, i)


def gathered(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """table[index] of vectors, f32 and i32."""
    y = torch.zeros(len(index), device=table.device)
    gather[-(-len(index) // THREADS), THREADS](table, index, y)
    return y


def main() -> None:
    device = _device.place()
    if device is None or "--compile" in sys.argv:
        table, index = (fly.TensorSpec(dtype, rank=1, alignment=16, unit_stride=True) for dtype in ("f32", "i32"))
        _device.show(gather, table, index, table, block=THREADS)
        return
    table = torch.rand(1000, device=device)
    for length in (10, 64, 100, 130):
        index = torch.randint(1000, (length,), device=device, dtype=torch.int32)
        _device.check(f"length {length}", gathered(table, index), table[index.long()], bound=0)
    index[[7, 99]] = torch.tensor([1000, -3], device=device, dtype=torch.int32)
    try:
        gathered(table, index)
    except CheckError as error:
        print(f"As it should, the launch raised\n{error}")
    else:
        sys.exit("the launch should have raised a CheckError")


if __name__ == "__main__":
    main()
