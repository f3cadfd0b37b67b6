"""Kernels that combine many elements into one or into each other: reduce, scan, softmax, norm."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.cuda.code import CTYPE, WORK, Code, Kernel, Size, count, dense, down, input_at, strides, up
from trivet.fbs.structs import DType, NormKind, ReduceKind, ScanKind
from trivet.ir.dim import ceil_div
from trivet.ir.graph import Node, Value
from trivet.ir.types import is_float

LONG = 1024  # rows at least so long are shared by 256 threads


def _threads(code: Code, n: Size) -> int:
    most = code.most(n)
    return 256 if most >= LONG else 128 if most > 128 else 32


class Rows:
    """A kernel whose struct P gives access to one row. outer: axes that number the rows; inner: axes along it."""

    def __init__(self, code: Code, values: Sequence[Value | None], shape: Sequence[Size], outer: Sequence[int], inner: Sequence[int],
                 wide: bool = False) -> None:  # fmt: skip
        self.k = Kernel(code, values, "rows", wide=wide)
        self.shape, self.outer, self.inner = shape, list(outer), list(inner)
        self.rows, self.n = count([shape[i] for i in outer]), count([shape[i] for i in inner])
        self.body: list[str] = []

    def method(self, head: str, *lines: str) -> None:
        self.body.append(f"TRV_METHOD {head} const {{ {' '.join(lines)} }}")

    def element(self, v: Value, steps: Sequence[Size], at: str = "i") -> list[str]:
        """Statements that leave the offset of the row's element at position `at` in o."""
        k = Kernel(self.k.code, [])
        k.index, k.words = self.k.index, self.k.words
        names = [f"j{i}" for i in self.inner]
        k.unravel(at, [self.shape[i] for i in self.inner], names)
        rows = [f"r{i}" for i in self.outer]
        offset = k.offset([*rows, *names], [*(steps[i] for i in self.outer), *(steps[i] for i in self.inner)])
        return [*k.lines, f"const I o = {offset};"]

    def finish(self, threads: int, *call: str) -> None:
        """threads: of a row; 1: each thread has a row of its own. call: statements with p."""
        k = self.k
        rows = [f"r{i}" for i in self.outer]
        fields = " ".join(f"I {r};" for r in [*rows, "n"])
        k.before.append(
            f"struct P {{ typedef {k.index} I; const long long* w; {fields}\n" + "\n".join(self.body) + "\n};"
        )
        if threads == 1:
            k.each(self.rows)
        else:
            k.add("const I i = (I)blockIdx.x;")
        k.unravel("i", [self.shape[i] for i in self.outer], rows)
        k.add("P p;", "p.w = w;", f"p.n = {k.size(self.n)};", *(f"p.{r} = {r};" for r in rows), *call)
        if threads == 1:
            k.launch_each(self.rows)
        else:
            k.launch((self.rows, 1, 1), threads)


