"""Matrix products and convolutions: which tiles, on which units, and the struct P of kernels/gemm.cuh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trivet.cuda.code import (
    CTYPE,
    WORK,
    Code,
    Kernel,
    Size,
    aligned,
    count,
    down,
    input_at,
    limited,
    merged,
    spread,
    strides,
    up,
)
from trivet.fbs.structs import DType
from trivet.ir import ops
from trivet.ir.dim import Dim, ceil_div
from trivet.ir.graph import Node, Value
from trivet.ir.types import SIZES

TENSOR = {DType.f16: "tc_f16", DType.bf16: "tc_bf16"}
ENOUGH = 64  # blocks that fill a small device
FEW = 8  # rows for which a warp per column is better
Store = Callable[[Kernel, str, str, str], list[str]]  # (kernel, m, n, sum) -> statements


@dataclass(slots=True)
class Problem:
    """A product A[M, K] @ B[K, N], Z times. a, b: methods of P that read elements into out (arguments m, k or k, n); store: statements
    that take a result, where the numbers z, m, n and acc are. tensor: kind of tensor core numbers, "" for plain arithmetic.
    """

    kernel: Kernel
    M: Size
    N: Size
    K: Size
    Z: Size
    ta: str
    tb: str
    acc: str
    a: list[str]
    b: list[str]
    store: list[str]
    tensor: str = ""
    a_k: bool = True
    b_n: bool = True
    va: int = 1
    vb: int = 1
    scratch: Value | None = None  # of split sums
    parts: int = 1
    fields: list[str] = field(default_factory=list)

    def emit(self) -> None:
        """Writes and launches the kernel."""
        k, code = self.kernel, self.kernel.code
        few = not self.tensor and not self.b_n and self.a_k and code.most(self.M) <= FEW and self.parts == 1
        if (
            self.tensor
            and not self.b_n
            and self.a_k
            and code.most(self.M) <= FEW
            and self.acc == "f32"
            and self.parts == 1
        ):
            few = True
        store = self.store
        if self.parts > 1:
            assert self.scratch is not None
            at = "(((I)blockIdx.z * (I)M + m) * (I)N + n)"
            store = [f"{k.pointer(self.scratch, self.acc, out=True)}[{at}] = acc;"]
        k.before.append("\n".join([
            f"struct P {{ typedef {k.index} I; typedef {self.ta} TA; typedef {self.tb} TB; typedef {self.acc} Acc;",
            f"enum {{ A_K = {int(self.a_k)}, B_N = {int(self.b_n)}, VA = {self.va}, VB = {self.vb} }};",
            "const long long* w; I M, N, K, kb, ke, z;", *self.fields,
            f"TRV_METHOD void a(I m, I k, TA* out) const {{ {' '.join(self.a)} }}",
            f"TRV_METHOD void b(I k, I n, TB* out) const {{ {' '.join(self.b)} }}",
            f"TRV_METHOD void store(I m, I n, Acc acc) const {{ {' '.join(store)} }}", "};"]))  # fmt: skip
        M, N, K = k.size(self.M), k.size(self.N), k.size(self.K)
        setup = ["P p;", "p.w = w;", f"p.M = {M}; p.N = {N}; p.K = {K};"]
        if self.parts > 1:
            step = f"(({K} + {self.parts * 64 - 1}) / {self.parts * 64} * 64)"
            k.add(*setup, f"const I part = (I)blockIdx.z % {self.parts};", f"p.z = (I)blockIdx.z / {self.parts};",
                  f"p.kb = part * {step} < {K} ? part * {step} : {K}; p.ke = p.kb + {step} < {K} ? p.kb + {step} : {K};")  # fmt: skip
            depth: Size = self.Z * self.parts
        else:
            k.add(
                f"for (I z = (I)blockIdx.z; z < {k.size(self.Z)}; z += (I)gridDim.z) {{",
                *setup,
                f"p.z = z; p.kb = 0; p.ke = {K};",
            )
            depth = limited(self.Z)
        if few:
            rows = next(r for r in (1, 2, 4, 8) if r >= code.most(self.M))
            k.add(f"gemm_few<P, {rows}, 8>(p);")
            threads = 256
            grid: tuple[Size, Size, Size] = (ceil_div(self.N, 8), 1, depth)
        else:
            call, threads, bm, bn = self._tiles()
            k.add(*call)
            grid = (ceil_div(self.N, bn), ceil_div(self.M, bm), depth)
        if self.parts == 1:
            k.add("}")
        k.launch(grid, threads)

    def _tiles(self) -> tuple[list[str], int, int, int]:
        code = self.kernel.code
        most = code.most(ceil_div(self.M, 128)) * code.most(ceil_div(self.N, 128)) * code.most(self.Z) * self.parts
        large = most >= 2 * ENOUGH and code.most(self.M) > 64 and code.most(self.N) > 64
        if not self.tensor:
            if large and self.acc == "f32":
                return ["gemm_plain<P, 128, 128, 8, 8, 8>(p);"], 256, 128, 128
            return ["gemm_plain<P, 64, 64, 16, 4, 4>(p);"], 256, 64, 64
        tiles, plain, threads, bm, bn = ("128, 128, 32, 32, 64", "128, 128, 16, 8, 8", 256, 128, 128) if large else (
            "64, 64, 32, 32, 32", "64, 64, 16, 8, 4", 128, 64, 64)  # fmt: skip
        call = f"gemm_tensor<P, {self.tensor}, {tiles}>(p);"
        if self.tensor in ("tc_bf16", "tc_tf32"):
            return (
                [
                    "#if defined(TRV_SHIM) || __CUDA_ARCH__ >= 800",
                    call,
                    "#else",
                    f"gemm_plain<P, {plain}>(p);",
                    "#endif",
                ],
                threads,
                bm,
                bn,
            )
        return [call], threads, bm, bn


def parts(M: Size, N: Size, K: Size, Z: Size) -> int:
    """Pieces that sums over K are cut into, for products with few results and long sums; known sizes only."""
    if not (isinstance(M, int) and isinstance(N, int) and isinstance(K, int) and isinstance(Z, int)):
        return 1
    tiles = -(-M // 64) * -(-N // 64) * Z
    if tiles >= ENOUGH or K < 512 or tiles == 0:
        return 1
    return max(1, min(16, 2 * ENOUGH // tiles, K // 128))


def epilogue(
    k: Kernel, node: Node, acc: str, bias: tuple[Value, str] | None, residual: tuple[Value, str] | None, out: str
) -> list[str]:
    """Statements that finish a sum: bias and residual with their offsets, activation, store at an offset."""
    y, a = node.outputs[0], node.attrs
    lines = [f"{acc} v = acc;"]
    for extra in (bias, residual):
        if extra is not None:
            v, at = extra
            lines.append(f"v = v + ({acc}){up(f'{k.pointer(v)}[{at}]', v.dtype)};")
    lo, hi = (
        f"({b!r})" if abs(b) != float("inf") else f"({'-' if b < 0 else ''}TRV_INF)" for b in (float(a.lo), float(a.hi))
    )
    if a.act:
        lines.append(f"v = act<{int(a.act)}>(v, (f32){lo}, (f32){hi});")
    return [*lines, f"{k.pointer(y, out=True)}[{out}] = {down('v', y.dtype)};"]


def _sub(k: Kernel, flat: str, shape: Sequence[Size], prefix: str) -> tuple[list[str], list[str]]:
    """Statements that take a flat position apart, and the names of the indices."""
    part = Kernel(k.code, [])
    part.index, part.words = k.index, k.words
    names = [f"{prefix}{i}" for i in range(len(shape))]
    part.unravel(flat, shape, names)
    return part.lines, names


# ---- matmul
@dataclass(frozen=True, slots=True)
class _Matmul:
    """A product's axes: rows are those of M and of the batches that b does not have; z those that it has."""

    M: Size
    N: Size
    K: Size
    Z: Size
    rows: list[Size]
    row_steps: list[list[Size]]  # of a, y, bias, residual
    batch: list[Size]
    batch_steps: list[list[Size]]  # of a, b, y, bias, residual


