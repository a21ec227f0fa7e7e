"""Vector compares (CDNA3 ISA, section 16.9): the result mask goes to VCC or an SGPR pair, CMPX also to EXEC."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fly.emulator.decode import EXEC, VCC, Instruction
from fly.emulator.floats import flush
from fly.emulator.operands import unknown, write_scalar
from fly.emulator.state import Group, pack
from fly.emulator.valu import sources

if TYPE_CHECKING:
    from fly.emulator.executing import Executing

_Relation = Callable[[Any, Any], Any]


def _not(function: _Relation) -> _Relation:
    return lambda a, b: ~function(a, b)


def _unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


_INTEGER: dict[str, _Relation] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "f": lambda a, b: np.False_, "t": lambda a, b: np.True_,
}  # fmt: skip
_FLOAT: dict[str, _Relation] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b), "neq": np.not_equal, "nlt": _not(np.less), "nle": _not(np.less_equal),
    "ngt": _not(np.greater), "nge": _not(np.greater_equal), "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~_unordered(a, b), "u": _unordered, "f": lambda a, b: np.False_, "tru": lambda a, b: np.True_,
}  # fmt: skip


def _class(x: Any, wanted: Any) -> Any:
    """V_CMP_CLASS: bits 0 sNaN, 1 qNaN, 2 -inf, 3 -normal, 4 -subnormal, 5 -0, 6 +0, 7 +subnormal, 8 +normal, 9
    +inf.
    """
    x = np.asarray(x)
    info = np.finfo(x.dtype)
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    quiet = unsigned(1 << (info.nmant - 1))
    nan, negative, size = np.isnan(x), np.signbit(x), np.abs(x)
    is_quiet = (np.ascontiguousarray(x).view(unsigned).reshape(x.shape) & quiet) != 0
    conditions = [
        nan & ~is_quiet, nan & is_quiet, np.isinf(x) & negative, None, (size < info.tiny) & (size > 0) & negative,
        (size == 0) & negative, (size == 0) & ~negative, (size < info.tiny) & (size > 0) & ~negative, None,
        np.isinf(x) & ~negative,
    ]  # fmt: skip
    normal = np.isfinite(x) & (size >= info.tiny)
    conditions[3], conditions[8] = normal & negative, normal & ~negative
    result = np.False_
    for bit, condition in enumerate(conditions):
        result = result | condition & ((wanted >> np.uint32(bit) & np.uint32(1)) != 0)
    return result


def compile_vopc(inst: Instruction, machine: Executing) -> Callable[[Group], None]:
    """v_cmp_* and v_cmpx_* in VOPC, SDWA and VOP3 forms."""
    _, kind_of, relation, kind = inst.name.split("_", 3)
    function: _Relation
    if relation == "class":
        function, kinds = _class, (kind, "u32")
    else:
        table = _FLOAT if kind[0] == "f" else _INTEGER
        if relation not in table:
            raise unknown(inst, machine)
        function, kinds = table[relation], (kind, kind)
    a, b = sources(inst, machine, kinds)[:2]
    if inst.form == "VOP3_SDST":
        target = inst.get("vdst")
    elif "SDWA" in inst.form:
        target = inst.get("sdst") if inst.get("sd") else VCC
    else:
        target = VCC
    write, to_exec = write_scalar(target, True), kind_of == "cmpx"
    write_exec, flushes = write_scalar(EXEC, True), kind == "f32"

    def run(g: Group) -> None:
        if flushes and g.flush32:
            result = function(flush(a(g)), flush(b(g)))
        else:
            result = function(a(g), b(g))
        bits = pack(result & g.mask)
        write(g, bits)
        if to_exec:
            write_exec(g, bits)

    return run