def reduce(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    axes = sorted(a.axes)
    outer = [i for i in range(len(x.shape)) if i not in axes]
    r = Rows(code, [x, y], x.shape, outer, axes)
    xs, ys = strides(x), strides(y)
    kind = a.kind
    last_kept = bool(outer) and xs[outer[-1]] == 1 and code.most(*(x.shape[i] for i in outer)) >= 256
    t = 1 if last_kept or code.most(r.n) < 16 else _threads(code, r.n)
    acc = WORK[y.dtype if kind in (ReduceKind.sum, ReduceKind.prod) and not is_float(y.dtype) else x.dtype]
    if kind in (ReduceKind.sum, ReduceKind.prod) and is_float(y.dtype) and not is_float(x.dtype):
        acc = WORK[y.dtype]
    if kind in (ReduceKind.any, ReduceKind.all):
        acc = "i32"
    value = f"{r.k.pointer(x)}[o]"
    value = (
        f"(i32)({up(value, x.dtype)} != 0)"
        if acc == "i32" and kind in (ReduceKind.any, ReduceKind.all)
        else f"({acc}){up(value, x.dtype)}"
    )
    r.method(f"{acc} x(I i)", *r.element(x, xs), f"return {value};")
    offset = r.k.offset([f"p.r{i}" for i in outer], [ys[i] for i in outer])
    buf = f"TRV_SHARED({acc}, buf, {t // 32 + 1});"
    folds = {ReduceKind.sum: ("0", "op_add()"), ReduceKind.mean: ("0", "op_sum()"), ReduceKind.prod: ("1", "op_prod()"),
             ReduceKind.any: ("0", "op_any()"), ReduceKind.all: ("1", "op_every()")}  # fmt: skip
    low = {ReduceKind.max: ("lowest", "op_most()"), ReduceKind.min: ("highest", "op_least()")}
    if kind in folds:
        start, op = folds[kind]
        call = [
            buf,
            f"const {acc} v = row_fold<{t}, {acc}>(p, ({acc}){start}, buf, {op}){f' / ({acc})p.n' if kind == ReduceKind.mean else ''};",
        ]
    elif kind in low:
        which, op = low[kind]
        call = [buf, f"const {acc} v = row_fold<{t}, {acc}>(p, lim<{acc}>::{which}(), buf, {op});"]
    elif kind == ReduceKind.var:
        call = [f"const {acc} v = row_var<{t}>(p, {float(a.correction)!r}, (i64)p.n);"]
    else:
        call = [f"const i64 v = row_find<{t}, {str(kind == ReduceKind.argmax).lower()}>(p);"]
    store = f"{r.k.pointer(y, out=True)}[{offset}] = {down('v', y.dtype)};"
    r.finish(t, *call, store if t == 1 else f"if (threadIdx.x == 0) {store}")


def scan(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    rank = len(x.shape)
    outer, inner = [i for i in range(rank) if i != a.axis], [a.axis] if rank else []
    r = Rows(code, [x, y], x.shape, outer, inner)
    acc = WORK[y.dtype]
    start, op = {ScanKind.sum: ("0", "op_add()"), ScanKind.prod: ("1", "op_prod()"),
                 ScanKind.max: (f"(({acc})up(lim<{CTYPE[y.dtype]}>::lowest()))" if not is_float(y.dtype) else "-TRV_INF", "op_most()"),
                 ScanKind.min: (f"(({acc})up(lim<{CTYPE[y.dtype]}>::highest()))" if not is_float(y.dtype) else "TRV_INF", "op_least()")}[a.kind]  # fmt: skip
    if y.dtype == DType.bool and a.kind in (ScanKind.max, ScanKind.min):
        start = "0" if a.kind == ScanKind.max else "1"
    first = f"({acc}){up(f'{r.k.pointer(x)}[o]', x.dtype)}"
    if is_float(x.dtype) and not is_float(y.dtype):
        first = f"to_{acc}({up(f'{r.k.pointer(x)}[o]', x.dtype)})"
    r.method(f"{acc} x(I i)", *r.element(x, strides(x)), f"return {first};")
    r.method(f"void keep(I i, {acc} before, {acc} after)", *r.element(y, strides(y)),
             f"{r.k.pointer(y, out=True)}[o] = {down('before' if a.exclusive else 'after', y.dtype)};", "(void)before; (void)after;")  # fmt: skip
    r.finish(32, f"row_scan<{acc}>(p, ({acc}){start}, {op});")


def softmax(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    assert x is not None
    rank = len(x.shape)
    r = Rows(code, [x, y], x.shape, [i for i in range(rank) if i != a.axis], [a.axis] if rank else [])
    acc = WORK[y.dtype]
    r.method(f"{acc} x(I i)", *r.element(x, strides(x)), f"return {up(f'{r.k.pointer(x)}[o]', x.dtype)};")
    r.method(
        f"void y(I i, {acc} v)", *r.element(y, strides(y)), f"{r.k.pointer(y, out=True)}[o] = {down('v', y.dtype)};"
    )
    along = rank > 0 and strides(x)[a.axis] == 1
    t = 1 if not along and code.most(*x.shape) // max(code.most(r.n), 1) >= 4096 else _threads(code, r.n)
    r.finish(t, f"row_softmax<{t}, {str(a.log).lower()}>(p);")


def norm(code: Code, node: Node) -> None:
    x, y, a = node.inputs[0], node.outputs[0], node.attrs
    weight, bias = input_at(node, 1), input_at(node, 2)
    assert x is not None
    shape, rank = list(x.shape), len(x.shape)
    xs, ys = list(strides(x)), list(strides(y))
    if a.kind == NormKind.group:  # channels become groups and channels of a group
        per = shape[1] // a.groups
        shape[1:2] = [a.groups, per]
        for s in (xs, ys):
            s[1:2] = [s[1] * per, s[1]]
        outer, inner = [0, 1], list(range(2, rank + 1))
    else:
        outer, inner = list(range(rank - a.axes)), list(range(rank - a.axes, rank))
    r = Rows(code, [x, y, weight, bias], shape, outer, inner)
    acc = WORK[y.dtype]
    r.method(f"{acc} x(I i)", *r.element(x, xs), f"return {up(f'{r.k.pointer(x)}[o]', x.dtype)};")
    lines = r.element(y, ys)
    for v, op in ((weight, "*"), (bias, "+")):
        if v is None:
            continue
        steps = strides(v)
        if a.kind == NormKind.group:
            at = f"(r1 * {r.k.size(shape[2])} + j2) * {r.k.size(steps[0])}"
        else:
            at = r.k.offset([f"j{i}" for i in inner], steps)
        lines.append(f"v = v {op} ({acc}){up(f'{r.k.pointer(v)}[{at}]', v.dtype)};")
    r.method(f"void y(I i, {acc} v)", *lines, f"{r.k.pointer(y, out=True)}[o] = {down('v', y.dtype)};")
    t = _threads(code, r.n)
    r.finish(t, f"row_norm<{t}, {str(a.kind == NormKind.rms).lower()}>(p, {float(a.eps)!r});")


__all__ = ["Rows", "ceil_div", "dense", "norm", "reduce", "scan", "softmax"]
