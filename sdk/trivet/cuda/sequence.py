"""Kernels with an order of their own: attention, recurrent networks, sort, scatter."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.cuda.code import (
    CTYPE,
    WORK,
    Code,
    Kernel,
    Size,
    count,
    down,
    input_at,
    limited,
    spread,
    strides,
    up,
)
from trivet.cuda.pointwise import move
from trivet.cuda.product import Problem, _read, _sub, _vector
from trivet.fbs.structs import DType, IndexKind, RnnKind, ScatterReduce
from trivet.ir.dim import Dim, ceil_div
from trivet.ir.graph import Node, Value
from trivet.ir.types import SIZES, is_float

STAGED = 128  # widest head whose keys and values are staged in shared memory
WIDEST = 512  # widest head
HIDDEN = 8192  # most bytes of shared memory / 4 that a recurrent step may take


def attention(code: Code, node: Node) -> None:
    q, key, v = node.inputs[0], node.inputs[1], node.inputs[2]
    mask, more_k, more_v = (input_at(node, i) for i in (3, 4, 5))
    y, a = node.outputs[0], node.attrs
    assert q is not None and key is not None and v is not None
    k = Kernel(code, [q, key, v, mask, more_k, more_v, y], "attention")
    acc = WORK[y.dtype]
    lead, H, L = list(y.shape[:-3]), y.shape[-3], y.shape[-2]
    D, E, S0 = q.shape[-1], v.shape[-1], key.shape[-2]
    S = S0 if more_k is None else S0 + more_k.shape[-2]
    G = key.shape[-3]
    zl, zn = _sub(k, "z", [*lead, H], "z")
    share = f"(z{len(lead)} / ({k.size(H)} / {k.size(G)}))"

    def place(x: Value, heads: str, row: str, col: str) -> str:
        steps = spread(x, [*lead, *x.shape[-3:]])
        return k.offset([*zn[:-1], heads, row, col], steps)

    def row(x: Value, more: Value | None, c: str) -> str:
        first = up(f"{k.pointer(x)}[{place(x, share, 's', c)}]", x.dtype)
        if more is None:
            return f"return {first};"
        at = place(more, share, f"(s - {k.size(S0)})", c)
        other = up(f"{k.pointer(more)}[{at}]", more.dtype)
        return f"return s < {k.size(S0)} ? {first} : {other};"

    score = [f"x = x * ({acc}){float(a.scale)!r};"]
    if a.causal:
        score.append("if (s > l) x = -TRV_INF;")
    if mask is not None:
        at = k.offset([*zn, "l", "s"], spread(mask, [*lead, H, L, S]))
        m = f"{k.pointer(mask)}[{at}]"
        score.append(
            f"if ({m} == 0) x = -TRV_INF;" if mask.dtype == DType.bool else f"x = x + ({acc}){up(m, mask.dtype)};"
        )
    z = " ".join([*zl, *(f"(void){n};" for n in zn)])
    last = "l + 1 < S ? l + 1 : S" if a.causal else "S"
    query, out = place(q, zn[-1], "l", "d"), place(y, zn[-1], "l", "e")
    k.before.append("\n".join([
        f"struct P {{ typedef {k.index} I; typedef {acc} A; const long long* w; I L, S, D, E, z;",
        f"TRV_METHOD A q(I l, I d) const {{ {z} return {up(f'{k.pointer(q)}[{query}]', q.dtype)}; }}",
        f"TRV_METHOD A k(I s, I d) const {{ {z} {row(key, more_k, 'd')} }}",
        f"TRV_METHOD A v(I s, I e) const {{ {z} {row(v, more_v, 'e')} }}",
        f"TRV_METHOD A score(I l, I s, A x) const {{ {z} {' '.join(score)} return x; }}",
        f"TRV_METHOD I last(I l) const {{ return {last}; }}",
        f"TRV_METHOD void y(I l, I e, A x) const {{ {z} {k.pointer(y, out=True)}[{out}] = {down('x', y.dtype)}; }}",
        "};"]))  # fmt: skip
    wide = code.most(E)
    per = next(j for j in (1, 2, 4, 8, 16) if j * 32 >= min(wide, WIDEST))
    stage = isinstance(D, int) and (STAGED if acc == "f32" else 64) >= D and wide <= (STAGED if acc == "f32" else 64)
    Z = count([*lead, H])
    k.add(f"for (I z = (I)blockIdx.z; z < {k.size(Z)}; z += (I)gridDim.z) {{", "P p;", "p.w = w; p.z = z;",
          f"p.L = {k.size(L)}; p.S = {k.size(S)}; p.D = {k.size(D)}; p.E = {k.size(E)};",
          f"attend<P, {D if stage else 1}, {per}, {str(stage).lower()}, {str(bool(a.nan_rows)).lower()}>(p); }}")  # fmt: skip
    k.launch((ceil_div(L, 16), 1, limited(Z)), 128)


# ---- recurrent networks
def _gates(node: Node) -> tuple[int, int, int]:
    """Rows of the gates, hidden size, size of what is fed back."""
    w_ih, w_hh = node.inputs[1], node.inputs[2]
    assert w_ih is not None and w_hh is not None
    g = w_ih.shape[0]
    return g, g // {RnnKind.lstm: 4, RnnKind.gru: 3}.get(node.attrs.kind, 1), w_hh.shape[1]  # type: ignore[return-value]


def takes_rnn(node: Node) -> str:
    """Why an rnn cannot be compiled."""
    g, h, r = _gates(node)
    if not all(isinstance(s, int) for s in (g, h, r)):
        return "rnn: hidden sizes that are not known"
    size = 8 if node.outputs[0].dtype == DType.f64 else 4
    if (g + 2 * h + r) * size > 4 * HIDDEN:
        return f"rnn: {h} hidden values, at most about {4 * HIDDEN // size // 7}"
    return ""


def rnn_scratch(node: Node) -> list[int | Dim]:
    x = node.inputs[0]
    assert x is not None
    return [x.shape[0] * x.shape[1] * _gates(node)[0] * (8 if node.outputs[0].dtype == DType.f64 else 4)]


def rnn(code: Code, node: Node) -> None:
    x, w_ih, w_hh = node.inputs[0], node.inputs[1], node.inputs[2]
    b_ih, b_hh, h0, c0, w_proj = (input_at(node, i) for i in range(3, 8))
    y, tmp, a = node.outputs[0], node.tmp[0], node.attrs
    assert x is not None and w_ih is not None and w_hh is not None
    g, hidden, r = _gates(node)
    steps, batch, width = x.shape
    acc = WORK[y.dtype]
    # the input side of all steps is one product
    k = Kernel(code, [x, w_ih, b_ih, y], "gemm", wide=code.most(steps, batch, g) > 1 << 31)
    rl, rn = _sub(k, "m", [steps, batch], "m")
    sx, sw = strides(x), strides(w_ih)
    bias = ""
    if b_ih is not None:
        place = k.offset(["n"], strides(b_ih))
        bias = f" + {up(f'{k.pointer(b_ih)}[{place}]', b_ih.dtype)}"
    va, vb = _vector(x, width, sx[-1] == 1), _vector(w_ih, width, sw[-1] == 1)
    Problem(k, steps * batch, g, width, 1, CTYPE[x.dtype], CTYPE[w_ih.dtype], acc,
            [*rl, _read(k, x, k.offset([*rn, "k"], sx), va)], [_read(k, w_ih, k.offset(["n", "k"], sw), vb)],
            [f"{k.pointer(tmp, acc, out=True)}[m * {k.size(g)} + n] = acc{bias};"], "", True, False, va, vb).emit()  # fmt: skip
    k = Kernel(code, [x, w_hh, w_proj, y], "rnn", "rows", wide=code.most(steps, batch, g) > 1 << 31)

    def read(v: Value | None, names: Sequence[str]) -> str:
        return "(A)0" if v is None else up(f"{k.pointer(v)}[{k.offset(names, strides(v))}]", v.dtype)

    def write(i: int, names: Sequence[str]) -> str:
        if i >= len(node.outputs):
            return ""
        v = node.outputs[i]
        return f"{k.pointer(v, out=True)}[{k.offset(names, strides(v))}] = {down('v', v.dtype)};"

    k.before.append("\n".join([
        f"struct P {{ typedef {k.index} I; typedef {acc} A; const long long* w; I T, n; bool reversed;",
        f"TRV_METHOD A x(I t, I j) const {{ return {k.pointer(tmp, acc)}[(t * {k.size(batch)} + n) * {k.size(g)} + j]; }}",
        f"TRV_METHOD A w_(I j, I k) const {{ return {read(w_hh, 'jk')}; }}",
        f"TRV_METHOD A b(I j) const {{ return {read(b_hh, 'j')}; }}",
        f"TRV_METHOD A proj(I r, I k) const {{ return {read(w_proj, 'rk')}; }}",
        f"TRV_METHOD A h0(I k) const {{ return {read(h0, 'nk')}; }}",
        f"TRV_METHOD A c0(I k) const {{ return {read(c0, 'nk')}; }}",
        f"TRV_METHOD void y(I t, I k, A v) const {{ {write(0, 'tnk')} }}",
        f"TRV_METHOD void h(I k, A v) const {{ {write(1, 'nk')} }}",
        f"TRV_METHOD void c(I k, A v) const {{ {write(2, 'nk')} }}", "};"]))  # fmt: skip
    threads = 512 if g >= 256 else 128
    k.add("P p;", f"p.w = w; p.T = {k.size(steps)}; p.n = (I)blockIdx.x; p.reversed = {str(bool(a.reverse)).lower()};",
          f"recur<P, {int(a.kind)}, {hidden}, {r}, {str(w_proj is not None).lower()}, {threads}>(p);")  # fmt: skip
    k.launch((batch, 1, 1), threads)


# ---- sort
def sort_scratch(node: Node) -> list[int | Dim]:
    x = node.inputs[0]
    assert x is not None
    return [x.type.count * 4]


def sort(code: Code, node: Node) -> None:
    x, values, index, a = node.inputs[0], node.outputs[0], node.outputs[1], node.attrs
    assert x is not None
    rank = len(x.shape)
    outer = [i for i in range(rank) if i != a.axis] if rank else []
    n, kept = (x.shape[a.axis], values.shape[a.axis]) if rank else (1, 1)
    k = Kernel(code, [x, values, index], "sort")
    lanes = count([x.shape[i] for i in outer])
    k.add("const I i = (I)blockIdx.x;")
    names = [f"r{i}" for i in outer]
    k.unravel("i", [x.shape[i] for i in outer], names)

    def base(v: Value) -> str:
        return k.offset(names, [strides(v)[i] for i in outer])

    def step(v: Value) -> Size:
        return strides(v)[a.axis] if rank else 0

    k.before.append(f"struct P {{ typedef {k.index} I; const long long* w; const {CTYPE[x.dtype]}* from; I n; i32* at;\n"
                    f"TRV_METHOD {WORK[x.dtype]} x(I e) const {{ return {up(f'from[e * {k.size(step(x))}]', x.dtype)}; }} }};")  # fmt: skip
    t = 256 if code.most(n) > 256 else 32 if code.most(n) <= 32 else 128
    k.add("P p;", f"p.w = w; p.n = {k.size(n)}; p.from = {k.pointer(x)} + {base(x)};",
          f"p.at = {k.pointer(node.tmp[0], 'i32', out=True)} + i * p.n;", f"sort_lane<{t}, {str(bool(a.descending)).lower()}>(p);",
          f"for (I e = (I)threadIdx.x; e < {k.size(kept)}; e += {t}) {{ const I j = p.at[e];",
          f"{k.pointer(values, out=True)}[{base(values)} + e * {k.size(step(values))}] = p.from[j * {k.size(step(x))}];",
          f"{k.pointer(index, out=True)}[{base(index)} + e * {k.size(step(index))}] = j; }}")  # fmt: skip
    k.launch((lanes, 1, 1), t)


# ---- scatter
def scatter_scratch(node: Node) -> list[int | Dim]:
    return (
        [node.outputs[0].type.count * 4]
        if node.attrs.reduce == ScatterReduce.mean or not node.attrs.include_self
        else []
    )


def scatter(code: Code, node: Node) -> None:
    """The input is copied; then a thread goes through the updates of one line along the axis, in order, so that results do not depend on
    chance.
    """
    x, index, updates, y, a = node.inputs[0], node.inputs[1], node.inputs[2], node.outputs[0], node.attrs
    assert x is not None and index is not None and updates is not None
    move(code, x, y)
    rank, xr = len(x.shape), len(index.shape)
    if a.kind == IndexKind.elements:
        outer = [i for i in range(rank) if i != a.axis]
        shape = [index.shape[i] for i in outer]
        n = index.shape[a.axis] if rank else 1
    else:
        outer = [i for i in range(rank) if i != a.axis]
        shape = [x.shape[i] for i in outer]
        n = count(index.shape)
    counts = node.tmp[0] if node.tmp else None
    k = Kernel(code, [x, index, updates, y])
    names = [f"r{i}" for i in outer]
    k.each(count(shape))
    k.unravel("i", shape, names)

    def full(at: str) -> list[str]:
        return [at if i == a.axis else f"r{i}" for i in range(rank)]

    size = k.size(x.shape[a.axis] if rank else 1)
    to = k.offset(full("at"), strides(y)) if rank else "0"
    work = "i64" if x.dtype == DType.bool else WORK[x.dtype]
    if counts is not None:  # how many values went into each element of the line
        line = k.offset(full("e"), list(_dense_of(y)))
        k.add(
            f"i32* const seen = {k.pointer(counts, 'i32', out=True)};",
            f"for (I e = 0; e < {size}; e++) seen[{line}] = {int(a.include_self)};",
        )
    k.add(f"for (I u = 0; u < {k.size(n)}; u++) {{")
    if a.kind == IndexKind.elements:
        i_at = k.offset(full("u"), strides(index)) if rank else "0"
        u_at = k.offset(full("u"), strides(updates)) if rank else "0"
    else:
        k.unravel("u", index.shape, [f"u{j}" for j in range(xr)])
        un = [f"u{j}" for j in range(xr)]
        i_at = k.offset(un, strides(index))
        u_at = k.offset(
            [*(f"r{i}" for i in range(a.axis)), *un, *(f"r{i}" for i in range(a.axis + 1, rank))], strides(updates)
        )
    k.add(f"const I at = wrap_index<I>((i64){k.pointer(index)}[{i_at}], {size}, {k.flag});",
          f"const {CTYPE[updates.dtype]} value = {k.pointer(updates)}[{u_at}];", f"{CTYPE[y.dtype]}* const to = {k.pointer(y, out=True)} + {to};")  # fmt: skip
    if a.reduce == ScatterReduce.none:
        k.add("*to = value; }")
    else:
        op = {ScatterReduce.sum: "op_add()", ScatterReduce.mean: "op_add()", ScatterReduce.prod: "op_prod()",
              ScatterReduce.max: "op_most()", ScatterReduce.min: "op_least()"}[a.reduce]  # fmt: skip
        code.headers.add("rows")
        both = f"{op}(({work}){up('*to', y.dtype)}, ({work}){up('value', updates.dtype)})"
        if counts is not None:
            where = k.offset(full("at"), _dense_of(y)) if rank else "0"
            k.add(f"*to = seen[{where}]++ == 0 ? value : {down(both, y.dtype)}; }}")
        else:
            k.add(f"*to = {down(both, y.dtype)}; }}")
    if a.reduce == ScatterReduce.mean:
        assert counts is not None
        line = k.offset(full("e"), _dense_of(y)) if rank else "0"
        at = k.offset(full("e"), strides(y)) if rank else "0"
        k.add(
            f"for (I e = 0; e < {size}; e++) {{ {CTYPE[y.dtype]}* const to = {k.pointer(y, out=True)} + {at}; const i32 c = seen[{line}];"
        )
        value = up("*to", y.dtype)
        mean = f"{value} / ({work})c" if is_float(y.dtype) else f"int_floor_div(({work}){value}, ({work})c)"
        k.add(f"if (c > 1) *to = {down(mean, y.dtype)}; }}")
    k.launch_each(count(shape))


def _dense_of(v: Value) -> Sequence[Size]:
    from trivet.cuda.code import dense

    return dense(v.shape)


__all__ = [
    "SIZES",
    "attention",
    "rnn",
    "rnn_scratch",
    "scatter",
    "scatter_scratch",
    "sort",
    "sort_scratch",
    "takes_rnn",
]
