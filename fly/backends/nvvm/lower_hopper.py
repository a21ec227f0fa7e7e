"""The `hopper` dialect as inline PTX: an instruction, or a few that belong together, for each operation.

Several products with their fence and their group are one piece of assembly, which no pass can pull apart.
"""

from __future__ import annotations

import re

from mlir import ir

from fly.backends.lowering import Builder, Rule
from fly.backends.nvvm.inline import assembly
from fly.backends.nvvm.wgmma import DTYPES, K_BYTES, K, M
from fly.ir.dtypes import dtype
from fly.passes.walk import integer, string

_CONSTRAINTS = {"i32": "r", "f32": "f"}  # of i64 and pointers: "l"

# $0, $1 and so on are the results and then the operands, <name> is an attribute
_INSTRUCTIONS = {
    "barrier_sync": "barrier.cta.sync.aligned $0, $1;",
    "barrier_arrive": "barrier.cta.arrive.aligned $0, $1;",
    "barrier_any": """{
.reg .pred p, q;
setp.ne.u32 p, $3, 0;
barrier.cta.red.or.pred.aligned q, $1, $2, p;
selp.u32 $0, 1, 0, q;
}""",
    "setmaxnreg": "setmaxnreg.<action>.sync.aligned.u32 <registers>;",
    "elect": "{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 $0, 1, 0, p;\n}",
    "ldmatrix_turned": "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
    "stmatrix": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    "prmt": "prmt.b32 $0, $1, $2, $3;",
    "sync_warp": "bar.warp.sync 0xffffffff;",
    "fence_async_shared": "fence.proxy.async.shared::cta;",
    "fence_async_global": "fence.proxy.async.global;",
    "fence_mbarrier_init": "fence.mbarrier_init.release.cluster;",
    "mbarrier_init": "mbarrier.init.shared::cta.b64 [$0], $1;",
    "mbarrier_arrive": "{\n.reg .b64 s;\nmbarrier.arrive.shared::cta.b64 s, [$0];\n}",
    "mbarrier_arrive_expect": "{\n.reg .b64 s;\nmbarrier.arrive.expect_tx.shared::cta.b64 s, [$0], $1;\n}",
    # labels are local to the braces
    "mbarrier_wait": """{
.reg .pred p;
again:
mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
@p bra done;
bra again;
done:
}""",
    "mbarrier_arrive_at": """{
.reg .b32 there;
mapa.shared::cluster.u32 there, $0, $1;
mbarrier.arrive.shared::cluster.b64 _, [there];
}""",
    "mbarrier_arrive_expect_at": """{
.reg .b32 there;
mapa.shared::cluster.u32 there, $0, $2;
mbarrier.arrive.expect_tx.shared::cluster.b64 _, [there], $1;
}""",
    "cluster_sync": "barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;",
    "copy_at": """{
.reg .b32 there, done;
mapa.shared::cluster.u32 there, $0, $4;
mapa.shared::cluster.u32 done, $3, $4;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [$1], $2, [done];
}""",
    "tma_prefetch": "prefetch.tensormap [$0];",
    "tma_commit": "cp.async.bulk.commit_group;",
    "tma_wait": "cp.async.bulk.wait_group <newer>;",
    "tma_wait_read": "cp.async.bulk.wait_group.read <newer>;",
}

# what no pass takes apart, but moves and leaves out as arithmetic
_PURE = {"anew": "mov.b32 $0, $1;"}

# <rank> coordinates follow the other operands
_COPIES = {
    "tma_load": (
        3,
        "cp.async.bulk.tensor.<rank>d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[$0], [$1, {<coordinates>}], [$2];",
    ),
    "tma_load_to_all": (
        3,
        "{\n.reg .b16 all;\nmov.b16 all, <mask>;\n"
        "cp.async.bulk.tensor.<rank>d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[$0], [$1, {<coordinates>}], [$2], all;\n}",
    ),
    "tma_store": (2, "cp.async.bulk.tensor.<rank>d.global.shared::cta.bulk_group [$1, {<coordinates>}], [$0];"),
}


def _constraints(op: ir.Operation) -> str:
    """Registers of the results' and the operands' types."""
    results, operands = ([_CONSTRAINTS.get(str(v.type), "l") for v in vs] for vs in (op.results, op.operands))
    return ",".join([f"={c}" for c in results] + operands)


def _issue(op: ir.Operation, b: Builder, text: str, pure: bool = False) -> tuple[ir.Value, ...]:
    results = [result.type for result in op.results]
    return tuple(assembly(b, text, _constraints(op), list(op.operands), results, pure))


def _filled(text: str, op: ir.Operation) -> str:
    """An instruction with the operation's attributes in their places."""

    def value(match: re.Match[str]) -> str:
        attribute = op.attributes[match[1]]
        return string(op, match[1]) if isinstance(attribute, ir.StringAttr) else str(integer(op, match[1]))

    return re.sub(r"<(\w+)>", value, text)


def _instruction(text: str, pure: bool = False) -> Rule:
    return lambda op, b: _issue(op, b, _filled(text, op), pure)


def _copy(others: int, text: str) -> Rule:
    def rule(op: ir.Operation, b: Builder) -> tuple[ir.Value, ...]:
        rank = len(op.operands) - others
        places = ", ".join(f"${others + i}" for i in range(rank))
        filled = text.replace("<rank>", str(rank)).replace("<coordinates>", places)
        if "blocks" in op.attributes:
            filled = filled.replace("<mask>", str((1 << integer(op, "blocks")) - 1))
        return _issue(op, b, filled)

    return rule


