"""Kernels that take one element of the output per thread: map, copy, pad, gather, pooling, resampling."""

from __future__ import annotations

import math
from collections.abc import Callable

from trivet.cuda.code import (
    CTYPE,
    WORK,
    Code,
    Kernel,
    Size,
    aligned,
    count,
    down,
    merged,
    rounded,
    span,
    spread,
    strides,
    up,
)
from trivet.fbs.structs import DType, GridPad, IndexKind, MapOp, PadMode, PoolKind, ResizeMode
from trivet.ir import ops
from trivet.ir.graph import Node, Value
from trivet.ir.types import SIZES, is_float

_M = MapOp
_INFIX = {_M.add: "+", _M.sub: "-", _M.mul: "*", _M.div: "/"}
_COMPARE = {_M.eq: "==", _M.ne: "!=", _M.lt: "<", _M.le: "<=", _M.gt: ">", _M.ge: ">="}
_BITS = {_M.and_: "&", _M.or_: "|", _M.xor_: "^"}
_INT = {_M.add: "int_add", _M.sub: "int_sub", _M.mul: "int_mul", _M.floor_div: "int_floor_div", _M.trunc_div: "int_quot",
        _M.mod: "int_mod", _M.fmod: "int_rem", _M.pow: "int_pow", _M.shl: "int_shl", _M.shr: "int_shr"}  # fmt: skip
_OWN = ("max", "min", "fmax", "fmin", "mod", "floor_div", "pow", "sign", "rsqrt", "relu", "sigmoid", "silu", "gelu", "gelu_tanh",
        "hard_sigmoid", "hard_swish", "softplus", "mish", "elu", "erfinv", "digamma")  # fmt: skip
_LIBM = {"round": "rint", "abs": "fabs"} | {n: n for n in (
    "fmod", "atan2", "hypot", "copysign", "floor", "ceil", "trunc", "sqrt", "exp", "expm1", "exp2", "log", "log2", "log10", "log1p",
    "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma")}  # fmt: skip


def literal(value: float | int | bool, dtype: DType) -> str:
    """A constant of the working type."""
    if not is_float(dtype):
        v = int(value)
        if dtype == DType.i64:
            return f"(i64)0x{v & 0xFFFFFFFFFFFFFFFF:X}ull"
        return f"(i32){int(v != 0) if dtype == DType.bool else v if v > -(1 << 31) else '0x80000000u'}"
    real = float(value)
    work = WORK[dtype]
    if math.isnan(real) or math.isinf(real):
        return f"({work}){'TRV_NAN' if math.isnan(real) else '-TRV_INF' if real < 0 else 'TRV_INF'}"
    return f"({work}){real.hex()}" if work == "f64" else f"{real.hex()}f"


def instruction(op: MapOp, dtype: DType, source: DType, a: list[str], value: str = "") -> str:
    """One step of a map as a C expression. dtype: of the result; source: of the operands."""
    f = is_float(source)
    if op == _M.cast:
        x = a[0]
        if dtype == DType.bool:
            return f"(i32)({x} != 0)"
        if is_float(source) and not is_float(dtype):
            x = f"to_{'i64' if dtype == DType.i64 else 'i32'}({x})"
        return rounded(f"({WORK[dtype]})({x})", dtype)
    if op == _M.select:
        return f"{a[0]} != 0 ? {a[1]} : {a[2]}"
    if op in _COMPARE:
        return f"(i32)({a[0]} {_COMPARE[op]} {a[1]})"
    if op == _M.logical_not:
        return f"(i32)({a[0]} == 0)"
    if op in (_M.is_nan, _M.is_inf):
        test = f"{a[0]} != {a[0]}" if op == _M.is_nan else f"fabs({a[0]}) == TRV_INF"
        return f"(i32)({test})" if f else "0"
    if op in _BITS:
        return rounded(f"{a[0]} {_BITS[op]} {a[1]}", dtype)
    if op == _M.not_:
        return f"(i32)({a[0]} == 0)" if dtype == DType.bool else rounded(f"~{a[0]}", dtype)
    name = op.name.rstrip("_")
    if f:
        return rounded(_real(op, name, WORK[source], a), dtype)
    return rounded(_whole(op, name, a), dtype)