def matmul_axes(node: Node) -> _Matmul:
    a, b, y = node.inputs[0], node.inputs[1], node.outputs[0]
    assert a is not None and b is not None
    extras = [v for v in (input_at(node, 2), input_at(node, 3)) if v is not None] if node.op == "matmul" else []
    shape = list(y.shape)
    lead = shape[:-2]
    sa = list(spread(a, [*lead, *a.shape[-2:]]))
    sb = list(spread(b, [*lead, *b.shape[-2:]]))
    sy = list(strides(y))
    se = [list(spread(v, shape)) for v in extras]
    free = all(s == 0 or d == 1 for d, s in zip(lead, sb[:-2], strict=True))
    if free:
        rows, steps = merged(shape[:-1], sa[:-1], sy[:-1], *(s[:-1] for s in se))
        return _Matmul(count(shape[:-1]), shape[-1], a.shape[-1], 1, rows, steps, [], [[] for _ in range(3 + len(se))])
    batch, batch_steps = merged(lead, sa[:-2], sb[:-2], sy[:-2], *(s[:-2] for s in se))
    return _Matmul(
        shape[-2],
        shape[-1],
        a.shape[-1],
        count(lead),
        [shape[-2]],
        [[s[-2]] for s in (sa, sy, *se)],
        batch,
        batch_steps,
    )