# warpgroup products

_WORDS = 4  # registers of A for each step


def _elements(b: Builder, vector: ir.Value) -> list[ir.Value]:
    type_ = ir.VectorType(vector.type)
    return [
        b.value("vector.extract", [vector], type_.element_type, {"static_position": ir.DenseI64ArrayAttr.get([i])})
        for i in range(type_.shape[0])
    ]


def _words(b: Builder, registers: ir.Value) -> list[ir.Value]:
    """A step's registers of A as i32."""
    words = ir.VectorType.get([_WORDS], ir.IntegerType.get_signless(32))
    return _elements(b, b.value("vector.bitcast", [registers], words))


def _product(op: ir.Operation, n: int, ties: int) -> str:
    """The assembly of a product; results are followed by `ties` operands, B's descriptor and A."""
    kind = dtype(string(op, "dtype"))
    name, k = DTYPES[kind.name], K_BYTES // kind.bytes
    in_registers = integer(op, "a_registers")
    # how operands lie; 8-bit ones lie one way only
    turned = [] if in_registers else [integer(op, "a_transposed")]
    lies = "".join(f", {x}" for x in (*turned, integer(op, "b_transposed"))) if k == K else ""
    count = n // 2
    result = ", ".join(f"${i}" for i in range(count))
    b_place = count + ties
    a_steps, b_steps = (list(ir.DenseI64ArrayAttr(op.attributes[key])) for key in ("a_steps", "b_steps"))
    text = ["{", ".reg .pred first;", ".reg .b64 da, db;"]
    text += [f"setp.{'eq' if ties else 'ne'}.b32 first, 0, 0;", "wgmma.fence.sync.aligned;"]
    for t, b_step in enumerate(b_steps):
        text.append(f"add.s64 db, ${b_place}, {b_step};")
        if in_registers:
            a = "{" + ", ".join(f"${b_place + 1 + _WORDS * t + i}" for i in range(_WORDS)) + "}"
        else:
            text.append(f"add.s64 da, ${b_place + 1}, {a_steps[t]};")
            a = "da"
        # only the first step may start from zero
        onto = "1" if t else "first"
        shape = f"m{M}n{n}k{k}.f32.{name}.{name}"
        text.append(f"wgmma.mma_async.sync.aligned.{shape} {{{result}}}, {a}, db, {onto}, 1, 1{lies};")
    return "\n".join([*text, "wgmma.commit_group.sync.aligned;", "}"])


def _wgmma(op: ir.Operation, b: Builder) -> ir.Value:
    n, accumulates = integer(op, "n"), integer(op, "accumulates")
    descriptor, *a = list(op.operands)[accumulates:]
    if integer(op, "a_registers"):
        a = [word for registers in a for word in _words(b, registers)]
        constraints = ["l"] + ["r"] * len(a)
    else:
        constraints = ["l", "l"]
    sums = _elements(b, op.operands[0]) if accumulates else []
    count, ties = n // 2, len(sums)
    # results that no operand is tied to are written by the first step, before others read their operands
    results = ["=f" if ties else "=&f"] * count
    constraints = [*results, *map(str, range(ties)), *constraints]
    type_ = ir.VectorType(op.results[0].type)
    text = _product(op, n, ties)
    values = assembly(b, text, ",".join(constraints), [*sums, descriptor, *a], [type_.element_type] * count)
    return b.value("vector.from_elements", values, type_)


def _held(count: int, first: int = 0) -> str:
    """Assembly behind which `count` values from operand `first` on are computed.

    ptxas moves arithmetic past a wait, and products past arithmetic, but neither past a trap that depends on it.
    """
    tests = [f"setp.lt.or.f32 p, ${first + i}, 0fBF800000, p;" for i in range(count)]
    return "\n".join([".reg .pred p;", "setp.ne.b32 p, 0, 0;", *tests, "vote.sync.any.pred p, p, -1;", "@p trap;"])


def _waiting(newer: int, first: int, count: int) -> str:
    """The assembly of a wait; `count` values from operand `first` on are to be computed before it."""
    wait = f"wgmma.wait_group.sync.aligned {newer};"
    return "\n".join(["{", _held(count, first), wait, "}"]) if count else wait


def _computed(op: ir.Operation, b: Builder) -> tuple[ir.Value, ...]:
    return _issue(op, b, "\n".join(["{", _held(1), "}"]))


def _wgmma_wait(op: ir.Operation, b: Builder) -> tuple[ir.Value, ...]:
    waited = integer(op, "accumulators")
    operands = list(op.operands)
    accumulators, after = operands[:waited], operands[waited:]
    sums = [element for accumulator in accumulators for element in _elements(b, accumulator)]
    count = len(sums)
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["f"] * len(after)
    text = _waiting(integer(op, "newer"), 2 * count, len(after))
    values = iter(assembly(b, text, ",".join(constraints), [*sums, *after], [v.type for v in sums]))
    types = [ir.VectorType(result.type) for result in op.results]
    return tuple(
        b.value("vector.from_elements", [next(values) for _ in range(type_.shape[0])], type_) for type_ in types
    )


RULES: dict[str, Rule] = {
    **{f"hopper.{name}": _instruction(text) for name, text in _INSTRUCTIONS.items()},
    **{f"hopper.{name}": _instruction(text, pure=True) for name, text in _PURE.items()},
    **{f"hopper.{name}": _copy(others, text) for name, (others, text) in _COPIES.items()},
    "hopper.computed": _computed,
    "hopper.wgmma": _wgmma,
    "hopper.wgmma_wait": _wgmma_wait,
}
