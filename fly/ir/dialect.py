"""The `fly` dialect: what portable kernels say and a backend lowers.

Declared through IRDL, so the verifier knows every operation's operands, results and attributes.

| operation | meaning |
|---|---|
| `fly.id` | block or thread index or count along a dimension, or lane index, i32; ".anew": read there, not kept |
| `fly.reread` | a parameter of the kernel, or a number that a wave shares, read there, not kept from before |
| `fly.alloc_shared` | a named buffer in shared memory; placed by `plan-shared-memory` |
| `fly.barrier` | every thread of the block arrives; shared memory is ordered across it |
| `fly.shuffle` | the value of another lane of the wave, by index or by xor |
| `fly.pair` | the values of a lane and of its xor partner, in either order |
| `fly.swap` | half of two values, with the xor partner: see `swap_lanes` |
| `fly.any_lane` | whether an i1 holds in any lane of the wave; the same in every lane |
| `fly.mma` | one matrix instruction on a wave's operand and accumulator registers |
| `fly.load_matrix` | a wave-wide (transposing) load of an operand from shared memory |
| `fly.load_bounded` | load at base + offset bytes; all zero where offset is not below bound |
| `fly.store_bounded` | store at base + offset bytes; nothing where offset is not below bound |
| `fly.atomic_add` | add to global memory, for all of the device, relaxed or (of an i32) release |
| `fly.atomic_add_bounded` | the same at base + offset bytes; nothing where offset is not below bound |
| `fly.atomic_fetch` | "add" to, or "inc" in a circle, an i32 of global memory; what it was |
| `fly.load_acquire` | load an i32 of global memory; what came before its release is seen after it |
| `fly.publish` | this thread's stores to global memory are part of what another thread of the block releases |
| `fly.copy_async` | start global to shared, or zeros where `inside` does not hold; gives a token |
| `fly.copy_direct` | for a whole wave: lane l's bytes land at destination + l * bytes; `shift` moves both sides |
| `fly.join` | a token that stands for several |
| `fly.wait` | until the copies of the tokens have landed, for the threads that issued them |
| `fly.wait_count` | what `insert-waits` makes of it: at most `newer` copies may be outstanding |
| `fly.commit` | closes a group of copies (made by `insert-waits`) |
| `fly.narrow` | f32 to a 16-bit float, ties in any direction |
| `fly.narrow_pairs` | f32 to an 8-bit float, called `to`; an even number of them |
| `fly.widen_pairs` | an 8-bit float, called `from`, to f32; an even number of them |
| `fly.rcp` | fast approximate reciprocal, f32 |
| `fly.sched` | scheduling hint: a barrier to the scheduler, or a wave priority |
"""

from __future__ import annotations

import functools
import sys
import types

from fly.ir.mlir import ir, irdl

