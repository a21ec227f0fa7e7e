"""The `hopper` dialect: the units that only sm_90a has, an operation for what one author's call asks of them.

Declared through IRDL, as the `fly` dialect is. The modules beside this one emit the operations;
`fly.backends.nvvm.lower_hopper` has the instructions that each becomes, and PTX ISA 8.3 says what those do. Addresses
are 32-bit ones of shared memory, but for pointers.

| operation | meaning |
|---|---|
| `hopper.barrier_sync` | wait at a named barrier until so many threads have arrived, these included |
| `hopper.barrier_arrive` | count towards a `barrier_sync` of the same barrier, and go on |
| `hopper.barrier_any` | `barrier_sync`, and 1 if the condition is not 0 in any of the threads, else 0 |
| `hopper.setmaxnreg` | raise ("inc") or lower ("dec") a warpgroup's `registers` a thread |
| `hopper.elect` | 1 in one thread of the warp, the same one each time, and 0 in the others |
| `hopper.ldmatrix_turned` | four 8 by 8 matrices of 16-bit elements from shared memory, transposed, by a warp |
| `hopper.stmatrix` | four of them to shared memory, as they are, by a warp |
| `hopper.prmt` | any four of the eight bytes of two words |
| `hopper.anew` | the first number, made where the second one is, of which nothing else depends |
| `hopper.sync_warp` | all lanes of the warp arrive; memory accesses are ordered across it |
| `hopper.fence_async_shared` | this thread's stores to shared memory become visible to TMA and WGMMA |
| `hopper.fence_async_global` | what this thread knows of global memory is so for its bulk copies from here on |
| `hopper.fence_mbarrier_init` | initialised mbarriers become visible to TMA and the cluster |
| `hopper.mbarrier_init` | an mbarrier whose phases take so many arrivals |
| `hopper.mbarrier_arrive` | one arrival |
| `hopper.mbarrier_arrive_expect` | one arrival, and so many bytes more that the phase waits for |
| `hopper.mbarrier_wait` | until the phase with this parity has completed |
| `hopper.mbarrier_arrive_at` | one arrival at the mbarrier of this address in the cluster's block `rank` |
| `hopper.mbarrier_arrive_expect_at` | the same, and so many bytes more that the phase waits for |
| `hopper.cluster_sync` | all threads of all blocks of the cluster arrive; memory accesses are ordered across it |
| `hopper.copy_at` | start copying shared memory to block `rank`; its bytes arrive at an mbarrier there |
| `hopper.tma_prefetch` | bring a tensor map into the cache that copies read it from |
| `hopper.tma_load` | start copying a box to shared memory; its bytes arrive at an mbarrier |
| `hopper.tma_load_to_all` | the same to this place and mbarrier in each of the cluster's first `blocks` blocks |
| `hopper.tma_store` | start copying a box from shared memory |
| `hopper.tma_commit` | close the thread's group of stores |
| `hopper.tma_wait_read` | until all but the `newer` last groups have read their shared memory |
| `hopper.tma_wait` | until they have been written too |
| `hopper.wgmma` | start D = A B or D += A B, in one group: see below |
| `hopper.computed` | this f32, never below zero, is computed before what is behind it |
| `hopper.wgmma_wait` | until at most the `newer` last groups are unfinished; accumulators go through it |

Coordinates of `tma_load` and `tma_store` are in elements, the innermost first.

`hopper.wgmma` takes the accumulator (if it `accumulates`), the descriptor of B, and A: one descriptor, or with
`a_registers` one vector of registers for each step of k. Step t of k adds `b_steps[t]` and `a_steps[t]`, in units of
16 bytes, to the descriptors; `a_steps` is empty with registers. `a_transposed` and `b_transposed`: k runs along rows.

`hopper.wgmma_wait` takes `accumulators` vectors, which it gives back, and any number of f32 that are to be computed
before it waits; they are never below zero.
"""

from __future__ import annotations

import functools

from fly.ir.context import LOCK, context
from fly.ir.dialect import declare

NAME = "hopper"
MOST_WAITED = 8  # accumulators of one wait
# all operands of a variadic group have one type in IRDL, so each accumulator is a group of its own
_WAITED = range(MOST_WAITED)

