"""Random straight-line LLVM IR functions whose results are defined bit for bit on every target.

A program reads eight 64-bit words and writes four. Shifts are masked, divisors are made non-zero, conversions
saturate, and a NaN is made canonical before its bits can be seen, so x86 and AMDGPU must agree exactly.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

INPUTS, OUTPUTS = 8, 4
_FLOATS = {"half": ("f16", 16), "float": ("f32", 32), "double": ("f64", 64)}
_INTS = {"i16": 16, "i32": 32, "i64": 64}


@dataclass
class Body:
    """IR text of the body (between loads and stores) and the intrinsics that it declares."""

    lines: list[str] = field(default_factory=list)
    declarations: set[str] = field(default_factory=set)
    outputs: list[str] = field(default_factory=list)


class Generator:
    """Generates one program from a seed."""

    def __init__(self, seed: int, length: int = 14):
        self.random, self.program, self.count = random.Random(seed), Body(), 0
        self.values: dict[str, list[str]] = {t: [] for t in (*_INTS, *_FLOATS, "i1")}
        self.values["i64"] = [f"%in{i}" for i in range(INPUTS)]
        for _ in range(length):
            self.step()
        self.finish()

    def op(self, text: str) -> str:
        self.count += 1
        self.program.lines.append(f"  %t{self.count} = {text}")
        return f"%t{self.count}"

    def call(self, result: str, name: str, *args: tuple[str, str]) -> str:
        types = ", ".join(t for t, _ in args)
        self.program.declarations.add(f"declare {result} @{name}({types})")
        return self.op(f"call {result} @{name}({', '.join(f'{t} {v}' for t, v in args)})")

    # ---- values of a type  ----------

    def pick(self, kind: str) -> str:
        """A value of a type, made from another one when there is none or by chance."""
        pool = self.values[kind]
        if pool and (self.random.random() < 0.6 or kind == "i64"):
            # prefer recent values, so that programs are deep
            return pool[-1 - min(int(self.random.expovariate(0.3)), len(pool) - 1)]
        if kind == "i1":
            source = self.random.choice(list(_INTS))
            value = self.op(f"icmp slt {source} {self.pick(source)}, {self.pick(source)}")
        elif kind in _FLOATS:
            bits = f"i{_FLOATS[kind][1]}"
            value = self.op(f"bitcast {bits} {self.pick(bits)} to {kind}")
        else:
            value = self.op(f"trunc i64 {self.pick('i64')} to {kind}")
        pool.append(value)
        return value

    def constant(self, kind: str) -> str:
        bits = _INTS[kind]
        return str(self.random.choice([0, 1, -1, 2, 7, 255, 1 << (bits - 2), self.random.getrandbits(bits - 1)]))

    def integer(self, kind: str) -> str:
        return self.constant(kind) if self.random.random() < 0.2 else self.pick(kind)

    # ---- operations  ----------

    def step(self) -> None:
        choose = self.random.random()
        if choose < 0.5:
            self.integer_step()
        elif choose < 0.85:
            self.float_step()
        else:
            self.convert_step()

    def integer_step(self) -> None:
        r, kind = self.random, self.random.choice(["i16", "i32", "i32", "i32", "i64", "i64"])
        bits, a, b = _INTS[kind], self.pick(kind), self.integer(kind)
        what = r.choice(["arith"] * 3 + ["logic", "shift", "shift", "compare", "select", "minmax", "bits", "funnel",
                                        "divide", "saturate", "bytes", "wide"])  # fmt: skip
        if what == "arith":
            value = self.op(f"{r.choice(['add', 'sub', 'mul'])} {kind} {a}, {b}")
        elif what == "logic":
            value = self.op(f"{r.choice(['and', 'or', 'xor'])} {kind} {a}, {b}")
        elif what == "shift":
            amount = self.op(f"and {kind} {b}, {bits - 1}")
            value = self.op(f"{r.choice(['shl', 'lshr', 'ashr'])} {kind} {a}, {amount}")
        elif what == "compare":
            relation = r.choice(["eq", "ne", "ult", "ule", "ugt", "uge", "slt", "sle", "sgt", "sge"])
            self.values["i1"].append(self.op(f"icmp {relation} {kind} {a}, {b}"))
            return
        elif what == "select":
            value = self.op(f"select i1 {self.pick('i1')}, {kind} {a}, {kind} {b}")
        elif what == "minmax":
            value = self.call(kind, f"llvm.{r.choice(['smin', 'smax', 'umin', 'umax'])}.{kind}", (kind, a), (kind, b))
        elif what == "bits":
            name = r.choice(["ctpop", "bitreverse", "bswap", "ctlz", "cttz"])
            extra = [("i1", "false")] if name in ("ctlz", "cttz") else []
            value = self.call(kind, f"llvm.{name}.{kind}", (kind, a), *extra)
        elif what == "funnel":
            value = self.call(
                kind, f"llvm.{r.choice(['fshl', 'fshr'])}.{kind}", (kind, a), (kind, b), (kind, self.integer(kind))
            )
        elif what == "saturate" and kind != "i64":
            value = self.call(
                kind, f"llvm.{r.choice(['uadd', 'sadd', 'usub', 'ssub'])}.sat.{kind}", (kind, a), (kind, b)
            )
        elif what == "divide" and kind != "i64":
            # odd positive divisors: neither zero nor the overflow of min / -1
            divisor = self.op(f"or {kind} {self.op(f'lshr {kind} {b}, 1')}, 1")
            value = self.op(f"{r.choice(['udiv', 'sdiv', 'urem', 'srem'])} {kind} {a}, {divisor}")
        elif what == "bytes":
            low = self.op(f"trunc {kind} {a} to i8")
            value = self.op(f"{r.choice(['sext', 'zext'])} i8 {low} to {kind}")
            # LLVM 22 drops the sign extension when a float operation uses the byte at once (SDWA has none for floats)
            value = self.op(f"add {kind} {value}, {a}")
        elif what == "wide":
            x, y = (self.op(f"{r.choice(['sext', 'zext'])} i32 {self.pick('i32')} to i64") for _ in range(2))
            kind, value = "i64", self.op(f"mul i64 {x}, {y}")
        else:
            value = self.op(f"xor {kind} {a}, -1")
        self.values[kind].append(value)

    def float_step(self) -> None:
        r, kind = self.random, self.random.choice(["half", "float", "float", "float", "double"])
        suffix = _FLOATS[kind][0]
        a, b = self.pick(kind), self.pick(kind)
        what = r.choice(["arith"] * 4 + ["fma"] * 2 + ["compare", "select", "sign", "round", "minmax", "divide",
                                        "sqrt", "scale"])  # fmt: skip
        if what == "arith":
            value = self.op(f"{r.choice(['fadd', 'fsub', 'fmul'])} {kind} {a}, {b}")
        elif what == "fma" and kind != "half":  # on x86 a half fma calls a library function that MCJIT does not have
            value = self.call(kind, f"llvm.fma.{suffix}", (kind, a), (kind, b), (kind, self.pick(kind)))
        elif what == "compare":
            relation = r.choice(["oeq", "one", "olt", "ole", "ogt", "oge", "ord", "ueq", "une", "ult", "uge", "uno"])
            self.values["i1"].append(self.op(f"fcmp {relation} {kind} {a}, {b}"))
            return
        elif what == "select":
            value = self.op(f"select i1 {self.pick('i1')}, {kind} {a}, {kind} {b}")
        elif what == "sign":
            name = r.choice(["fabs", "fneg", "copysign"])
            if name == "fneg":
                value = self.op(f"fneg {kind} {a}")
            else:
                more = [(kind, b)] if name == "copysign" else []
                value = self.call(kind, f"llvm.{name}.{suffix}", (kind, a), *more)
        elif what == "round":
            name = r.choice(["floor", "ceil", "trunc", "rint"])
            value = self.call(kind, f"llvm.{name}.{suffix}", (kind, a))
        elif what == "minmax":
            name = r.choice(["maximumnum", "minimumnum", "maximum", "minimum"])
            value = self.call(kind, f"llvm.{name}.{suffix}", (kind, a), (kind, b))
        elif what == "divide":
            value = self.op(f"fdiv {kind} {a}, {b}")
        elif what == "sqrt":
            value = self.call(kind, f"llvm.sqrt.{suffix}", (kind, a))
        elif what == "fma":
            value = self.op(f"fmul {kind} {a}, {b}")
        else:
            exponent = self.op(f"ashr i32 {self.pick('i32')}, 24")
            value = self.call(kind, f"llvm.ldexp.{suffix}.i32", (kind, a), ("i32", exponent))
        self.values[kind].append(value)

    def convert_step(self) -> None:
        r = self.random
        what = r.choice(["float-int", "int-float", "extend", "truncate", "bits", "integer"])
        if what == "float-int":
            kind, target = r.choice(list(_FLOATS)), r.choice(["i16", "i32"])
            name = f"llvm.fpto{r.choice('su')}i.sat.{target}.{_FLOATS[kind][0]}"
            self.values[target].append(self.call(target, name, (kind, self.pick(kind))))
        elif what == "int-float":
            kind, source = r.choice(["float", "double"]), r.choice(["i16", "i32", "i64"])
            self.values[kind].append(
                self.op(f"{r.choice(['sitofp', 'uitofp'])} {source} {self.pick(source)} to {kind}")
            )
        elif what == "extend":
            narrow, wide = r.choice([("half", "float"), ("float", "double"), ("half", "double")])
            self.values[wide].append(self.op(f"fpext {narrow} {self.pick(narrow)} to {wide}"))
        elif what == "truncate":
            wide, narrow = r.choice([("float", "half"), ("double", "float")])
            value = self.pick(wide)
            if narrow == "half":
                # LLVM 22 turns fptrunc(fmul a, b) into v_mad_mixlo a, b, +0, which loses the sign of a zero product
                value = self.op(f"bitcast i32 {self.pick('i32')} to float")
            self.values[narrow].append(self.op(f"fptrunc {wide} {value} to {narrow}"))
        elif what == "bits":
            kind = r.choice(list(_FLOATS))
            self.values[f"i{_FLOATS[kind][1]}"].append(self.bits_of(kind, self.pick(kind)))
        else:
            narrow, wide = r.choice([("i16", "i32"), ("i32", "i64"), ("i16", "i64")])
            if r.random() < 0.5:
                value = self.op(f"{r.choice(['sext', 'zext'])} {narrow} {self.pick(narrow)} to {wide}")
                # the sum keeps a float operation from using the extended value at once, as with bytes
                self.values[wide].append(self.op(f"add {wide} {value}, {self.pick(wide)}"))
            else:
                self.values[narrow].append(self.op(f"trunc {wide} {self.pick(wide)} to {narrow}"))

    def bits_of(self, kind: str, value: str) -> str:
        """Bits of a float with every NaN made the canonical one (by integer operations: float ones may be folded)."""
        width = _FLOATS[kind][1]
        infinity = {16: 0x7C00, 32: 0x7F800000, 64: 0x7FF0000000000000}[width]
        bits = self.op(f"bitcast {kind} {value} to i{width}")
        size = self.op(f"and i{width} {bits}, {(1 << (width - 1)) - 1}")
        nan = self.op(f"icmp ugt i{width} {size}, {infinity}")
        return self.op(f"select i1 {nan}, i{width} {infinity | infinity >> 1}, i{width} {bits}")

    def finish(self) -> None:
        """Fold the last values of every type into the outputs."""
        wide = []
        for kind, pool in self.values.items():
            for value in pool[-3:]:
                bits = kind
                if kind in _FLOATS:
                    value, bits = self.bits_of(kind, value), f"i{_FLOATS[kind][1]}"
                wide.append(value if bits == "i64" else self.op(f"zext {bits} {value} to i64"))
        for i in range(OUTPUTS):
            total = wide[i % len(wide)]
            for j, value in enumerate(wide[i + 1 :: OUTPUTS]):
                turned = self.op(f"shl i64 {total}, {7 + j}")
                back = self.op(f"lshr i64 {total}, {57 - j}")
                total = self.op(f"xor i64 {self.op(f'or i64 {turned}, {back}')}, {value}")
            self.program.outputs.append(total)


def module(seeds: list[int], target: str) -> str:
    """IR of one function a seed: kernels `@k<seed>` for "amdgpu", loops over n items for "host"."""
    functions, declarations = [], set()
    for seed in seeds:
        program = Generator(seed).program
        declarations |= program.declarations
        functions.append(_function(seed, program, target))
    if target == "amdgpu":
        declarations |= {"declare i32 @llvm.amdgcn.workitem.id.x()", "declare i32 @llvm.amdgcn.workgroup.id.x()"}
    return "\n".join([*functions, *sorted(declarations)])


def _function(seed: int, program: Body, target: str) -> str:
    space = " addrspace(1)" if target == "amdgpu" else ""
    loads = "\n".join(
        f"  %pi{i} = getelementptr i64, ptr{space} %in, i64 %li{i}\n  %in{i} = load i64, ptr{space} %pi{i}, align 8"
        for i in range(INPUTS)
    )
    offsets = "\n".join(f"  %li{i} = add i64 %base.in, {i}" for i in range(INPUTS))
    stores = "\n".join(
        f"  %lo{i} = add i64 %base.out, {i}\n  %po{i} = getelementptr i64, ptr{space} %out, i64 %lo{i}\n"
        f"  store i64 {value}, ptr{space} %po{i}, align 8"
        for i, value in enumerate(program.outputs)
    )
    work = f"  %base.in = mul i64 %i, {INPUTS}\n  %base.out = mul i64 %i, {OUTPUTS}\n{offsets}\n{loads}\n"
    work += "\n".join(program.lines) + "\n" + stores
    if target == "amdgpu":
        return (
            f"define amdgpu_kernel void @k{seed}(ptr addrspace(1) %in, ptr addrspace(1) %out) "
            f'"amdgpu-flat-work-group-size"="64,64" {{\n'
            f"  %t = call i32 @llvm.amdgcn.workitem.id.x()\n  %g = call i32 @llvm.amdgcn.workgroup.id.x()\n"
            f"  %g64 = mul i32 %g, 64\n  %i32 = add i32 %g64, %t\n  %i = zext i32 %i32 to i64\n{work}\n  ret void\n}}"
        )
    return (
        f"define void @k{seed}(ptr %in, ptr %out, i64 %n) {{\nentry:\n  br label %loop\nloop:\n"
        f"  %i = phi i64 [ 0, %entry ], [ %next, %loop ]\n{work}\n"
        f"  %next = add i64 %i, 1\n  %more = icmp ult i64 %next, %n\n  br i1 %more, label %loop, label %done\n"
        f"done:\n  ret void\n}}"
    )