_IRDL = """
irdl.dialect @fly {
  irdl.type @token
  irdl.operation @id {
    %i32 = irdl.is i32
    %name = irdl.base "#builtin.string"
    irdl.attributes { "name" = %name }
    irdl.results(result: %i32)
  }
  irdl.operation @reread {
    %any = irdl.any
    irdl.operands(parameter: %any)
    irdl.results(result: %any)
  }
  irdl.operation @alloc_shared {
    %ptr = irdl.base "!llvm.ptr"
    %bytes = irdl.base "#builtin.integer"
    %align = irdl.base "#builtin.integer"
    %name = irdl.base "#builtin.string"
    irdl.attributes { "name" = %name, "bytes" = %bytes, "align" = %align }
    irdl.results(result: %ptr)
  }
  irdl.operation @barrier { }
  irdl.operation @shuffle {
    %any = irdl.any
    %i32 = irdl.is i32
    %mode = irdl.base "#builtin.string"
    irdl.attributes { "mode" = %mode }
    irdl.operands(value: %any, lane: %i32)
    irdl.results(result: %any)
  }
  irdl.operation @pair {
    %any = irdl.any
    %int = irdl.base "#builtin.integer"
    irdl.attributes { "mask" = %int }
    irdl.operands(value: %any)
    irdl.results(first: %any, second: %any)
  }
  irdl.operation @swap {
    %any = irdl.any
    %int = irdl.base "#builtin.integer"
    irdl.attributes { "mask" = %int }
    irdl.operands(first: %any, second: %any)
    irdl.results(low: %any, high: %any)
  }
  irdl.operation @any_lane {
    %i1 = irdl.is i1
    irdl.operands(condition: %i1)
    irdl.results(result: %i1)
  }
  irdl.operation @mma {
    %a = irdl.base "!builtin.vector"
    %b = irdl.base "!builtin.vector"
    %c = irdl.base "!builtin.vector"
    %atom = irdl.base "#builtin.string"
    irdl.attributes { "atom" = %atom }
    irdl.operands(a: %a, b: %b, c: %c)
    irdl.results(result: %c)
  }
  irdl.operation @load_matrix {
    %ptr = irdl.base "!llvm.ptr"
    %vec = irdl.base "!builtin.vector"
    %atom = irdl.base "#builtin.string"
    irdl.attributes { "atom" = %atom }
    irdl.operands(address: %ptr)
    irdl.results(result: %vec)
  }
  irdl.operation @load_bounded {
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    %any = irdl.any
    %int = irdl.base "#builtin.integer"
    irdl.attributes { "align" = %int }
    irdl.operands(base: %ptr, offset: %i32, bound: %i32)
    irdl.results(result: %any)
  }
  irdl.operation @store_bounded {
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    %any = irdl.any
    %int = irdl.base "#builtin.integer"
    irdl.attributes { "align" = %int }
    irdl.operands(value: %any, base: %ptr, offset: %i32, bound: %i32)
  }
  irdl.operation @atomic_add {
    %ptr = irdl.base "!llvm.ptr"
    %any = irdl.any
    %int = irdl.base "#builtin.integer"
    %relaxed = irdl.is "relaxed"
    %release = irdl.is "release"
    %order = irdl.any_of(%relaxed, %release)
    irdl.attributes { "align" = %int, "order" = %order }
    irdl.operands(value: %any, address: %ptr)
  }
  irdl.operation @atomic_add_bounded {
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    %any = irdl.any
    %int = irdl.base "#builtin.integer"
    irdl.attributes { "align" = %int }
    irdl.operands(value: %any, base: %ptr, offset: %i32, bound: %i32)
  }
  irdl.operation @atomic_fetch {
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    %relaxed = irdl.is "relaxed"
    %acquire = irdl.is "acquire"
    %release = irdl.is "release"
    %acq_rel = irdl.is "acq_rel"
    %order = irdl.any_of(%relaxed, %acquire, %release, %acq_rel)
    %add = irdl.is "add"
    %inc = irdl.is "inc"
    %operation = irdl.any_of(%add, %inc)
    irdl.attributes { "order" = %order, "operation" = %operation }
    irdl.operands(pointer: %ptr, operand: %i32)
    irdl.results(result: %i32)
  }
  irdl.operation @load_acquire {
    %ptr = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    irdl.operands(address: %ptr)
    irdl.results(result: %i32)
  }
  irdl.operation @publish { }
  irdl.operation @copy_async {
    %dst = irdl.base "!llvm.ptr"
    %src = irdl.base "!llvm.ptr"
    %i1 = irdl.is i1
    %int = irdl.base "#builtin.integer"
    %token = irdl.base @fly::@token
    irdl.attributes { "bytes" = %int }
    irdl.operands(destination: %dst, source: %src, inside: %i1)
    irdl.results(token: %token)
  }
  irdl.operation @copy_direct {
    %dst = irdl.base "!llvm.ptr"
    %src = irdl.base "!llvm.ptr"
    %i32 = irdl.is i32
    %bytes = irdl.base "#builtin.integer"
    %shift = irdl.base "#builtin.integer"
    %token = irdl.base @fly::@token
    irdl.attributes { "bytes" = %bytes, "shift" = %shift }
    irdl.operands(destination: %dst, base: %src, offset: %i32, bound: %i32)
    irdl.results(token: %token)
  }
  irdl.operation @join {
    %token = irdl.base @fly::@token
    irdl.operands(tokens: variadic %token)
    irdl.results(token: %token)
  }
  irdl.operation @wait {
    %token = irdl.base @fly::@token
    irdl.operands(token: %token)
  }
  irdl.operation @wait_count {
    %int = irdl.base "#builtin.integer"
    irdl.attributes { "newer" = %int }
  }
  irdl.operation @commit { }
  irdl.operation @narrow {
    %from = irdl.base "!builtin.vector"
    %to = irdl.base "!builtin.vector"
    irdl.operands(value: %from)
    irdl.results(result: %to)
  }
  irdl.operation @narrow_pairs {
    %from = irdl.base "!builtin.vector"
    %to = irdl.base "!builtin.vector"
    irdl.operands(value: %from)
    irdl.results(result: %to)
    %kind = irdl.base "#builtin.string"
    irdl.attributes { "to" = %kind }
  }
  irdl.operation @widen_pairs {
    %from = irdl.base "!builtin.vector"
    %to = irdl.base "!builtin.vector"
    irdl.operands(value: %from)
    irdl.results(result: %to)
    %kind = irdl.base "#builtin.string"
    irdl.attributes { "from" = %kind }
  }
  irdl.operation @rcp {
    %any = irdl.any
    irdl.operands(value: %any)
    irdl.results(result: %any)
  }
  irdl.operation @sched {
    %kind = irdl.base "#builtin.string"
    %int = irdl.base "#builtin.integer"
    irdl.attributes { "kind" = %kind, "value" = %int }
  }
}
"""


def declare(ctx: ir.Context, name: str, source: str) -> None:
    """Register a dialect, given as IRDL, with an MLIR context."""
    with ctx, ir.Location.unknown():
        irdl.load_dialects(ir.Module.parse(source))
    # For each operation they touch, the bindings look for a Python module of its dialect. Finding an empty one
    # is quick; not finding any searches the import path again every time.
    sys.modules.setdefault(f"mlir.dialects.{name}", types.ModuleType(f"mlir.dialects.{name}"))


def load(ctx: ir.Context) -> None:
    """Register the dialect with an MLIR context."""
    declare(ctx, "fly", _IRDL)


@functools.cache
def token_type() -> ir.Type:
    """`!fly.token`: what an asynchronous copy gives and a wait takes."""
    from fly.ir.context import context

    return ir.Type.parse("!fly.token", context())