def _real(op: MapOp, name: str, work: str, a: list[str]) -> str:
    if op in _INFIX:
        return f"{a[0]} {_INFIX[op]} {a[1]}"
    if op == _M.neg:
        return f"-{a[0]}"
    if op == _M.recip:
        return f"1 / {a[0]}"
    if op == _M.trunc_div:
        return f"trunc{'f' if work == 'f32' else ''}({a[0]} / {a[1]})"
    if name in _OWN:
        return f"r_{name}({', '.join(a)})"
    return f"{_LIBM[name]}{'f' if work == 'f32' else ''}({', '.join(a)})"


def _whole(op: MapOp, name: str, a: list[str]) -> str:
    if op in _INT:
        return f"{_INT[op]}({a[0]}, {a[1]})"
    if op in (_M.min, _M.fmin):
        return f"({a[0]} < {a[1]} ? {a[0]} : {a[1]})"
    if op in (_M.max, _M.fmax):
        return f"({a[0]} > {a[1]} ? {a[0]} : {a[1]})"
    zero = f"decltype({a[0]})(0)"
    if op == _M.neg:
        return f"int_sub({zero}, {a[0]})"
    if op == _M.abs:
        return f"({a[0]} < 0 ? int_sub({zero}, {a[0]}) : {a[0]})"
    if op == _M.sign:
        return f"(({a[0]} > 0) - ({a[0]} < 0))"
    if op == _M.relu:
        return f"({a[0]} > 0 ? {a[0]} : {zero})"
    if op in (_M.floor, _M.ceil, _M.round, _M.trunc):
        return a[0]
    raise KeyError(name)


def takes_map(node: Node) -> str:
    """Why a map cannot be compiled; "" if it can."""
    code = node.attrs.code
    for i in code:
        if i.op in (_M.load, _M.const_, _M.dim, _M.iota):
            continue
        try:
            instruction(i.op, i.dtype, code[i.args[0]].dtype if i.op != _M.select else i.dtype, ["x", "y", "z"])
        except KeyError:
            return f"map: {i.op.name} of {code[i.args[0]].dtype.name}"
    return ""


def map(code: Code, node: Node) -> None:
    """A fused expression; where rows are dense, several elements of a row per thread, moved at once."""
    y = node.outputs[0]
    loads = [v for v in node.inputs if v is not None]
    k = Kernel(code, [y, *loads])
    uses_index = any(i.op == _M.iota for i in node.attrs.code)
    tables = [strides(y), *(spread(v, y.shape) for v in loads)]
    shape, steps = (list(y.shape), [list(t) for t in tables]) if uses_index else merged(y.shape, *tables)
    width = 1 if uses_index else _width([y, *loads], shape, steps)
    inner = shape[-1] if shape else 1
    if width > 1 and isinstance(inner, int):
        shape[-1] = inner // width
    n = count(shape)
    k.each(n)
    names = [f"i{j}" for j in range(len(shape))]
    k.unravel("i", shape, names)
    at = list(names)
    if width > 1:
        at[-1] = f"({names[-1]} * {width})"
    for j, v in enumerate(loads):
        offset = k.offset(at, steps[1 + j])
        if width > 1 and steps[1 + j][-1] == 1:
            k.add(
                f"const pack<{CTYPE[v.dtype]}, {width}> x{j} = *(const pack<{CTYPE[v.dtype]}, {width}>*)({k.pointer(v)} + {offset});"
            )
        else:
            k.add(f"const {CTYPE[v.dtype]} x{j} = {k.pointer(v)}[{offset}];")
    packed = [width > 1 and steps[1 + j][-1] == 1 for j in range(len(loads))]
    if width > 1:
        k.add(f"pack<{CTYPE[y.dtype]}, {width}> out;", f"TRV_UNROLL for (int e = 0; e < {width}; e++) {{")
    for j, ins in enumerate(node.attrs.code):
        if ins.op == _M.load:
            e = up(f"x{ins.value}" + (".v[e]" if packed[ins.value] else ""), ins.dtype)
        elif ins.op == _M.const_:
            e = literal(ins.value, ins.dtype)
        elif ins.op == _M.dim:
            e = rounded(f"({WORK[ins.dtype]}){k.size(ins.value)}", ins.dtype)
        elif ins.op == _M.iota:
            e = rounded(f"({WORK[ins.dtype]}){at[ins.value]}", ins.dtype)
        else:
            source = ins.dtype if ins.op == _M.select else node.attrs.code[ins.args[0]].dtype
            e = instruction(ins.op, ins.dtype, source, [f"t{a}" for a in ins.args])
        k.add(f"const {WORK[ins.dtype]} t{j} = {e};")
    result = down(f"t{len(node.attrs.code) - 1}", y.dtype)
    if width > 1:
        k.add(f"out.v[e] = {result}; }}",
              f"*(pack<{CTYPE[y.dtype]}, {width}>*)({k.pointer(y, out=True)} + {k.offset(at, steps[0])}) = out;")  # fmt: skip
    else:
        k.add(f"{k.pointer(y, out=True)}[{k.offset(at, steps[0])}] = {result};")
    k.launch_each(n)