_IRDL = f"""
irdl.dialect @hopper {{
  irdl.operation @barrier_sync {{
    %i32 = irdl.is i32
    irdl.operands(barrier: %i32, threads: %i32)
  }}
  irdl.operation @barrier_arrive {{
    %i32 = irdl.is i32
    irdl.operands(barrier: %i32, threads: %i32)
  }}
  irdl.operation @barrier_any {{
    %i32 = irdl.is i32
    irdl.operands(barrier: %i32, threads: %i32, condition: %i32)
    irdl.results(result: %i32)
  }}
  irdl.operation @setmaxnreg {{
    %inc = irdl.is "inc"
    %dec = irdl.is "dec"
    %action = irdl.any_of(%inc, %dec)
    %int = irdl.base "#builtin.integer"
    irdl.attributes {{ "action" = %action, "registers" = %int }}
  }}
  irdl.operation @elect {{
    %i32 = irdl.is i32
    irdl.results(result: %i32)
  }}
  irdl.operation @ldmatrix_turned {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32)
    irdl.results(first: %i32, second: %i32, third: %i32, fourth: %i32)
  }}
  irdl.operation @stmatrix {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32, first: %i32, second: %i32, third: %i32, fourth: %i32)
  }}
  irdl.operation @prmt {{
    %i32 = irdl.is i32
    irdl.operands(low: %i32, high: %i32, selector: %i32)
    irdl.results(result: %i32)
  }}
  irdl.operation @anew {{
    %i32 = irdl.is i32
    irdl.operands(value: %i32, step: %i32)
    irdl.results(result: %i32)
  }}
  irdl.operation @sync_warp {{ }}
  irdl.operation @fence_async_shared {{ }}
  irdl.operation @fence_async_global {{ }}
  irdl.operation @fence_mbarrier_init {{ }}
  irdl.operation @mbarrier_init {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32, arrivals: %i32)
  }}
  irdl.operation @mbarrier_arrive {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32)
  }}
  irdl.operation @mbarrier_arrive_expect {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32, bytes: %i32)
  }}
  irdl.operation @mbarrier_wait {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32, parity: %i32)
  }}
  irdl.operation @mbarrier_arrive_at {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32, rank: %i32)
  }}
  irdl.operation @mbarrier_arrive_expect_at {{
    %i32 = irdl.is i32
    irdl.operands(address: %i32, bytes: %i32, rank: %i32)
  }}
  irdl.operation @cluster_sync {{ }}
  irdl.operation @copy_at {{
    %i32 = irdl.is i32
    irdl.operands(destination: %i32, source: %i32, bytes: %i32, barrier: %i32, rank: %i32)
  }}
  irdl.operation @tma_prefetch {{
    %ptr = irdl.base "!llvm.ptr"
    irdl.operands(map: %ptr)
  }}
  irdl.operation @tma_load {{
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    irdl.operands(destination: %i32, map: %ptr, barrier: %i32, coordinates: variadic %i32)
  }}
  irdl.operation @tma_load_to_all {{
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    %int = irdl.base "#builtin.integer"
    irdl.operands(destination: %i32, map: %ptr, barrier: %i32, coordinates: variadic %i32)
    irdl.attributes {{ "blocks" = %int }}
  }}
  irdl.operation @tma_store {{
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    irdl.operands(source: %i32, map: %ptr, coordinates: variadic %i32)
  }}
  irdl.operation @tma_commit {{ }}
  irdl.operation @tma_wait {{
    %int = irdl.base "#builtin.integer"
    irdl.attributes {{ "newer" = %int }}
  }}
  irdl.operation @tma_wait_read {{
    %int = irdl.base "#builtin.integer"
    irdl.attributes {{ "newer" = %int }}
  }}
  irdl.operation @wgmma {{
    %int = irdl.base "#builtin.integer"
    %bf16 = irdl.is "bf16"
    %f16 = irdl.is "f16"
    %f8e4m3 = irdl.is "f8e4m3"
    %f8e5m2 = irdl.is "f8e5m2"
    %dtype = irdl.any_of(%bf16, %f16, %f8e4m3, %f8e5m2)
    %no = irdl.is 0 : i64
    %yes = irdl.is 1 : i64
    %accumulates = irdl.any_of(%no, %yes)
    %a_registers = irdl.any_of(%no, %yes)
    %a_transposed = irdl.any_of(%no, %yes)
    %b_transposed = irdl.any_of(%no, %yes)
    %a_steps = irdl.base "#builtin.dense_array"
    %b_steps = irdl.base "#builtin.dense_array"
    irdl.attributes {{
      "n" = %int, "dtype" = %dtype, "accumulates" = %accumulates, "a_registers" = %a_registers,
      "a_transposed" = %a_transposed, "b_transposed" = %b_transposed, "a_steps" = %a_steps, "b_steps" = %b_steps
    }}
    %sums = irdl.base "!builtin.vector"
    %descriptor = irdl.is i64
    %a = irdl.any  // one descriptor or several vectors: IRDL has no base types in `any_of`
    irdl.operands(accumulator: optional %sums, b: %descriptor, a: variadic %a)
    irdl.results(result: %sums)
  }}
  irdl.operation @computed {{
    %f32 = irdl.is f32
    irdl.operands(value: %f32)
  }}
  irdl.operation @wgmma_wait {{
    %newer = irdl.base "#builtin.integer"
    %accumulators = irdl.base "#builtin.integer"
    irdl.attributes {{ "newer" = %newer, "accumulators" = %accumulators }}
    %f32 = irdl.is f32
    {" ".join(f'%sums{i} = irdl.base "!builtin.vector"' for i in _WAITED)}
    irdl.operands({", ".join(f"accumulator{i}: optional %sums{i}" for i in _WAITED)}, after: variadic %f32)
    irdl.results({", ".join(f"result{i}: optional %sums{i}" for i in _WAITED)})
  }}
}}
"""


@functools.cache
def load() -> None:
    """Register the dialect with the process's MLIR context, once: what reads its operations from text calls this."""
    with LOCK:
        if not context().is_registered_operation(f"{NAME}.elect"):
            declare(context(), NAME, _IRDL)
