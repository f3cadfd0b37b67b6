"""Kernels on stored integers, bit for bit as schema/ops.fbs has them."""

from __future__ import annotations

from typing import Any

from trivet.cuda.code import CTYPE, Code, Kernel, Size, count, dense, input_at, spread, strides, up
from trivet.cuda.pointwise import _frame, _store, cells, windows
from trivet.cuda.product import (
    Problem,
    _read,
    _sub,
    _vector,
    conv_axes,
    conv_direct,
    conv_problem,
    direct_sum,
    matmul_axes,
)
from trivet.cuda.rows import Rows, _threads
from trivet.fbs.structs import BinaryKind, DType, NormKind, ReduceKind
from trivet.ir import ops
from trivet.ir.graph import Node, Value
from trivet.ir.types import is_float


def _result(v: str, a: Any, y: Value) -> str:
    """A 64-bit number of y's scale as stored."""
    return f"({CTYPE[y.dtype]})stored({v}, {a.y_zero}, {int(a.lo)}, {int(a.hi)})"


# ---- elementwise
def requantize(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    k, names = _frame(code, node, [x], y)
    v = f"{k.pointer(x)}[{k.offset(names, strides(x))}]"
    scale = f"{float(a.scale).hex()}f"
    if y.dtype == DType.f32:
        value = f"__fmul_rn((f32)(up({v}) - ({a.x_zero})), {scale})"
    elif x.dtype == DType.f32:
        value = _result(f"half_even(__fmul_rn({v}, {scale}))", a, y)
    else:
        value = _result(f"rescale((i64)up({v}) - ({a.x_zero}), {a.multiplier}, {a.shift})", a, y)
    _store(k, y, names, value)
    k.launch_each(count(y.shape))


def binary(code: Code, node: Node) -> None:
    x, z, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and z is not None
    k, names = _frame(code, node, [x, z], y)
    p, q = (
        f"((i64)up({k.pointer(v)}[{k.offset(names, spread(v, y.shape))}]) - ({zero}))"
        for v, zero in ((x, a.a_zero), (z, a.b_zero))
    )
    if a.kind == BinaryKind.mul:
        v = f"rescale({p} * {q}, {a.a_multiplier}, {a.shift})"
    else:
        sign = "+" if a.kind == BinaryKind.add else "-"
        v = f"rescale({p} * {a.a_multiplier} {sign} {q} * {a.b_multiplier}, 1, {a.shift})"
    _store(k, y, names, _result(v, a, y))
    k.launch_each(count(y.shape))


def lookup(code: Code, node: Node) -> None:
    x, table, y = node.inputs[0], node.inputs[1], node.outputs[0]
    assert x is not None and table is not None
    k, names = _frame(code, node, [x, table], y)
    at = f"up({k.pointer(x)}[{k.offset(names, strides(x))}]){' + 128' if x.dtype == DType.i8 else ''}"
    _store(k, y, names, f"{k.pointer(table)}[({at}) * {k.size(strides(table)[0])}]")
    k.launch_each(count(y.shape))


def qgather(code: Code, node: Node) -> None:
    table, index, scale, offset = node.inputs[0], node.inputs[1], node.inputs[2], input_at(node, 3)
    y, a = node.outputs[0], node.attrs
    assert table is not None and index is not None and scale is not None
    k, names = _frame(code, node, [table, index, scale, offset], y)  # type: ignore[list-item]
    where, d = names[:-1], names[-1]
    k.add(
        f"const I at = wrap_index<I>((i64){k.pointer(index)}[{k.offset(where, strides(index))}], {k.size(table.shape[0])}, {k.flag});"
    )

    def of(t: Value) -> str:
        s = strides(t)
        if a.group:
            place = k.offset([f"({d} / {a.group})", "at"], s)
        else:
            place = "0" if t.type.count == 1 else k.offset(["at"], s)
        return f"up({k.pointer(t)}[{place}])"

    v = f"__fmul_rn((f32)(up({k.pointer(table)}[{k.offset(['at', d], strides(table))}]) - ({a.zero})), {of(scale)})"
    if offset is not None:
        v = f"__fadd_rn({v}, {of(offset)})"
    _store(k, y, names, v)
    k.launch_each(count(y.shape))


def qpool(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    k, names = _frame(code, node, [x], y)
    loops = windows(k, a, x, y)
    place = k.offset([*names[:2], *(f"p{j}" for j in range(a.nd))], strides(x))
    k.add("i64 sum = 0;", "I inside = 0;", "(void)inside;")
    loops([f"sum += (i64)up({k.pointer(x)}[{place}]) - ({a.x_zero});", "inside++;"])
    k.add(f"i64 n = {cells(k, a, x)}; n = n < 1 ? 1 : n;")
    _store(k, y, names, _result(f"divide(mul64(sum, {a.multiplier}), n << {a.shift})", a, y))
    k.launch_each(count(y.shape))


def qresize(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    k, names = _frame(code, node, [x], y)
    for j in range(a.nd):
        n, m, o = f"(i64){k.size(x.shape[2 + j])}", f"(i64){k.size(y.shape[2 + j])}", f"(i64)i{2 + j}"
        if a.align_corners:
            k.add(f"const i64 u{j} = {o} * ({n} - 1), d{j} = {m} > 1 ? {m} - 1 : 1;")
        else:
            k.add(f"i64 u{j} = (2 * {o} + 1) * {n} - {m}; u{j} = u{j} < 0 ? 0 : u{j}; const i64 d{j} = 2 * {m};")
        k.add(f"const i64 b{j} = u{j} / d{j}; const i64 w{j}_1 = divide((u{j} - b{j} * d{j}) << 11, d{j}), w{j}_0 = 2048 - w{j}_1;",
              f"const I p{j}_0 = (I)(b{j} < {n} - 1 ? b{j} : {n} - 1), p{j}_1 = (I)(b{j} + 1 < {n} - 1 ? b{j} + 1 : {n} - 1);")  # fmt: skip

    def part(j: int, at: list[str]) -> str:
        if j == a.nd:
            return f"(i64)up({k.pointer(x)}[{k.offset([*names[:2], *at], strides(x))}])"
        return "(" + " + ".join(f"w{j}_{q} * {part(j + 1, [*at, f'p{j}_{q}'])}" for q in (0, 1)) + ")"

    _store(k, y, names, f"({CTYPE[y.dtype]})rescale({part(0, [])}, 1, {11 * a.nd})")
    k.launch_each(count(y.shape))


# ---- rows
def qreduce(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    axes = sorted(a.axes)
    outer = [i for i in range(len(x.shape)) if i not in axes]
    r = Rows(code, [x, y], x.shape, outer, axes)
    t = 1 if code.most(r.n) < 16 else _threads(code, r.n)
    r.method("i64 x(I i)", *r.element(x, strides(x)), f"return (i64)up({r.k.pointer(x)}[o]) - ({a.x_zero});")
    n = "((i64)p.n < 1 ? 1 : (i64)p.n)" if a.kind == ReduceKind.mean else "1LL"
    ys = strides(y)
    to = f"{r.k.pointer(y, out=True)}[{r.k.offset([f'p.r{i}' for i in outer], [ys[i] for i in outer])}]"
    store = f"{to} = {_result(f'divide(mul64(v, {a.multiplier}), {n} << {a.shift})', a, y)};"
    r.finish(t, f"TRV_SHARED(i64, buf, {t // 32 + 1});", f"const i64 v = row_fold<{t}, i64>(p, 0LL, buf, op_add());",
             store if t == 1 else f"if (threadIdx.x == 0) {store}")  # fmt: skip


def qsoftmax(code: Code, node: Node) -> None:
    x, table, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and table is not None
    rank = len(x.shape)
    r = Rows(code, [x, y, table], x.shape, [i for i in range(rank) if i != a.axis], [a.axis] if rank else [])
    r.method("i32 x(I i)", *r.element(x, strides(x)), f"return up({r.k.pointer(x)}[o]);")
    r.method("void y(I i, i64 v)", *r.element(y, strides(y)), f"{r.k.pointer(y, out=True)}[o] = {_result('v', a, y)};")
    t = _threads(code, r.n)
    e = f"(i64){r.k.pointer(table)}[(top - p.x(j)) & 255]"
    loop = f"for (I j = (I)threadIdx.x; j < p.n; j += {t})"
    r.finish(t, f"TRV_SHARED(i32, most, {t // 32 + 1});", f"TRV_SHARED(i64, buf, {t // 32 + 1});",
             f"const i32 top = row_fold<{t}, i32>(p, -128, most, op_max());", f"i64 sum = 0; {loop} sum += {e};",
             f"sum = row_threads<{t}>::all(sum, buf, op_add());", f"{loop} p.y(j, divide({e} * 256, sum));")  # fmt: skip


def qnorm(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    weight, bias = input_at(node, 1), input_at(node, 2)
    assert x is not None
    rank = len(x.shape)
    outer, inner = list(range(rank - a.axes)), list(range(rank - a.axes, rank))
    r = Rows(code, [x, y, weight, bias], x.shape, outer, inner)
    rms = a.kind == NormKind.rms
    r.method(
        "i64 x(I i)", *r.element(x, strides(x)), f"return (i64)up({r.k.pointer(x)}[o]) - ({a.x_zero if rms else 0});"
    )
    lines = r.element(y, strides(y))
    for v, op in ((weight, "*"), (bias, "+")):
        if v is not None:
            lines.append(f"v = v {op} (i64){r.k.pointer(v)}[{r.k.offset([f'j{i}' for i in inner], strides(v))}];")
    lines.append(f"{r.k.pointer(y, out=True)}[o] = {_result(f'rescale(v, {a.multiplier}, {a.shift})', a, y)};")
    r.method("void y(I i, i64 v)", *lines)
    t = _threads(code, r.n)
    loop = f"for (I j = (I)threadIdx.x; j < p.n; j += {t})"
    r.finish(t, f"TRV_SHARED(i64, buf, {t // 32 + 1});", "i64 sum = 0, squares = 0;", f"{loop} {{ sum += p.x(j); squares += p.x(j) * p.x(j); }}",
             f"sum = {'0' if rms else f'row_threads<{t}>::all(sum, buf, op_add())'};", f"squares = row_threads<{t}>::all(squares, buf, op_add());",
             f"const i64 n = (i64)p.n; u64 q = (u64)(n * squares - sum * sum) + (((u64)n * (u64)n * {int(a.eps)}ull) >> 16); q = q == 0 ? 1 : q;",
             "i32 s = 0; for (; q >> 60 == 0; s++) q <<= 2;",
             "u64 root = 0; for (u64 bit = (u64)1 << 60; bit != 0; bit >>= 2) { const bool more = q >= root + bit;",
             "if (more) q -= root + bit; root = (root >> 1) + (more ? bit : 0); }",
             f"{loop} p.y(j, divide(mul64(n * p.x(j) - sum, (i64)1 << (s + 12)), (i64)root));")  # fmt: skip


# ---- products
def _finish(k: Kernel, node: Node, acc: str, scale: Value, bias: Value | None, channel: str, out: str) -> list[str]:
    """Statements that make a result of a sum of stored products: acc holds it."""
    y, a, x = node.outputs[0], node.attrs, node.inputs[0]
    assert x is not None
    lines = [f"{acc} v = acc;"]
    wrap = "int_add"
    if bias is not None:
        lines.append(f"v = {wrap}<{acc}>(v, ({acc}){k.pointer(bias)}[{k.offset([channel], strides(bias))}]);")
    s = strides(scale)
    if y.dtype == DType.f32:
        at = "0" if scale.type.count == 1 else k.offset([channel], s)
        lines += [
            f"f32 f = __fmul_rn((f32)v, up({k.pointer(scale)}[{at}]));",
            *_act(a),
            f"{k.pointer(y, out=True)}[{out}] = f;",
        ]
        return lines
    at = "0" if scale.shape[-1] == 1 else k.offset([channel], s[-1:])
    m, h = (f"{k.pointer(scale)}[{at} + {row} * {k.size(s[0])}]" for row in (0, 1))
    f = "rescale_wide" if acc == "i64" else "rescale"
    return [*lines, f"{k.pointer(y, out=True)}[{out}] = {_result(f'{f}((i64)v, {m}, {h})', a, y)};"]


def _act(a: ops.Qconv | ops.Qmatmul) -> list[str]:
    if not a.act:
        return []
    lo, hi = (
        f"({float(b)!r}f)" if abs(b) != float("inf") else f"({'-' if b < 0 else ''}TRV_INF)" for b in (a.lo, a.hi)
    )
    return [f"f = act<{int(a.act)}>(f, {lo}, {hi});"]


def _sums(code: Code, w: Value, outer: list[int], inner: list[int], to: Value) -> None:
    """Sums of a weight over some axes, i32, in order of the others."""
    r = Rows(code, [w], w.shape, outer, inner)
    r.method("i32 x(I i)", *r.element(w, strides(w)), f"return up({r.k.pointer(w)}[o]);")
    t = _threads(code, r.n)
    at = r.k.offset([f"p.r{i}" for i in outer], dense([w.shape[i] for i in outer]))
    r.finish(t, f"TRV_SHARED(i32, buf, {t // 32 + 1});", f"const i32 v = row_fold<{t}, i32>(p, 0, buf, op_add());",
             f"if (threadIdx.x == 0) {r.k.pointer(to, 'i32', out=True)}[{at}] = v;")  # fmt: skip


def qconv_scratch(node: Node) -> list[Size]:
    x = node.inputs[0]
    assert x is not None
    if is_float(x.dtype) or node.attrs.x_zero == 0 or conv_direct(Code({}), node):
        return []
    return [node.outputs[0].shape[1] * 4]


def qconv(code: Code, node: Node) -> None:
    x, w, scale, bias = node.inputs[0], node.inputs[1], node.inputs[2], input_at(node, 3)
    y, a = node.outputs[0], node.attrs
    assert x is not None and w is not None and scale is not None
    values = [x, w, scale, bias, y]
    real = is_float(x.dtype)
    acc = "f32" if real else "i32" if x.dtype == DType.i8 else "i64"

    def finish(k: Kernel, channel: str, out: str) -> list[str]:
        if not real:
            return _finish(k, node, acc, scale, bias, channel, out)
        lines = [f"f32 f = __fmul_rn(acc, {k.pointer(scale)}[{k.offset([channel], strides(scale))}]);"]
        if bias is not None:
            lines.append(f"f = __fadd_rn(f, {k.pointer(bias)}[{k.offset([channel], strides(bias))}]);")
        return [*lines, *_act(a), f"{k.pointer(y, out=True)}[{out}] = f;"]

    if conv_direct(code, node):
        k = Kernel(code, values, "gemm")
        zero = "" if real else f" - ({a.x_zero})"
        names = direct_sum(k, node, acc, lambda xv, wv: f"acc = madd(({acc})(up({xv}){zero}), ({acc})up({wv}), acc);")
        k.add(*finish(k, "i1", k.offset(names, strides(y))))
        k.launch_each(count(y.shape))
        return
    sums = node.tmp[0] if node.tmp else None
    if sums is not None:
        og = y.shape[1] // a.groups
        if a.transposed:  # w[C, O / groups, ..]: sums per group and output channel
            _group_sums(code, w, a.groups, og, sums)
        else:
            _sums(code, w, [0], list(range(1, len(w.shape))), sums)
    fill = "0.0f" if real else f"({CTYPE[x.dtype]})({a.x_zero})"
    p, pl, out = conv_problem(code, node, "tc_i8" if x.dtype == DType.i8 else "", acc, fill, [*values, sums])
    k = p.kernel
    channel = f"(z * {k.size(conv_axes(node)[0])} + m)"
    correct = (
        []
        if sums is None
        else [f"acc = int_sub<{acc}>(acc, int_mul<{acc}>(({acc}){k.pointer(sums, 'i32')}[{channel}], {a.x_zero}));"]
    )
    p.store = [*pl, *correct, *finish(k, channel, out)]
    p.emit()


def _group_sums(code: Code, w: Value, groups: int, og: Size, to: Value) -> None:
    """The same for the weight of a transposed convolution, whose first axis is groups and inputs of a group."""
    k = Kernel(code, [w])
    total = groups * og
    k.each(total)
    cg = w.shape[0] // groups
    k.add(
        f"const I z = i / {k.size(og)}, m = i % {k.size(og)};",
        "i32 sum = 0;",
        f"for (I c = 0; c < {k.size(cg)}; c++) {{",
    )
    names = [f"q{j}" for j in range(len(w.shape) - 2)]
    for n, d in zip(names, w.shape[2:], strict=True):
        k.add(f"for (I {n} = 0; {n} < {k.size(d)}; {n}++)")
    k.add(f"sum += up({k.pointer(w)}[{k.offset([f'(z * {k.size(cg)} + c)', 'm', *names], strides(w))}]); }}",
          f"{k.pointer(to, 'i32', out=True)}[i] = sum;")  # fmt: skip
    k.launch_each(total)


def _by_sums(node: Node) -> bool:
    """Does a zero point of a go out by sums of b's columns?"""
    a, n = node.inputs[0], node.attrs
    assert a is not None
    b = node.inputs[1]
    assert b is not None
    return bool(a.dtype == DType.i8 and b.dtype == DType.i8 and n.b_zero == 0 and matmul_axes(node).Z == 1)


def qmatmul_scratch(node: Node) -> list[Size]:
    a, b, n = node.inputs[0], node.inputs[1], node.attrs
    assert a is not None and b is not None
    if not is_float(a.dtype):
        return [b.shape[-1] * 4] if _by_sums(node) and n.a_zero != 0 else []
    return [] if n.dynamic == 0 else [a.type.count * 2, count(a.shape[:-1]) * 4]


def qmatmul(code: Code, node: Node) -> None:
    a, b, scale, bias, offset = (*(node.inputs[i] for i in range(3)), input_at(node, 3), input_at(node, 4))
    y, n = node.outputs[0], node.attrs
    assert a is not None and b is not None and scale is not None
    if is_float(a.dtype) and n.dynamic:
        _dynamic(code, node)
        return
    x = matmul_axes(node)
    k = Kernel(code, [a, b, scale, bias, offset, y], "gemm")
    zl, zn = _sub(k, "z", x.batch, "z")
    rl, rn = _sub(k, "m", x.rows, "m")
    sa, sb = strides(a), strides(b)

    def place(row: int, batch: int, last: str, step: Size) -> str:
        parts = (k.offset(zn, x.batch_steps[batch]), k.offset(rn, x.row_steps[row]), k.offset([last], [step]))
        return " + ".join(t for t in parts if t != "0") or "0"

    at = place(0, 0, "k", sa[-1])
    bt = f"{k.offset(zn, x.batch_steps[1])} + {k.offset(['k', 'n'], [sb[-2], sb[-1]])}"
    out = place(1, 2, "n", strides(y)[-1])
    a_k, b_n = True, sb[-1] == 1 or sb[-2] != 1
    if is_float(a.dtype):
        value = f"(f32)(up({k.pointer(b)}[{bt}]) - ({n.b_zero})) * {_scale(k, scale, n.group)}"
        if offset is not None:
            value = f"{value} + {_scale(k, offset, n.group)}"
        store = ["f32 f = acc;"]
        if bias is not None:
            store.append(f"f = __fadd_rn(f, {k.pointer(bias)}[{k.offset(['n'], strides(bias))}]);")
        store += [*_act(n), f"{k.pointer(y, out=True)}[{out}] = f;"]
        Problem(k, x.M, x.N, x.K, x.Z, "f32", "f32", "f32", [*zl, *rl, f"out[0] = {k.pointer(a)}[{at}];"], [*zl, f"out[0] = {value};"],
                [*zl, *rl, *store], "", a_k, b_n).emit()  # fmt: skip
        return
    if _by_sums(node):
        sums = node.tmp[0] if node.tmp else None
        if sums is not None:
            _sums(code, b if len(b.shape) == 2 else _flat(b), [1], [0], sums)
        va, vb = (
            _vector(a, x.K, sa[-1] == 1, 8),
            _vector(b, x.N if b_n else x.K, sb[-1] == 1 if b_n else sb[-2] == 1, 8),
        )
        correct = (
            [] if sums is None else [f"acc = int_sub<i32>(acc, int_mul<i32>({k.pointer(sums, 'i32')}[n], {n.a_zero}));"]
        )
        Problem(k, x.M, x.N, x.K, x.Z, "i8", "i8", "i32", [*zl, *rl, _read(k, a, at, va)], [*zl, _read(k, b, bt, vb)],
                [*zl, *rl, *correct, *_finish(k, node, "i32", scale, bias, "n", out)], "tc_i8", a_k, b_n, va, vb).emit()  # fmt: skip
        return
    acc = "i32" if a.dtype == DType.i8 else "i64"
    Problem(k, x.M, x.N, x.K, x.Z, "i32", "i32", acc, [*zl, *rl, f"out[0] = up({k.pointer(a)}[{at}]) - ({n.a_zero});"],
            [*zl, f"out[0] = up({k.pointer(b)}[{bt}]) - ({n.b_zero});"], [*zl, *rl, *_finish(k, node, acc, scale, bias, "n", out)], "", a_k,
            b_n).emit()  # fmt: skip


def _flat(b: Value) -> Value:
    """The matrix of a b whose batch has one element."""
    from trivet.ir.graph import Placement
    from trivet.ir.types import Type

    v = Value(b.name, Type(b.dtype, b.shape[-2:]))
    if b.placement is not None:
        v.placement = Placement(b.placement.root, b.placement.offset, b.placement.strides[-2:])
    return v


def _scale(k: Kernel, t: Value, group: int, g: str = "") -> str:
    """The scale or offset of column n at place k."""
    s = strides(t)
    if group:
        return f"up({k.pointer(t)}[{k.offset([g or f'(k / {group})', 'n'], s)}])"
    return f"up({k.pointer(t)}[{'0' if t.type.count == 1 else k.offset(['n'], s)}])"


def _dynamic(code: Code, node: Node) -> None:
    """Rows are quantised first, into scratch; then a thread per result adds up the groups in order."""
    a, b, scale, bias, offset = (*(node.inputs[i] for i in range(3)), input_at(node, 3), input_at(node, 4))
    y, n = node.outputs[0], node.attrs
    assert a is not None and b is not None and scale is not None
    q, ranges = node.tmp
    rank = len(a.shape)
    outer = list(range(rank - 1))
    r = Rows(code, [a, b, y], a.shape, outer, [rank - 1])
    r.method("f32 x(I i)", *r.element(a, strides(a)), f"const f32 v = {r.k.pointer(a)}[o]; return v == v ? v : 0.0f;")
    t = _threads(code, r.n)
    loop = f"for (I j = (I)threadIdx.x; j < p.n; j += {t})"
    head = [f"TRV_SHARED(f32, buf, {t // 32 + 1});", f"i16* const q = {r.k.pointer(q, 'i16', out=True)} + i * p.n;"]
    if n.dynamic == 1:
        body = [f"f32 most = 0; {loop} most = fmaxf(most, fabsf(p.x(j)));", f"most = row_threads<{t}>::all(most, buf, op_max());",
                "most = fminf(most, 3.4028234663852886e38f);", "const f32 up_ = 127.0f / most, r = most / 127.0f;",
                f"{loop} {{ i32 v = most == 0 ? 0 : half_even(__fmul_rn(p.x(j), up_)); q[j] = (i16)(v < -127 ? -127 : v > 127 ? 127 : v); }}"]  # fmt: skip
    else:
        body = [f"f32 lo = 0, hi = 0; {loop} {{ lo = fminf(lo, p.x(j)); hi = fmaxf(hi, p.x(j)); }}",
                f"hi = row_threads<{t}>::all(hi, buf, op_max());", f"lo = -row_threads<{t}>::all(-lo, buf, op_max());",
                "f32 r = (hi - lo) / 255.0f; r = r > 1.1920928955078125e-7f ? r : 1.1920928955078125e-7f;",
                "i32 z = -128 - half_even(lo / r); z = z < -128 ? -128 : z > 127 ? 127 : z;", "const f32 back = 1.0f / r;",
                f"{loop} {{ i32 v = half_even(__fmul_rn(p.x(j), back)) + z; v = v < -128 ? -128 : v > 127 ? 127 : v; q[j] = (i16)(v - z); }}"]  # fmt: skip
    r.finish(t, *head, *body, f"if (threadIdx.x == 0) {r.k.pointer(ranges, 'f32', out=True)}[i] = r;")
    k, names = _frame(code, node, [a, b, scale], y)
    K = a.shape[-1]
    row = k.offset(names[:-1], dense(a.shape[:-1]))
    sb = spread(b, [*y.shape[:-2], *b.shape[-2:]])
    group = n.group or K
    k.add(f"const I n = {names[-1]}, row = {row};", f"const i16* const q = {k.pointer(q, 'i16')} + row * {k.size(K)};", "f32 t = 0;",
          f"for (I g = 0; g * {k.size(group)} < {k.size(K)}; g++) {{", "i32 dot = 0, own = 0;",
          f"for (I k = g * {k.size(group)}; k < (g + 1) * {k.size(group)} && k < {k.size(K)}; k++) {{",
          f"dot += (i32)q[k] * (up({k.pointer(b)}[{k.offset([*names[:-2], 'k', 'n'], sb)}]) - ({n.b_zero})); own += q[k]; }}",
          f"t = __fadd_rn(t, __fmul_rn((f32)dot, {_scale(k, scale, n.group, 'g')}));")  # fmt: skip
    if offset is not None:
        k.add(f"t = __fadd_rn(t, __fmul_rn((f32)own, {_scale(k, offset, n.group, 'g')}));")
    k.add("}", f"f32 f = __fmul_rn(t, {k.pointer(ranges, 'f32')}[row]);")
    if bias is not None:
        k.add(f"f = __fadd_rn(f, {k.pointer(bias)}[{k.offset(['n'], strides(bias))}]);")
    k.add(*_act(n))
    _store(k, y, names, "f")
    k.launch_each(count(y.shape))


__all__ = ["binary", "lookup", "qconv", "qconv_scratch", "qgather", "qmatmul", "qmatmul_scratch", "qnorm", "qpool", "qreduce",
           "qresize", "qsoftmax", "requantize", "up"]  # fmt: skip
