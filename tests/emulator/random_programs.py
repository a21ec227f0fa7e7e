"""Random LLVM IR functions without undefined behaviour, whose results every correct machine agrees on to the bit.

A program reads a lane's `IN_BYTES`, computes on integers, floats and vectors of them with branches, loops and private
memory, and writes at most `OUT_BYTES`. NaNs are made canonical wherever their bits could be seen, shift amounts and
divisors are guarded, and operations that the host's LLVM does not compile exactly (float16 fma, double to half) are
left out.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass

IN_BYTES = 256
OUT_BYTES = 128
INTS = ("i8", "i16", "i32", "i64")
FLOATS = ("half", "float", "double")
VECTORS = ("<2 x i16>", "<2 x i32>", "<4 x i32>", "<3 x i32>", "<4 x i8>", "<2 x i64>", "<2 x half>", "<2 x float>",
           "<4 x half>")  # fmt: skip
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "float": 32, "double": 64}
_SUFFIX = {"half": "f16", "float": "f32", "double": "f64"}
_NAN = {"half": 0x7E00, "float": 0x7FC00000, "double": 0x7FF8000000000000}
_INFINITY = {"half": 0x7C00, "float": 0x7F800000, "double": 0x7FF0000000000000}
_BINARY = ("add", "sub", "mul", "and", "or", "xor", "add", "sub", "and", "xor")
_MINMAX = ("umin", "umax", "smin", "smax")
_SATURATING = ("uadd.sat", "sadd.sat", "usub.sat", "ssub.sat")


def element(kind: str) -> str:
    """Element type of a vector, or the type itself."""
    return kind.split(" x ")[1].rstrip(">") if kind[0] == "<" else kind


def count(kind: str) -> int:
    """Elements of a type."""
    return int(kind[1:].split(" x ")[0]) if kind[0] == "<" else 1


def mangled(kind: str) -> str:
    """Type suffix of an intrinsic's name."""
    scalar = _SUFFIX.get(element(kind), element(kind))
    return f"v{count(kind)}{scalar}" if kind[0] == "<" else scalar


def splat(kind: str, text: str) -> str:
    """A constant of a type with all elements `text`."""
    if kind[0] != "<":
        return text
    return "<" + ", ".join(f"{element(kind)} {text}" for _ in range(count(kind))) + ">"


def integers(kind: str) -> str:
    """The integer type of the same shape and width."""
    scalar = f"i{BITS[element(kind)]}"
    return f"<{count(kind)} x {scalar}>" if kind[0] == "<" else scalar


@dataclass(frozen=True)
class Dialect:
    """What differs between the machines: pointers to buffers, private memory, the bfloat16 helpers, and whether
    minimumnum and maximumnum are functions of comparisons here.

    LLVM 22.1 gives NaN for a NaN and a scalar that it knows to be a number (one converted from an integer), with
    AVX-512.
    """

    buffer: str
    private: str
    helpers: str
    compares: bool


_NATIVE_BF16 = """
define internal i16 @to_bf16(float %x) alwaysinline {
  %b = fptrunc float %x to bfloat
  %i = bitcast bfloat %b to i16
  %nan = fcmp uno float %x, %x
  %r = select i1 %nan, i16 32704, i16 %i
  ret i16 %r
}
define internal float @from_bf16(i16 %x) alwaysinline {
  %b = bitcast i16 %x to bfloat
  %f = fpext bfloat %b to float
  ret float %f
}
"""
_INTEGER_BF16 = """
define internal i16 @to_bf16(float %x) alwaysinline {
  %b = bitcast float %x to i32
  %odd0 = lshr i32 %b, 16
  %odd = and i32 %odd0, 1
  %bias = add i32 %odd, 32767
  %sum = add i32 %b, %bias
  %high = lshr i32 %sum, 16
  %i = trunc i32 %high to i16
  %nan = fcmp uno float %x, %x
  %r = select i1 %nan, i16 32704, i16 %i
  ret i16 %r
}
define internal float @from_bf16(i16 %x) alwaysinline {
  %w = zext i16 %x to i32
  %s = shl i32 %w, 16
  %f = bitcast i32 %s to float
  ret float %f
}
"""
GPU = Dialect("ptr addrspace(1)", "addrspace(5)", _NATIVE_BF16, compares=False)
HOST = Dialect("ptr", "addrspace(0)", _INTEGER_BF16, compares=True)