def matmul(code: Code, node: Node) -> None:
    a, b, y = node.inputs[0], node.inputs[1], node.outputs[0]
    assert a is not None and b is not None
    extras = [v for v in (input_at(node, 2), input_at(node, 3)) if v is not None]
    k = Kernel(code, [a, b, y, *extras], "gemm")
    x = matmul_axes(node)
    if x.K == 0:
        raise AssertionError("a product over nothing is refused")
    acc = WORK[y.dtype]
    ak, bk, bn = strides(a)[-1], strides(b)[-2], strides(b)[-1]
    a_k = ak == 1 or not (len(x.rows) <= 1 and x.row_steps[0] == [1])
    b_n = bn == 1 or bk != 1
    zl, zn = _sub(k, "z", x.batch, "z")
    rl, rn = _sub(k, "m", x.rows, "m")

    def place(which: int, row: str, col: str) -> str:
        """Offset of a (0), y (1) or an extra at z, m and a last index."""
        z = k.offset(zn, x.batch_steps[0 if which == 0 else which + 1])
        last = {0: ak, 1: strides(y)[-1]}.get(which)
        if last is None:
            last = spread(extras[which - 2], y.shape)[-1]
        return " + ".join(t for t in (z, k.offset(rn, x.row_steps[which]), k.offset([col], [last])) if t != "0") or "0"

    tensor = _tensor(code, a.dtype, b.dtype)
    share = 8 if tensor else 4
    va = _vector(a, x.K if a_k else x.M, (a_k and ak == 1) or not a_k, share)
    vb = _vector(b, x.N if b_n else x.K, bn == 1 if b_n else bk == 1, share)
    ta, tb = CTYPE[a.dtype], CTYPE[b.dtype]
    if tensor == "" and WORK[a.dtype] != acc:  # integers into i64
        acc = WORK[y.dtype]
    zb = k.offset(zn, x.batch_steps[1])
    p = Problem(
        k, x.M, x.N, x.K, x.Z, ta, tb, acc,
        [*zl, *rl, _read(k, a, place(0, "m", "k"), va)],
        [*zl, _read(k, b, f"{zb} + {k.offset(['k', 'n'], [bk, bn])}", vb)],
        [], tensor, a_k, b_n, va, vb)  # fmt: skip
    e = 2
    pairs: list[tuple[Value, str] | None] = []
    for i in (2, 3):
        v = input_at(node, i)
        pairs.append(None if v is None else (v, place(e, "m", "n")))
        e += v is not None
    finish = [*zl, *rl, *epilogue(k, node, acc, pairs[0], pairs[1], place(1, "m", "n"))]
    split_finish(code, node, p, finish, [a, b, y, *extras])