def _width(values: list[Value], shape: list[Size], steps: list[list[Size]]) -> int:
    """Elements per thread: as many as make 16 bytes of the widest operand, where all rows allow it."""
    if not shape or not isinstance(shape[-1], int) or any(s[-1] not in (0, 1) for s in steps) or steps[0][-1] != 1:
        return 1
    width = 16 // max(SIZES[v.dtype] for v in values)
    while width > 1 and not (
        shape[-1] % width == 0
        and all(
            s[-1] == 0 or (aligned(v, width) and all(isinstance(t, int) and t % width == 0 for t in s[:-1]))
            for v, s in zip(values, steps, strict=True)
        )
    ):
        width //= 2
    return width


def copy(code: Code, node: Node) -> None:
    """A strided move, by size of the element."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    move(code, x, y)


def move(code: Code, x: Value, y: Value) -> None:
    k = Kernel(code, [x, y])
    shape, (to, at) = merged(y.shape, strides(y), strides(x))
    n = count(shape)
    raw = {1: "u8", 2: "i16", 4: "i32", 8: "i64"}[SIZES[y.dtype]]
    k.each(n)
    names = [f"i{j}" for j in range(len(shape))]
    k.unravel("i", shape, names)
    k.add(f"{k.pointer(y, raw, out=True)}[{k.offset(names, to)}] = {k.pointer(x, raw)}[{k.offset(names, at)}];")
    k.launch_each(n)


def _frame(code: Code, node: Node, values: list[Value], y: Value) -> tuple[Kernel, list[str]]:
    """A kernel with a thread per element of y, and the names of its indices."""
    k = Kernel(code, [*values, y])
    n = count(y.shape)
    k.each(n)
    names = [f"i{j}" for j in range(len(y.shape))]
    k.unravel("i", y.shape, names)
    return k, names


def _store(k: Kernel, y: Value, names: list[str], value: str) -> None:
    k.add(f"{k.pointer(y, out=True)}[{k.offset(names, strides(y))}] = {value};")


def pad(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    k, names = _frame(code, node, [x], y)
    at, inside = [], []
    for j, (d, lo) in enumerate(zip(x.shape, a.lo, strict=True)):
        n = k.size(d)
        k.add(f"I p{j} = i{j} - ({lo});")
        if a.mode == PadMode.constant:
            inside.append(f"p{j} >= 0 && p{j} < {n}")
        elif a.mode == PadMode.reflect:
            k.add(f"p{j} = p{j} < 0 ? -p{j} : p{j}; p{j} = p{j} >= {n} ? 2 * ({n} - 1) - p{j} : p{j};")
        elif a.mode == PadMode.replicate:
            k.add(f"p{j} = p{j} < 0 ? 0 : p{j} >= {n} ? {n} - 1 : p{j};")
        else:
            k.add(f"p{j} = p{j} % {n}; p{j} = p{j} < 0 ? p{j} + {n} : p{j};")
        at.append(f"p{j}")
    value = f"{k.pointer(x)}[{k.offset(at, strides(x))}]"
    if inside:
        other = a.value if is_float(y.dtype) else int(a.value)
        if not is_float(y.dtype) and y.dtype != DType.bool:
            bits = 8 * SIZES[y.dtype]
            other = int(other) & ((1 << bits) - 1)
            other = other - (1 << bits) if y.dtype != DType.u8 and other >> (bits - 1) else other
        value = f"{' && '.join(inside)} ? {value} : {down(literal(other, y.dtype), y.dtype)}"
    _store(k, y, names, value)
    k.launch_each(count(y.shape))


def gather(code: Code, node: Node) -> None:
    x, index, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and index is not None
    k, names = _frame(code, node, [x, index], y)
    rank = len(index.shape)
    if a.kind == IndexKind.elements:
        where, at = names, list(names)
    else:
        where = names[a.axis : a.axis + rank]
        at = [*names[: a.axis], "", *names[a.axis + rank :]]
    k.add(
        f"const I at = wrap_index<I>((i64){k.pointer(index)}[{k.offset(where, strides(index))}], {k.size(x.shape[a.axis])}, {k.flag});"
    )
    at[a.axis] = "at"
    _store(k, y, names, f"{k.pointer(x)}[{k.offset(at, strides(x))}]")
    k.launch_each(count(y.shape))


# ---- windows
def windows(k: Kernel, a: ops.Pool | ops.Qpool, x: Value, y: Value) -> Callable[[list[str]], None]:
    """Declares begin, end and step of the window of an output cell per spatial axis (b0, e0, s0, ..)."""
    for j in range(a.nd):
        n, o, i = k.size(x.shape[2 + j]), k.size(y.shape[2 + j]), f"i{2 + j}"
        if a.adaptive:
            k.add(f"const I b{j} = (I)((i64){i} * {n} / {o}), e{j} = (I)((((i64){i} + 1) * {n} + {o} - 1) / {o});")
            continue
        stride, pad, _dilation = a.stride or a.kernel, a.pad or (0,) * a.nd, a.dilation or (1,) * a.nd
        k.add(f"const I o{j} = {i} * {stride[j]} - {pad[j]};")

    def loops(body: list[str]) -> None:
        for j in range(a.nd):
            if a.adaptive:
                k.add(f"for (I p{j} = b{j}; p{j} < e{j}; p{j}++) {{")
            else:
                dilation = a.dilation or (1,) * a.nd
                k.add(f"for (I q{j} = 0; q{j} < {a.kernel[j]}; q{j}++) {{", f"const I p{j} = o{j} + q{j} * {dilation[j]};",
                      f"if (p{j} < 0 || p{j} >= {k.size(x.shape[2 + j])}) continue;")  # fmt: skip
        k.add(*body)
        k.add("}" * a.nd)

    return loops


def cells(k: Kernel, a: ops.Pool | ops.Qpool, x: Value) -> str:
    """How many cells an average divides by, after the loops (inside counts those in the input)."""
    if a.divisor:
        return str(a.divisor)
    if a.adaptive or not a.count_include_pad:
        return "inside"
    dilation, pad = a.dilation or (1,) * a.nd, a.pad or (0,) * a.nd
    for j in range(a.nd):  # padding counts, what lies beyond it does not
        k.add(
            f"I c{j} = 0;",
            f"for (I q{j} = 0; q{j} < {a.kernel[j]}; q{j}++) c{j} += o{j} + q{j} * {dilation[j]} < {k.size(x.shape[2 + j])} + {pad[j]};",
        )
    return " * ".join(f"c{j}" for j in range(a.nd))


def pool(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    k, names = _frame(code, node, [x, *node.outputs], y)
    work = WORK[x.dtype]
    loops = windows(k, a, x, y)
    place = k.offset([*names[:2], *(f"p{j}" for j in range(a.nd))], strides(x))
    value = up(f"{k.pointer(x)}[{place}]", x.dtype)
    if a.kind == PoolKind.avg:
        k.add(f"{work} sum = 0;", "I inside = 0;", "(void)inside;")
        loops([f"sum += {value};", "inside++;"])
        n = cells(k, a, x)
        _store(k, y, names, down(f"sum / ({work})({n})", y.dtype))
    else:
        flat = "p0"
        for j in range(1, a.nd):
            flat = f"({flat}) * {k.size(x.shape[2 + j])} + p{j}"
        k.add(f"{work} best = 0;", "i64 where = 0;", "bool none = true;")
        loops(
            [
                f"const {work} v = {value};",
                f"if (none || v > best || v != v) {{ best = v; where = {flat}; none = false; }}",
            ]
        )
        low = (
            "-TRV_INF"
            if is_float(x.dtype)
            else f"up(lim<{CTYPE[x.dtype]}>::lowest())"
            if x.dtype != DType.bool
            else "0"
        )
        _store(k, y, names, down(f"none ? ({work}){low} : best", y.dtype))
        if len(node.outputs) > 1:
            _store(k, node.outputs[1], names, "where")
    k.launch_each(count(y.shape))


# ---- resampling
def resize(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    k, names = _frame(code, node, [x], y)
    wide = x.dtype == DType.f64 or not is_float(x.dtype)
    t = "f64" if wide else "f32"
    s = "" if wide else "f"
    if a.mode in (ResizeMode.nearest, ResizeMode.nearest_exact):
        at = []
        for j in range(a.nd):
            n, o = k.size(x.shape[2 + j]), k.size(y.shape[2 + j])
            ratio = f"(f32)(1.0 / {float(a.scale[j])!r})" if a.scale and a.scale[j] else f"((f32){n} / (f32){o})"
            half = "+ 0.5f" if a.mode == ResizeMode.nearest_exact else ""
            k.add(
                f"I p{j} = (I)floorf(__fmul_rn((f32)i{2 + j} {half}, {ratio})); p{j} = p{j} < {n} - 1 ? p{j} : {n} - 1;"
            )
            at.append(f"p{j}")
        _store(k, y, names, f"{k.pointer(x)}[{k.offset([*names[:2], *at], strides(x))}]")
        k.launch_each(count(y.shape))
        return
    taps = 4 if a.mode == ResizeMode.cubic else 2
    for j in range(a.nd):
        n, o = k.size(x.shape[2 + j]), k.size(y.shape[2 + j])
        if a.align_corners:
            k.add(f"const {t} u{j} = {o} > 1 ? ({t})i{2 + j} * (({t})({n} - 1) / ({t})({o} - 1)) : 0;")
        else:
            ratio = f"({t})(1.0 / {float(a.scale[j])!r})" if a.scale and a.scale[j] else f"(({t}){n} / ({t}){o})"
            k.add(f"{t} u{j} = (({t})i{2 + j} + ({t})0.5) * {ratio} - ({t})0.5;")
            if taps == 2:
                k.add(f"u{j} = u{j} < 0 ? 0 : u{j};")
        if taps == 2:
            k.add(f"I b{j} = (I)u{j}; b{j} = b{j} < {n} - 1 ? b{j} : {n} - 1;", f"{t} f{j} = u{j} - ({t})b{j}; f{j} = f{j} < 0 ? 0 : f{j} > 1 ? 1 : f{j};",
                  f"const {t} w{j}_0 = 1 - f{j}, w{j}_1 = f{j};",
                  f"const I p{j}_0 = b{j}, p{j}_1 = b{j} + 1 < {n} ? b{j} + 1 : {n} - 1;")  # fmt: skip
        else:
            _cubic(k, t, j, f"({t}){a.cubic_a!r}", s, f"u{j}")
            for q in range(4):
                k.add(
                    f"I p{j}_{q} = b{j} + {q - 1}; p{j}_{q} = p{j}_{q} < 0 ? 0 : p{j}_{q} >= {n} ? {n} - 1 : p{j}_{q};"
                )

    def cell(at: list[str]) -> str:
        return up(f"{k.pointer(x)}[{k.offset([*names[:2], *at], strides(x))}]", x.dtype)

    value = _blend(k, a.nd, taps, lambda at: f"({t}){cell(at)}")
    if not is_float(y.dtype):
        value = f"to_i64({value})" if y.dtype == DType.i64 else f"to_i32({value})"
    _store(k, y, names, down(value, y.dtype))
    k.launch_each(count(y.shape))


def _cubic(k: Kernel, t: str, j: int, a: str, s: str, u: str, more: str = "") -> None:
    """Weights of four cells around u, of which b is the one below it (Keys' convolution with coefficient a)."""
    k.add(f"const {t} g{j} = floor{s}({u}); const {t} f{j} = {u} - g{j}{more}; const I b{j} = (I)g{j};",
          f"const {t} w{j}_0 = (({a} * (f{j} + 1) - 5 * {a}) * (f{j} + 1) + 8 * {a}) * (f{j} + 1) - 4 * {a};",
          f"const {t} w{j}_1 = (({a} + 2) * f{j} - ({a} + 3)) * f{j} * f{j} + 1;",
          f"const {t} h{j} = 1 - f{j};",
          f"const {t} w{j}_2 = (({a} + 2) * h{j} - ({a} + 3)) * h{j} * h{j} + 1;",
          f"const {t} w{j}_3 = (({a} * (h{j} + 1) - 5 * {a}) * (h{j} + 1) + 8 * {a}) * (h{j} + 1) - 4 * {a};")  # fmt: skip


def _blend(k: Kernel, nd: int, taps: int, value: Callable[[list[str]], str]) -> str:
    """Weighted sum over the cells p0_q, p1_q, .. with weights w0_q, .., innermost axis first."""

    def part(j: int, at: list[str]) -> str:
        if j == nd:
            return value(at)
        return "(" + " + ".join(f"w{j}_{q} * {part(j + 1, [*at, f'p{j}_{q}'])}" for q in range(taps)) + ")"

    return part(0, [])


def grid_sample(code: Code, node: Node) -> None:
    x, grid, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and grid is not None
    k, names = _frame(code, node, [x, grid], y)
    t = WORK[x.dtype]
    s = "f" if t == "f32" else ""
    gs = strides(grid)
    taps = {ResizeMode.nearest: 1, ResizeMode.linear: 2, ResizeMode.cubic: 4}[a.mode]
    for j in range(2):  # axis 2 + j of x is coordinate 1 - j of the grid
        n = k.size(x.shape[2 + j])
        # grid has the output's axes 0, 2, 3 and then the coordinate
        place = k.offset(["i0", "i2", "i3", str(1 - j)], gs)
        g = up(f"{k.pointer(grid)}[{place}]", grid.dtype)
        full = f"(({t}){g} + 1) / 2 * ({n} - 1)" if a.align_corners else f"((({t}){g} + 1) * {n} - 1) / 2"
        k.add(f"{t} u{j} = {full};")
        if taps != 4:
            _fold(k, t, s, a, f"u{j}", n)
        if taps == 1:
            k.add(
                f"const I p{j}_0 = (I)to_i64(rint{s}(u{j}) == u{j} || u{j} == u{j} ? rint{s}(u{j}) : ({t})-1); const {t} w{j}_0 = 1;"
            )
        elif taps == 2:
            k.add(f"const {t} g{j} = floor{s}(u{j}); const I p{j}_0 = (I)to_i64(g{j} > -1e9 && g{j} < 1e9 ? g{j} : ({t})-2), p{j}_1 = p{j}_0 + 1;",
                  f"const {t} w{j}_1 = u{j} - g{j}, w{j}_0 = 1 - w{j}_1;")  # fmt: skip
        else:
            k.add(
                f"const {t} odd{j} = u{j} - u{j}; u{j} = u{j} > -1e9 && u{j} < 1e9 ? u{j} : ({t})-10;"
            )  # odd: 0, or NaN
            _cubic(k, t, j, f"({t})-0.75", s, f"u{j}", f" + odd{j}")
            for q in range(4):
                k.add(f"{t} v{j}_{q} = ({t})(b{j} + {q - 1});")
                _fold(k, t, s, a, f"v{j}_{q}", n)
                k.add(f"const I p{j}_{q} = (I)v{j}_{q};")

    def value(at: list[str]) -> str:
        inside = " && ".join(f"{p} >= 0 && {p} < {k.size(x.shape[2 + j])}" for j, p in enumerate(at))
        cell = up(f"{k.pointer(x)}[{k.offset([*names[:2], *at], strides(x))}]", x.dtype)
        return f"({inside} ? ({t}){cell} : ({t})0)"

    _store(k, y, names, down(_blend(k, 2, taps, value), y.dtype))
    k.launch_each(count(y.shape))


def _fold(k: Kernel, t: str, s: str, a: ops.GridSample, u: str, n: str) -> None:
    """Brings a coordinate into the input as the border mode says."""
    if a.pad == GridPad.zeros:
        return
    if a.pad == GridPad.reflection:
        lo, size = ("0", f"({t})({n} - 1)") if a.align_corners else (f"({t})-0.5", f"({t}){n}")
        k.add(f"if ({size} <= 0) {u} = 0; else {{ {t} d = fabs{s}({u} - ({lo})); const {t} extra = fmod{s}(d, {size});",
              f"const {t} flips = floor{s}(d / {size}); {u} = (fmod{s}(flips, 2) == 0 ? extra : {size} - extra) + ({lo}); }}")  # fmt: skip
    k.add(f"{u} = {u} > 0 ? {u} : 0; {u} = {u} < ({t})({n} - 1) ? {u} : ({t})({n} - 1);")


__all__ = [
    "cells",
    "copy",
    "gather",
    "grid_sample",
    "map",
    "move",
    "pad",
    "pool",
    "resize",
    "span",
    "takes_map",
    "windows",
]