def _by_comparison(function: str, which: str, kind: str) -> str:
    """The definition of `@minimumnum` or `@maximumnum` on a type: of equal numbers only zeros differ, in the sign."""
    raw, bools = integers(kind), f"<{count(kind)} x i1>" if kind[0] == "<" else "i1"
    relation, merge = ("olt", "or") if which == "minimumnum" else ("ogt", "and")
    return f"""define internal {kind} {function}({kind} %x, {kind} %y) {{
  %x.bits = bitcast {kind} %x to {raw}
  %y.bits = bitcast {kind} %y to {raw}
  %same = {merge} {raw} %x.bits, %y.bits
  %zero = bitcast {raw} %same to {kind}
  %equal = fcmp oeq {kind} %x, %y
  %less = fcmp {relation} {kind} %x, %y
  %x.nan = fcmp uno {kind} %x, %x
  %y.nan = fcmp uno {kind} %y, %y
  %numbers = select {bools} %less, {kind} %x, {kind} %y
  %ordered = select {bools} %equal, {kind} %zero, {kind} %numbers
  %either = select {bools} %y.nan, {kind} %x, {kind} %ordered
  %result = select {bools} %x.nan, {kind} %y, {kind} %either
  ret {kind} %result
}}"""


class Builder:
    """One random program in one dialect; the same seed gives the same program in every dialect."""

    def __init__(self, seed: str, dialect: Dialect, size: int):
        self.random, self.dialect, self.size = random.Random(seed), dialect, size
        self.lines: list[str] = []
        self.declarations: set[str] = set()
        self.scopes: list[list[tuple[str, str]]] = [[]]
        self.used: set[str] = set()
        self.names = self.labels = 0
        self.block = "entry"
        self.slots = 0

    # ---- values ----------------------------------------

    def emit(self, text: str, kind: str, keep: bool = True) -> str:
        """Append `%n = text`; `keep` makes the value available as an operand."""
        self.names += 1
        name = f"%v{self.names}"
        self.lines.append(f"  {name} = {text}")
        if keep:
            self.scopes[-1].append((kind, name))
        return name

    def call(self, function: str, result: str, *operands: tuple[str, str], keep: bool = True) -> str:
        """Call an intrinsic, declaring it."""
        kinds = ", ".join(k for k, _ in operands)
        self.declarations.add(f"declare {result} @{function}({kinds})")
        return self.emit(f"call {result} @{function}({', '.join(f'{k} {v}' for k, v in operands)})", result, keep)

    def constant(self, kind: str) -> str:
        """A random constant, often an edge of its type."""
        r, e = self.random, element(kind)
        if kind[0] == "<":
            return "<" + ", ".join(f"{e} {self.constant(e)}" for _ in range(count(kind))) + ">"
        bits = BITS[e]
        if e[0] == "i":
            return str(r.choice([0, 1, 2, 3, 7, -1, (1 << bits - 1) - 1, -(1 << bits - 1), r.getrandbits(bits - 1)]))
        value = r.choice([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0, 4.0, -0.25, 1.5, 10.0, 65504.0, 2.0**-14, 2.0**-24])
        if e == "half":
            return f"0xH{int.from_bytes(struct.pack('<e', value), 'little'):04X}"
        return f"0x{int.from_bytes(struct.pack('<d', value), 'little'):016X}"

    def pick(self, kind: str, constants: bool = True) -> str:
        """An operand: a recent value, a constant, or a fresh load."""
        r = self.random
        if kind == "i1":
            return self.compare()
        if constants and r.random() < 0.15:
            return self.constant(kind)
        have = [n for scope in self.scopes for k, n in scope if k == kind]
        if have and r.random() < 0.8:
            name = r.choice(have[-4:])
            self.used.add(name)
            return name
        name = self.load(kind)
        self.used.add(name)
        return name

    def load(self, kind: str) -> str:
        """A naturally aligned load of a lane's input; NaNs become canonical."""
        scalar = BITS[element(kind)] // 8
        size = scalar * (4 if count(kind) == 3 else count(kind))
        offset = self.random.randrange(0, IN_BYTES - size + 1, size)
        pointer = self.emit(f"getelementptr i8, {self.dialect.buffer} %in, i64 {offset}", "", False)
        raw = integers(kind)
        value = self.emit(f"load {raw}, {self.dialect.buffer} {pointer}, align {min(size, 16)}", raw, raw == kind)
        return value if raw == kind else self.emit(f"bitcast {raw} {self.canonical(kind, value)} to {kind}", kind)

    def canonical(self, kind: str, bits: str) -> str:
        """Bits of floats with every NaN replaced by the default quiet one.

        On integers: a float select of NaN is no operation to LLVM, which promises nothing about a NaN's bits.
        """
        raw, e = integers(kind), element(kind)
        width = BITS[e]
        bools = f"<{count(kind)} x i1>" if kind[0] == "<" else "i1"
        size = self.emit(f"and {raw} {bits}, {splat(raw, str((1 << width - 1) - 1))}", raw, False)
        nan = self.emit(f"icmp ugt {raw} {size}, {splat(raw, str(_INFINITY[e]))}", bools, False)
        return self.emit(f"select {bools} {nan}, {raw} {splat(raw, str(_NAN[e]))}, {raw} {bits}", raw, False)

    def visible(self, kind: str, value: str) -> str:
        """A value as integers whose bits are defined."""
        raw = integers(kind)
        if raw == kind:
            return value
        return self.canonical(kind, self.emit(f"bitcast {kind} {value} to {raw}", raw, False))

    def compare(self) -> str:
        """A boolean from two integers or two floats."""
        r = self.random
        if r.random() < 0.6:
            kind = r.choice(INTS)
            relation = r.choice(["eq", "ne", "ult", "ule", "ugt", "uge", "slt", "sle", "sgt", "sge"])
            return self.emit(f"icmp {relation} {kind} {self.pick(kind, False)}, {self.pick(kind)}", "i1", False)
        kind = r.choice(FLOATS)
        relation = r.choice(
            ["oeq", "one", "olt", "ole", "ogt", "oge", "ord", "uno", "ueq", "une", "ult", "ule", "ugt"]
        )
        return self.emit(f"fcmp {relation} {kind} {self.pick(kind, False)}, {self.pick(kind)}", "i1", False)

    # ---- operations ----------------------------------------

    def integer(self) -> None:
        """Arithmetic on integers or vectors of them."""
        r = self.random
        kind = r.choice([*INTS, "i32", "i32", "i64", *(v for v in VECTORS if element(v)[0] == "i")])
        roll = r.random()
        a = self.pick(kind, False)
        if roll < 0.45:
            operation = r.choice(_BINARY)
            # LLVM 22.1 drops the second half of `or <2 x i32> %x, <K, -1>` for AMDGPU
            constants = not (operation == "or" and kind == "<2 x i32>")
            self.emit(f"{operation} {kind} {a}, {self.pick(kind, constants)}", kind)
        elif roll < 0.65:
            amount = self.emit(
                f"and {kind} {self.pick(kind)}, {splat(kind, str(BITS[element(kind)] - 1))}", kind, False
            )
            self.emit(f"{r.choice(['shl', 'lshr', 'ashr'])} {kind} {a}, {amount}", kind)
        elif roll < 0.8:
            name = r.choice(_MINMAX + _SATURATING)
            self.call(f"llvm.{name}.{mangled(kind)}", kind, (kind, a), (kind, self.pick(kind)))
        else:
            bools = f"<{count(kind)} x i1>" if kind[0] == "<" else "i1"
            relation = r.choice(["eq", "ult", "sgt", "sle"])
            test = self.emit(f"icmp {relation} {kind} {a}, {self.pick(kind)}", bools, False)
            self.emit(f"select {bools} {test}, {kind} {self.pick(kind)}, {kind} {self.pick(kind)}", kind)

    def bits(self) -> None:
        """Bit counting, reversal, funnel shifts, absolute values, overflow flags, high halves."""
        r = self.random
        kind = r.choice(("i16", "i32", "i32", "i64"))
        a, name = self.pick(kind, False), mangled(kind)
        which = r.choice(["ctpop", "bitreverse", "bswap", "ctlz", "cttz", "abs", "fshl", "fshr", "overflow", "high"])
        if which in ("ctpop", "bitreverse", "bswap"):
            self.call(f"llvm.{which}.{name}", kind, (kind, a))
        elif which in ("ctlz", "cttz", "abs"):
            self.call(f"llvm.{which}.{name}", kind, (kind, a), ("i1", "false"))
        elif which in ("fshl", "fshr"):
            amount = self.emit(f"and {kind} {self.pick(kind)}, {BITS[kind] - 1}", kind, False)
            self.call(f"llvm.{which}.{name}", kind, (kind, a), (kind, self.pick(kind)), (kind, amount))
        elif which == "overflow":
            intrinsic = r.choice(["uadd", "sadd", "usub", "ssub", "umul", "smul"])
            pair = f"{{{kind}, i1}}"
            both = self.call(
                f"llvm.{intrinsic}.with.overflow.{name}", pair, (kind, a), (kind, self.pick(kind)), keep=False
            )
            value = self.emit(f"extractvalue {pair} {both}, 0", kind, False)
            flag = self.emit(f"extractvalue {pair} {both}, 1", "i1", False)
            self.emit(f"select i1 {flag}, {kind} {self.pick(kind)}, {kind} {value}", kind)
        else:
            extend = r.choice(["zext", "sext"])
            x, y = (self.emit(f"{extend} i32 {self.pick('i32', False)} to i64", "i64", False) for _ in range(2))
            self.emit(f"lshr i64 {self.emit(f'mul i64 {x}, {y}', 'i64')}, 32", "i64")

    def divide(self) -> None:
        """Division and remainder by something positive."""
        r = self.random
        kind = r.choice(("i8", "i16", "i32", "i32", "i32", "i64"))
        positive = self.emit(f"lshr {kind} {self.pick(kind)}, {r.choice([1, 1, BITS[kind] // 2])}", kind, False)
        divisor = self.emit(f"or {kind} {positive}, 1", kind, False)
        self.emit(f"{r.choice(['udiv', 'urem', 'sdiv', 'srem'])} {kind} {self.pick(kind, False)}, {divisor}", kind)

    def float(self) -> None:
        """IEEE-exact float arithmetic."""
        r = self.random
        kind = r.choice(["float", "float", "double", "half", *(v for v in VECTORS if element(v)[0] != "i")])
        e, name, roll = element(kind), mangled(kind), r.random()
        a = self.pick(kind, False)
        if roll < 0.45:
            self.emit(f"{r.choice(['fadd', 'fsub', 'fmul'])} {kind} {a}, {self.pick(kind)}", kind)
        elif roll < 0.58 and e != "half":
            self.call(f"llvm.fma.{name}", kind, *((kind, x) for x in (a, self.pick(kind), self.pick(kind))))
        elif roll < 0.7:
            self.extremum(r.choice(["minimumnum", "maximumnum"]), kind, a, self.pick(kind))
        elif roll < 0.78:
            self.call(f"llvm.{r.choice(['floor', 'ceil', 'trunc', 'rint', 'fabs'])}.{name}", kind, (kind, a))
        elif roll < 0.84:
            sign = self.visible(kind, self.pick(kind, False))
            sign = self.emit(f"bitcast {integers(kind)} {sign} to {kind}", kind, False)
            self.call(f"llvm.copysign.{name}", kind, (kind, a), (kind, sign))
        elif roll < 0.9 and kind != "<2 x float>":
            # LLVM 22.1 drops one half of some packed f32 negations of selected values
            self.emit(f"fneg {kind} {a}", kind)
        elif kind[0] != "<" and roll < 0.95:
            self.emit(f"fdiv {kind} {a}, {self.pick(kind)}", kind)
        elif kind[0] != "<":
            self.call(f"llvm.sqrt.{name}", kind, (kind, a))
        else:
            self.emit(f"fadd {kind} {a}, {self.pick(kind)}", kind)

    def extremum(self, which: str, kind: str, a: str, b: str) -> None:
        """minimumnum or maximumnum: the other operand of a NaN, -0 below +0."""
        if not self.dialect.compares:
            self.call(f"llvm.{which}.{mangled(kind)}", kind, (kind, a), (kind, b))
            return
        function = f"@{which}.{mangled(kind)}"
        self.declarations.add(_by_comparison(function, which, kind))
        self.emit(f"call {kind} {function}({kind} {a}, {kind} {b})", kind)

    def convert(self) -> None:
        """Between widths, and between integers and floats."""
        r = self.random
        which = r.choice(["width", "width", "to_int", "to_int", "to_float", "to_float", "float", "bf16", "bitcast"])
        if which == "width":
            low, high = sorted(r.sample(range(4), 2))
            narrow, wide = INTS[low], INTS[high]
            if r.random() < 0.4:
                self.emit(f"trunc {wide} {self.pick(wide, False)} to {narrow}", narrow)
            else:
                self.emit(f"{r.choice(['zext', 'sext'])} {narrow} {self.pick(narrow, False)} to {wide}", wide)
        elif which == "to_int":
            kind, source = r.choice(INTS), r.choice(FLOATS)
            name = r.choice(["fptosi", "fptoui"])
            self.call(f"llvm.{name}.sat.{kind}.{_SUFFIX[source]}", kind, (source, self.pick(source, False)))
        elif which == "to_float":
            kind = r.choice(FLOATS)
            # through a wider integer, half would be rounded twice on one of the machines
            source = r.choice(("i8", "i16") if kind == "half" else INTS)
            self.emit(f"{r.choice(['sitofp', 'uitofp'])} {source} {self.pick(source, False)} to {kind}", kind)
        elif which == "float":
            small, big = r.choice([("half", "float"), ("float", "double")])
            if r.random() < 0.5:
                value = self.pick(big, False)
                if small == "half":
                    # LLVM 22.1 makes `fma_mixlo x, y, +0` of a product's fptrunc, which loses the sign of a zero
                    value = self.emit(f"bitcast i32 {self.visible(big, value)} to {big}", big, False)
                self.emit(f"fptrunc {big} {value} to {small}", small)
            else:
                self.emit(f"fpext {small} {self.pick(small, False)} to {big}", big)
        elif which == "bf16":
            if r.random() < 0.5:
                self.emit(f"call i16 @to_bf16(float {self.pick('float', False)})", "i16")
            else:
                self.emit(f"call float @from_bf16(i16 {self.pick('i16', False)})", "float")
        else:
            a, b = r.choice([("float", "i32"), ("double", "i64"), ("half", "i16"), ("<2 x half>", "<2 x i16>"),
                             ("<2 x i16>", "i32"), ("<4 x i8>", "i32"), ("<2 x i32>", "i64")])  # fmt: skip
            if r.random() < 0.5:
                raw = integers(a)
                self.emit(f"bitcast {raw} {self.visible(a, self.pick(a, False))} to {b}", b)
                return
            value = self.emit(f"bitcast {b} {self.pick(b, False)} to {a}", a, element(a)[0] == "i")
            if element(a)[0] != "i":
                self.emit(f"bitcast {integers(a)} {self.visible(a, value)} to {a}", a)

    def vector(self) -> None:
        """Extract, insert, shuffle; the index is sometimes only known when running."""
        r = self.random
        kind = r.choice(VECTORS)
        n, e, a = count(kind), element(kind), self.pick(kind, False)
        roll = r.random()
        if roll < 0.4:
            index = str(r.randrange(n))
            if n != 3 and r.random() < 0.3:
                index = self.emit(f"and i32 {self.pick('i32', False)}, {n - 1}", "i32", False)
            self.emit(f"extractelement {kind} {a}, i32 {index}", e)
        elif roll < 0.7:
            self.emit(f"insertelement {kind} {a}, {e} {self.pick(e)}, i32 {r.randrange(n)}", kind)
        else:
            mask = ", ".join(f"i32 {r.randrange(2 * n)}" for _ in range(n))
            self.emit(f"shufflevector {kind} {a}, {kind} {self.pick(kind)}, <{n} x i32> <{mask}>", kind)

    def memory(self) -> None:
        """A load at a computed place of the input, or a trip through private memory."""
        r, buffer = self.random, self.dialect.buffer
        if r.random() < 0.5:
            kind = r.choice(("i8", "i16", "i32", "i64", "<4 x i32>"))
            size = BITS[element(kind)] // 8 * count(kind)
            index = self.emit(f"and i32 {self.pick('i32', False)}, {IN_BYTES // size - 1}", "i32", False)
            far = self.emit(f"zext i32 {index} to i64", "i64", False)
            pointer = self.emit(f"getelementptr {kind}, {buffer} %in, i64 {far}", "", False)
            self.emit(f"load {kind}, {buffer} {pointer}, align {size}", kind)
            return
        kind, space = r.choice(("i8", "i16", "i32", "i64")), self.dialect.private
        self.slots = 1
        places = []
        for _ in range(2):
            places.append(
                self.emit(f"and i32 {self.pick('i32', False)}, {32 // (BITS[kind] // 8) - 1}", "i32", False)
            )
        store, load = (
            self.emit(f"getelementptr {kind}, ptr {space} %slots, i32 {place}", "", False) for place in places
        )
        self.lines.append(f"  store {kind} {self.pick(kind, False)}, ptr {space} {store}")
        self.emit(f"load {kind}, ptr {space} {load}", kind)

    # ---- control ----------------------------------------

    def _label(self) -> str:
        self.labels += 1
        return f"b{self.labels}"

    def _enter(self, label: str) -> None:
        self.lines.append(f"{label}:")
        self.block = label

    def _scope(self, steps: int, wanted: list[str]) -> list[str]:
        self.scopes.append([])
        for _ in range(steps):
            self.step(False)
        values = [self.pick(k) for k in wanted]
        self.scopes.pop()
        return values

    def branch(self) -> None:
        """A diamond with phis."""
        r = self.random
        wanted = r.sample(("i32", "i64", "float", "i16", "<2 x i32>", "double"), r.choice((1, 2)))
        test, then, other, join = self.compare(), self._label(), self._label(), self._label()
        self.lines.append(f"  br i1 {test}, label %{then}, label %{other}")
        self._enter(then)
        left = self._scope(2, wanted)
        left_block = self.block
        self.lines.append(f"  br label %{join}")
        self._enter(other)
        right = self._scope(1, wanted)
        right_block = self.block
        self.lines.append(f"  br label %{join}")
        self._enter(join)
        for kind, a, b in zip(wanted, left, right):
            self.emit(f"phi {kind} [ {a}, %{left_block} ], [ {b}, %{right_block} ]", kind)

    def loop(self) -> None:
        """One to eight rounds, a number that differs between lanes, carrying a value or two."""
        r = self.random
        kinds = r.sample(("i32", "i64", "float", "<2 x half>", "i16"), r.choice((1, 2)))
        first = [self.pick(k) for k in kinds]
        last = self.emit(f"and i32 {self.pick('i32', False)}, 7", "i32", False)
        before, label, after = self.block, self._label(), self._label()
        self.lines.append(f"  br label %{label}")
        self._enter(label)
        at = len(self.lines)
        self.scopes.append([])
        self.names += 1
        counter = f"%v{self.names}"
        carried = []
        for kind in kinds:
            self.names += 1
            carried.append(f"%v{self.names}")
            self.scopes[-1].append((kind, carried[-1]))
        self.scopes[-1].append(("i32", counter))
        for _ in range(2):
            self.step(False)
        results = [self.pick(k) for k in kinds]
        following = self.emit(f"add i32 {counter}, 1", "i32", False)
        more = self.emit(f"icmp ult i32 {counter}, {last}", "i1", False)
        self.scopes.pop()
        phis = [f"  {counter} = phi i32 [ 0, %{before} ], [ {following}, %{self.block} ]"]
        for kind, name, start, result in zip(kinds, carried, first, results):
            phis.append(f"  {name} = phi {kind} [ {start}, %{before} ], [ {result}, %{self.block} ]")
        self.lines[at:at] = phis
        self.lines.append(f"  br i1 {more}, label %{label}, label %{after}")
        body = self.block
        self._enter(after)
        for kind, result in zip(kinds, results):
            self.emit(f"phi {kind} [ {result}, %{body} ]", kind)

    def step(self, control: bool = True) -> None:
        """One random operation."""
        table: list[tuple[Callable[[], None], float]] = [
            (self.integer, 0.3), (self.bits, 0.1), (self.divide, 0.03), (self.float, 0.24), (self.convert, 0.16),
            (self.vector, 0.07), (self.memory, 0.05), (self.branch, 0.03 * control), (self.loop, 0.02 * control),
        ]  # fmt: skip
        self.random.choices([f for f, _ in table], [w for _, w in table])[0]()

    def function(self, name: str) -> str:
        """The IR of the whole program as `@name(in, out)`."""
        for _ in range(self.size):
            self.step()
        at = 0
        leaves = [(k, v) for k, v in self.scopes[0] if v not in self.used]
        for kind, value in reversed(leaves):
            size = BITS[element(kind)] // 8 * (4 if count(kind) == 3 else count(kind))
            at = (at + size - 1) // size * size
            if at + size > OUT_BYTES:
                continue
            final, kind = self.visible(kind, value), integers(kind)
            pointer = self.emit(f"getelementptr i8, {self.dialect.buffer} %out, i64 {at}", "", False)
            self.lines.append(f"  store {kind} {final}, {self.dialect.buffer} {pointer}, align {min(size, 16)}")
            at += size
        slots = ""
        if self.slots:
            space = self.dialect.private
            slots = (
                f"  %slots = alloca [4 x i64], align 16, {space}\n"
                + f"  store [4 x i64] zeroinitializer, ptr {space} %slots\n"
            )
        body, buffer = "\n".join(self.lines), self.dialect.buffer
        head = f"define internal void @{name}({buffer} %in, {buffer} %out) #1"
        return f"{head} {{\nentry:\n{slots}{body}\n  ret void\n}}\n"


def programs(seed: int, first: int, number: int, dialect: Dialect, size: int) -> tuple[str, list[str]]:
    """(declarations and helpers, the functions `@p<i>`) of programs [first, first + number)."""
    declarations: set[str] = set()
    functions = []
    for i in range(first, first + number):
        builder = Builder(f"{seed}:{i}", dialect, size)
        functions.append(builder.function(f"p{i}"))
        declarations |= builder.declarations
    return "\n".join(sorted(declarations)) + dialect.helpers, functions