def split_finish(code: Code, node: Node, p: Problem, finish: list[str], values: list[Value]) -> None:
    """Emits a product whole, or in parts with a kernel that adds them up."""
    k = p.kernel
    if not node.tmp:
        p.store = finish
        p.emit()
        return
    p.scratch, p.parts = node.tmp[-1], parts(p.M, p.N, p.K, p.Z)
    p.emit()
    k2 = Kernel(code, values)
    k2.index, k2.words = k.index, list(k.words)  # finish names words of k
    n = p.M * p.N * p.Z
    M, N = k2.size(p.M), k2.size(p.N)
    k2.each(n)
    k2.add(f"const I z = i / ({M} * {N}), m = i / {N} % {M}, n = i % {N}; (void)z; (void)m; (void)n;", f"{p.acc} acc = 0;",
           f"for (I s = 0; s < {p.parts}; s++) acc += {k2.pointer(p.scratch, p.acc)}[((z * {p.parts} + s) * {M} + m) * {N} + n];", *finish)  # fmt: skip
    k2.launch_each(n)


def _tensor(code: Code, a: DType, b: DType) -> str:
    if a != b:
        return ""
    return "tc_tf32" if a == DType.f32 and code.tf32 else TENSOR.get(a, "")


def _vector(v: Value, along: Size, contiguous: bool, most: int = 4) -> int:
    """Elements that may be read at once along an axis of stride 1; most: a thread's share of a tile (8 with tensor cores)."""
    if not contiguous or not isinstance(along, int):
        return 1
    width = min(16 // SIZES[v.dtype], most)
    while width > 1 and not (along % width == 0 and aligned(v, width)):
        width //= 2
    return width


def _read(k: Kernel, v: Value, at: str, width: int, name: str = "out") -> str:
    t = CTYPE[v.dtype]
    if width == 1:
        return f"{name}[0] = {k.pointer(v)}[{at}];"
    return f"*(pack<{t}, {width}>*){name} = *(const pack<{t}, {width}>*)({k.pointer(v)} + {at});"


def matmul_scratch(node: Node) -> list[int | Dim]:
    x = matmul_axes(node)
    n = parts(x.M, x.N, x.K, x.Z)
    if n == 1 or (isinstance(x.M, int) and x.M <= FEW and strides_hint(node.inputs[1])):
        return []
    return [n * x.M * x.N * x.Z * SIZES_OF[WORK[node.outputs[0].dtype]]]


SIZES_OF = {"i32": 4, "i64": 8, "f32": 4, "f64": 8}


def strides_hint(b: Value | None) -> bool:
    """Is b, a view of a transposed matrix, read along K? Before storage is assigned only the graph can tell."""
    while b is not None and b.node is not None and b.placement is None:
        if b.node.op == "permute":
            return bool(b.node.attrs.axes[-1] != len(b.shape) - 1)
        if b.node.op not in ("reshape", "expand", "slice"):
            return False
        b = b.node.inputs[0]
    return b is not None and b.placement is not None and len(b.shape) > 1 and strides(b)[-2] == 1


# ---- convolution
def _spatial(a: ops.Conv | ops.Qconv, x: Value, w: Value) -> tuple[Size, ...]:
    return tuple(w.shape[2:])


def conv_axes(node: Node) -> tuple[Size, Size, Size, int]:
    """M, N, K, Z: channels of a group's output, pixels, taps of all channels, groups."""
    x, w, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and w is not None
    taps = count(w.shape[2:])
    og = y.shape[1] // a.groups
    cg = x.shape[1] // a.groups
    return og, count([y.shape[0], *y.shape[2:]]), cg * taps, a.groups


def conv_direct(code: Code, node: Node) -> bool:
    """Is a thread per output better than a product: few channels per group."""
    og, _, _k, groups = conv_axes(node)
    return code.most(og) <= 4 or (groups > 1 and code.most(og) < 16)


def conv_scratch(node: Node) -> list[int | Dim]:
    code = Code({})
    M, N, K, Z = conv_axes(node)
    if not all(isinstance(d, int) for d in (M, N, K)) or conv_direct(code, node):
        return []
    n = parts(M, N, K, Z)
    return [] if n == 1 else [n * M * N * Z * SIZES_OF[WORK[node.outputs[0].dtype]]]


@dataclass(slots=True)
class ConvText:
    """The pieces that float and stored convolutions share."""

    k: Kernel
    node: Node

    def tap(self, c: str, q: Sequence[str], o: Sequence[str]) -> tuple[list[str], str, str]:
        """Statements, condition and offset of the input cell that tap q of output o reads; c: channel of x; names n for the batch."""
        x, a, k = self.node.inputs[0], self.node.attrs, self.k
        assert x is not None
        lines, inside = [], []
        for j in range(a.nd):
            size = k.size(x.shape[2 + j])
            if a.transposed:
                lines.append(
                    f"const I t{j} = {o[j]} + {a.pad[j]} - {q[j]} * {a.dilation[j]}; const I p{j} = t{j} / {a.stride[j]};"
                )
                inside.append(f"t{j} >= 0 && t{j} % {a.stride[j]} == 0 && p{j} < {size}")
            else:
                lines.append(f"const I p{j} = {o[j]} * {a.stride[j]} - {a.pad[j]} + {q[j]} * {a.dilation[j]};")
                if a.pad[j] or not self._covered(j):
                    inside.append(f"p{j} >= 0 && p{j} < {size}")
        at = k.offset(["n0", c, *(f"p{j}" for j in range(a.nd))], strides(x))
        return lines, " && ".join(inside), at

    def _covered(self, j: int) -> bool:
        """Do all windows along axis j lie in the input?"""
        x, w, y, a = self.node.inputs[0], self.node.inputs[1], self.node.outputs[0], self.node.attrs
        assert x is not None and w is not None
        sizes = (x.shape[2 + j], y.shape[2 + j], w.shape[2 + j])
        if not all(isinstance(s, int) for s in sizes):
            return False
        n, o, q = sizes
        return bool((o - 1) * a.stride[j] + (q - 1) * a.dilation[j] < n)

    def weight(self, m: str, c: str, q: Sequence[str], z: str) -> str:
        """Offset of a weight: output channel m and input channel c of group z."""
        w, a, k = self.node.inputs[1], self.node.attrs, self.k
        assert w is not None
        og, cg = k.size(self.node.outputs[0].shape[1] // a.groups), k.size(self.node.inputs[0].shape[1] // a.groups)  # type: ignore[union-attr]
        if a.transposed:
            return k.offset([f"({z} * {cg} + {c})", m, *q], strides(w))
        return k.offset([f"({z} * {og} + {m})", c, *q], strides(w))


def conv_problem(
    code: Code, node: Node, tensor: str, acc: str, fill: str, values: Sequence[Value | None]
) -> tuple[Problem, list[str], str]:
    """The product of a convolution without its store; statements and offset of an output at z, m, n."""
    x, w, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and w is not None
    k = Kernel(code, values, "gemm")
    t = ConvText(k, node)
    M, N, K, Z = conv_axes(node)
    cg, og = k.size(x.shape[1] // a.groups), k.size(y.shape[1] // a.groups)
    taps = list(w.shape[2:])
    kl, kn = _sub(k, "k", [x.shape[1] // a.groups, *taps], "k")
    pl, pn = _sub(k, "n", [y.shape[0], *y.shape[2:]], "n")
    lines, inside, at = t.tap(f"(z * {cg} + k0)", kn[1:], pn[1:])
    ws = strides(w)
    inner = list(ws[1:])
    flat = not a.transposed and merged(w.shape[1:], inner)[1][0] in ([1], [])
    va = _vector(w, K, flat, 8 if tensor else 4)
    wa = f"(z * {og} + m) * {k.size(ws[0])} + k" if flat else t.weight("m", "k0", kn[1:], "z")
    xs = strides(x)
    pixels, (sx,) = merged(x.shape[2:], xs[2:])
    one = (not a.transposed and all(q == 1 for q in taps) and all(s == 1 for s in a.stride) and not any(a.pad) and x.shape[2:] == y.shape[2:]
           and sx in ([1], []) and len(pixels) <= 1)  # fmt: skip
    vb = _vector(x, pixels[0] if pixels else 1, True, 8 if tensor else 4) if one else 1
    if one:
        plane = k.size(count(x.shape[2:]))
        b = [f"const I n0 = n / {plane}, q = n % {plane};",
             _read(k, x, f"n0 * {k.size(xs[0])} + (z * {cg} + k) * {k.size(xs[1])} + q", vb)]  # fmt: skip
    else:
        b = [
            *kl,
            *pl,
            *lines,
            f"out[0] = {f'{inside} ? ' if inside else ''}{k.pointer(x)}[{at}]{f' : {fill}' if inside else ''};",
        ]
    p = Problem(k, M, N, K, Z, CTYPE[w.dtype], CTYPE[x.dtype], acc, [*([] if flat else kl), _read(k, w, wa, va)], b, [], tensor, True, True,
                va, vb)  # fmt: skip
    out = k.offset([pn[0], f"(z * {og} + m)", *pn[1:]], strides(y))
    return p, pl, out


def conv(code: Code, node: Node) -> None:
    x, w, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and w is not None
    bias, residual = input_at(node, 2), input_at(node, 3)
    values = [x, w, y, bias, residual]
    acc = WORK[y.dtype]
    if conv_direct(code, node):
        _direct(code, node, values)
        return
    p, pl, out = conv_problem(code, node, _tensor(code, x.dtype, w.dtype), acc, f"nothing<{CTYPE[x.dtype]}>()", values)
    k = p.kernel
    og = k.size(y.shape[1] // a.groups)
    extra_bias = None if bias is None else (bias, k.offset([f"(z * {og} + m)"], strides(bias)))
    pn = [f"n{i}" for i in range(a.nd + 1)]
    extra = (
        None
        if residual is None
        else (residual, k.offset([pn[0], f"(z * {og} + m)", *pn[1:]], spread(residual, y.shape)))
    )
    split_finish(
        code, node, p, [*pl, *epilogue(k, node, acc, extra_bias, extra, out)], [v for v in values if v is not None]
    )


def _direct(code: Code, node: Node, values: Sequence[Value | None]) -> None:
    """A thread per output."""
    x, w, y, _a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and w is not None
    bias, residual = input_at(node, 2), input_at(node, 3)
    acc = WORK[y.dtype]
    k = Kernel(code, values, "gemm")
    names = direct_sum(
        k, node, acc, lambda xv, wv: f"acc = madd(({acc}){up(xv, x.dtype)}, ({acc}){up(wv, w.dtype)}, acc);"
    )
    b = None if bias is None else (bias, k.offset(["i1"], strides(bias)))
    r = None if residual is None else (residual, k.offset(names, spread(residual, y.shape)))
    k.add(*epilogue(k, node, acc, b, r, k.offset(names, strides(y))))
    k.launch_each(count(y.shape))


def direct_sum(k: Kernel, node: Node, acc: str, term: Callable[[str, str], str]) -> list[str]:
    """Declares acc, the sum of term(x, w) over all taps inside the input; the names of the output's indices."""
    x, w, y, a = node.inputs[0], node.inputs[1], node.outputs[0], node.attrs
    assert x is not None and w is not None
    t = ConvText(k, node)
    k.each(count(y.shape))
    names = [f"i{j}" for j in range(len(y.shape))]
    k.unravel("i", y.shape, names)
    og, cg = k.size(y.shape[1] // a.groups), k.size(x.shape[1] // a.groups)
    k.add(
        f"const I n0 = i0, z = i1 / {og}, m = i1 % {og}; (void)m; (void)z;",
        f"{acc} acc = 0;",
        f"for (I c = 0; c < {cg}; c++) {{",
    )
    q = [f"q{j}" for j in range(a.nd)]
    for j in range(a.nd):
        k.add(f"for (I q{j} = 0; q{j} < {k.size(w.shape[2 + j])}; q{j}++) {{")
    lines, inside, at = t.tap(f"(z * {cg} + c)", q, names[2:])
    k.add(*lines)
    if inside:
        k.add(f"if (!({inside})) continue;")
    k.add(term(f"{k.pointer(x)}[{at}]", f"{k.pointer(w)}[{t.weight('m', 'c', q, 'z')}]"), "}" * (a.nd + 1))
    return names
