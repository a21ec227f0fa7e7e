"""Inline PTX: what the `hopper` dialect lowers to, and for authors an instruction that no operation has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from fly.backends.nvvm.emit import require_hopper
from fly.ir.context import context, emit
from fly.ir.mlir import ir
from fly.ir.value import Traced


@functools.cache
def _att_syntax() -> ir.Attribute:
    with context():
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)


def ptx(text: str, constraints: str, operands: Sequence[Traced], results: Sequence[ir.Type] = ()) -> list[ir.Value]:
    """Emit PTX with side effects; `constraints` as in LLVM's inline assembly, a memory clobber is added.

    Operands are `$0`, `$1` and so on, results first. Threads of a warp that execute it together stay together: code
    generation marks it convergent.

    Raises:
        TargetError: the kernel is traced for a target without Hopper's instructions.
    """
    require_hopper()
    return assembly(emit, text, constraints, [o.ir for o in operands], results)


def assembly(
    build: Callable[..., ir.Operation],
    text: str,
    constraints: str,
    operands: Sequence[ir.Value],
    results: Sequence[ir.Type] = (),
    pure: bool = False,
) -> list[ir.Value]:
    """`ptx` on values of the compiler's IR: `build(name, operands, results, attributes)` makes each operation.

    `pure`: it has no side effects, and does not touch memory.
    """
    types = list(results)
    if len(types) > 1:
        types = [ir.Type.parse(f"!llvm.struct<({', '.join(str(t) for t in results)})>", context())]
    attributes = {
        "asm_string": ir.StringAttr.get(text, context()),
        "constraints": ir.StringAttr.get(
            ",".join(filter(None, [constraints, "" if pure else "~{memory}"])), context()
        ),
        "asm_dialect": _att_syntax(),
    }
    if not pure:
        attributes["has_side_effects"] = ir.UnitAttr.get(context())
    op = build("llvm.inline_asm", list(operands), types, attributes)
    if len(results) < 2:
        return list(op.results)
    return [
        build(
            "llvm.extractvalue", [op.results[0]], [type_], {"position": ir.DenseI64ArrayAttr.get([i], context())}
        ).results[0]
        for i, type_ in enumerate(results)
    ]
