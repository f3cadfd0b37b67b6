"""Random graphs for property tests: every op that passes look into, fixed and symbolic sizes, states, branches and loops, stored
integers between quantise and dequantise nodes.
"""

from __future__ import annotations

import math
from random import Random

import numpy as np
import torch

from trivet.fbs.structs import BinaryKind, DType, IndexKind, MapOp, NormKind, PadMode, ReduceKind
from trivet.fixed_point import fixed_point
from trivet.ir import ops
from trivet.ir.dim import Dim
from trivet.ir.graph import Graph, Loc, Module, State, Sym, Value
from trivet.ir.infer import settle
from trivet.ir.interop import dtype_of, torch_dtype
from trivet.ir.parse import parse_module
from trivet.ir.text import print_module, scale_arrays
from trivet.ir.types import Quant, Type, is_float, per_tensor
from trivet.pipeline import name_values

In = ops.Instr
F32 = DType.f32
UNARY = [MapOp.neg, MapOp.abs, MapOp.tanh, MapOp.sigmoid, MapOp.relu, MapOp.gelu, MapOp.silu, MapOp.sin, MapOp.hard_swish,
         MapOp.round, MapOp.floor, MapOp.elu, MapOp.erf]  # fmt: skip
BINARY = [MapOp.add, MapOp.sub, MapOp.mul, MapOp.min, MapOp.max, MapOp.fmax]
N = Dim.symbol("n")
QUANTS = [per_tensor(0.05, -7), per_tensor(0.03125), per_tensor(0.05, 100), per_tensor(2.0, -128)]


class Maker:
    """Grows one graph; values that make sense as operands are in pool."""

    def __init__(self, rng: Random, symbolic: bool) -> None:
        self.rng, self.symbolic = rng, symbolic
        self.g = Graph("main")
        self.pool: list[Value] = []
        self.data: list[torch.Tensor] = []
        self.n = rng.randint(1, 5)
        if symbolic:
            self.g.symbols["n"] = Sym("n", 1, 9, (0, 0), hint=3)

    def tensor(self, shape: tuple[int, ...], dtype: DType = F32) -> torch.Tensor:
        gen = torch.Generator().manual_seed(self.rng.getrandbits(40))
        x = torch.randn(shape, generator=gen) * 2
        if is_float(dtype) and self.rng.random() < 0.3 and x.numel():
            flat = x.reshape(-1)
            for special in (math.nan, math.inf, -0.0, 0.0, 1.0):
                if self.rng.random() < 0.15:
                    flat[self.rng.randrange(flat.numel())] = special
        return x.nan_to_num(0, 3, -3).to(torch_dtype(dtype)) if not is_float(dtype) else x.to(torch_dtype(dtype))

    def input(self, shape: tuple[int | Dim, ...], dtype: DType = F32) -> Value:
        v = self.g.value(Type(dtype, shape))
        self.g.inputs.append(v)
        self.data.append(self.tensor(tuple(self.n if isinstance(d, Dim) else d for d in shape), dtype))
        self.pool.append(v)
        return v

    def const(self, shape: tuple[int, ...], dtype: DType = F32) -> Value:
        x = self.tensor(shape, dtype)
        if self.rng.random() < 0.3:
            x = torch.full(shape, self.rng.choice([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 3.0])).to(torch_dtype(dtype))
        return self.g.const(x)

    def add(
        self,
        op: str,
        inputs: list[Value | None],
        dtype: DType,
        shape: tuple[int | Dim, ...],
        attrs: object,
        quant: Quant | None = None,
    ) -> Value:
        loc = Loc(f"m.{self.rng.randint(0, 3)}", f"net.py:{len(self.g.nodes)}", f"aten.{op}")
        v = self.g.node(op, inputs, [Type(dtype, shape, quant)], attrs, loc)[0]
        settle(self.g.nodes[-1])
        self.pool.append(v)
        return v

    def pick(self, *, dtype: DType | None = None, rank: int | None = None, least: int = 0) -> Value | None:
        ok = [v for v in self.pool if (dtype is None or v.dtype == dtype) and (rank is None or v.type.rank == rank)
              and v.type.rank >= least]  # fmt: skip
        if not ok:
            return None
        return self.rng.choice(ok[-6:] if self.rng.random() < 0.6 else ok)

    # -- ops
    def unary(self) -> None:
        x = self.pick(dtype=F32)
        if x is not None:
            op = self.rng.choice(UNARY)
            self.add("map", [x], F32, x.shape, ops.Map((In(MapOp.load, F32, (), 0), In(op, F32, (0,)))))

    def scalar(self) -> None:
        x = self.pick()
        if x is None or x.dtype == DType.bool:
            return
        c = self.rng.choice([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0, 8.0])
        op = self.rng.choice(
            [MapOp.add, MapOp.sub, MapOp.mul, MapOp.pow, MapOp.max] + ([MapOp.div] if is_float(x.dtype) else [])
        )
        value = c if is_float(x.dtype) else int(abs(c))
        args = (1, 0) if op != MapOp.pow and self.rng.random() < 0.3 else (0, 1)
        code = (In(MapOp.load, x.dtype, (), 0), In(MapOp.const_, x.dtype, (), value), In(op, x.dtype, args))
        self.add("map", [x], x.dtype, x.shape, ops.Map(code))

    def binary(self) -> None:
        x = self.pick(dtype=F32)
        if x is None:
            return
        same = [v for v in self.pool if v.dtype == F32 and fits(v, x)]
        y = self.rng.choice([*same, self.broadcast_const(x)])
        pair = [x, y] if self.rng.random() < 0.5 else [y, x]
        code = (In(MapOp.load, F32, (), 0), In(MapOp.load, F32, (), 1), In(self.rng.choice(BINARY), F32, (0, 1)))
        self.add("map", list(pair), F32, x.shape, ops.Map(code))

    def broadcast_const(self, x: Value) -> Value:
        shape = [d if isinstance(d, int) and self.rng.random() < 0.6 else 1 for d in x.shape]
        return self.const(tuple(shape[self.rng.randint(0, len(shape)) :]))  # type: ignore[arg-type]

    def choose(self) -> None:
        x = self.pick(dtype=F32)
        if x is None:
            return
        code = (In(MapOp.load, F32, (), 0), In(MapOp.const_, F32, (), 0.0), In(MapOp.gt, DType.bool, (0, 1)),
                In(MapOp.const_, F32, (), 0.1), In(MapOp.mul, F32, (0, 3)), In(MapOp.select, F32, (2, 0, 4)))  # fmt: skip
        self.add("map", [x], F32, x.shape, ops.Map(code))

    def cast(self) -> None:
        x = self.pick()
        if x is None:
            return
        to = self.rng.choice([F32, F32, DType.f64, DType.f16, DType.i32, DType.i64])
        if is_float(x.dtype) and not is_float(to):
            to = F32  # NaN to an integer may give anything
        if to != x.dtype:
            self.add("map", [x], to, x.shape, ops.Map((In(MapOp.load, x.dtype, (), 0), In(MapOp.cast, to, (0,)))))

    def positions(self) -> None:
        shape = self.rng.choice([(3, 4), (N if self.symbolic else 2, 3)])
        code = (In(MapOp.iota, DType.i64, (), 0), In(MapOp.iota, DType.i64, (), 1), In(MapOp.sub, DType.i64, (0, 1)),
                In(MapOp.dim, DType.i64, (), N + 1 if self.symbolic else 7), In(MapOp.add, DType.i64, (2, 3)),
                In(MapOp.cast, F32, (4,)))  # fmt: skip
        self.add("map", [], F32, shape, ops.Map(code))

    def reshape(self) -> None:
        x = self.pick(least=1)
        if x is None:
            return
        how = self.rng.randrange(4)
        if how == 0:
            at = self.rng.randint(0, x.type.rank)
            shape = (*x.shape[:at], 1, *x.shape[at:])
        elif how == 1 and x.type.rank > 1:
            shape = (x.shape[0] * x.shape[1], *x.shape[2:])
        elif how == 2 and isinstance(x.shape[-1], int) and x.shape[-1] % 2 == 0:
            shape = (*x.shape[:-1], 2, x.shape[-1] // 2)
        else:
            shape = (x.type.count,)
        if len(shape) <= 6:
            self.add("reshape", [x], x.dtype, shape, ops.Reshape())

    def permute(self) -> None:
        x = self.pick(least=2)
        if x is not None:
            axes = list(range(x.type.rank))
            self.rng.shuffle(axes)
            self.add("permute", [x], x.dtype, tuple(x.shape[a] for a in axes), ops.Permute(tuple(axes)))

    def expand(self) -> None:
        x = self.pick()
        if x is not None and x.type.rank < 5 and not isinstance(x.type.count, Dim) and x.type.count < 500:
            shape = tuple(2 if d == 1 and self.rng.random() < 0.7 else d for d in x.shape)
            self.add(
                "expand",
                [x],
                x.dtype,
                ((self.rng.choice([1, 2]), *shape) if self.rng.random() < 0.4 else shape),
                ops.Expand(),
            )

    def slice(self) -> None:
        x = self.pick(least=1)
        if x is None:
            return
        axis = self.rng.randrange(x.type.rank)
        size = x.shape[axis]
        if isinstance(size, Dim):
            start, count, step = (size - 1, 1, 1) if self.rng.random() < 0.5 else (size - 1, size, -1)
        elif size == 0:
            return
        else:
            start = self.rng.randrange(size)
            step = self.rng.choice([1, 1, 2, -1])
            count = self.rng.randint(1, 1 + (start // -step if step < 0 else (size - 1 - start) // step))
        shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
        self.add("slice", [x], x.dtype, shape, ops.Slice(axis, start, step))

    def reduce(self) -> None:
        x = self.pick(dtype=F32, least=1)
        if x is not None:
            axes = tuple(sorted(self.rng.sample(range(x.type.rank), self.rng.randint(1, x.type.rank))))
            kind = self.rng.choice([ReduceKind.sum, ReduceKind.mean, ReduceKind.max, ReduceKind.min])
            if 0 not in x.shape:
                self.add(
                    "reduce",
                    [x],
                    F32,
                    tuple(1 if i in axes else d for i, d in enumerate(x.shape)),
                    ops.Reduce(kind, axes),
                )

    def concat(self) -> None:
        x = self.pick(least=1)
        if x is None or isinstance(x.shape[0], Dim):
            return
        other = self.rng.choice([v for v in self.pool if v.dtype == x.dtype and v.shape[1:] == x.shape[1:] and v.type.rank > 0
                                 and v.type.rank == x.type.rank and v.type.quant == x.type.quant])  # fmt: skip
        if isinstance(other.shape[0], int):
            self.add("concat", [x, other], x.dtype, (x.shape[0] + other.shape[0], *x.shape[1:]), ops.Concat(0))

    def pad(self) -> None:
        x = self.pick(least=1)
        if x is not None and is_float(x.dtype):
            lo = tuple(self.rng.choice([0, 0, 1]) for _ in x.shape)
            hi = tuple(self.rng.choice([0, 0, 2]) for _ in x.shape)
            shape = tuple(d + a + b for d, a, b in zip(x.shape, lo, hi, strict=True))
            self.add("pad", [x], x.dtype, shape, ops.Pad(PadMode.constant, lo, hi, 0.5))

    def matmul(self) -> None:
        x = self.pick(dtype=F32, least=2)
        if x is None or not isinstance(x.shape[-1], int):
            return
        k, m = x.shape[-1], self.rng.choice([1, 3, 4])
        w = self.const((k, m))
        if self.rng.random() < 0.5:
            w = self.add("permute", [self.const((m, k))], F32, (k, m), ops.Permute((1, 0)))
        bias = self.const((m,)) if self.rng.random() < 0.5 else None
        self.add("matmul", [x, w, bias], F32, (*x.shape[:-1], m), ops.Matmul())

    def conv(self) -> None:
        x = self.pick(dtype=F32, rank=3)
        if (
            x is None
            or not isinstance(x.shape[1], int)
            or x.shape[1] == 0
            or not isinstance(x.shape[2], int)
            or x.shape[2] < 2
        ):
            return
        c = x.shape[1]
        groups = self.rng.choice([g for g in (1, 2, c) if c % g == 0])
        out = groups * self.rng.choice([1, 2])
        pad = self.rng.choice([0, 1])
        if self.rng.random() < 0.3:
            w, size = self.const((c, out // groups, 2)), (x.shape[2] - 1) * 2 + 2 - 2 * pad
        else:
            w, size = self.const((out, c // groups, 2)), x.shape[2] + 2 * pad - 1
        transposed = w.shape[0] == c and size == (x.shape[2] - 1) * 2 + 2 - 2 * pad
        if not transposed and size != x.shape[2] + 2 * pad - 1 or size <= 0:
            return
        bias = self.const((out,)) if self.rng.random() < 0.5 else None
        attrs = ops.Conv(1, (2 if transposed else 1,), (pad,), (1,), groups, transposed)
        y = self.add("conv", [x, w, bias], F32, (x.shape[0], out, size), attrs)
        if self.rng.random() < 0.6:
            scale, shift = self.const((out, 1)), self.const((out, 1))
            code = (In(MapOp.load, F32, (), 0), In(MapOp.load, F32, (), 1), In(MapOp.mul, F32, (0, 1)),
                    In(MapOp.load, F32, (), 2), In(MapOp.add, F32, (2, 3)))  # fmt: skip
            self.add("map", [y, scale, shift], F32, y.shape, ops.Map(code))

    def norm(self) -> None:
        x = self.pick(dtype=F32, least=1)
        if x is not None and isinstance(x.shape[-1], int) and x.shape[-1] > 1:
            self.add("norm", [x, self.const((x.shape[-1],)), None], F32, x.shape, ops.Norm(NormKind.layer, 1e-3))

    def softmax(self) -> None:
        x = self.pick(dtype=F32, least=1)
        if x is not None:
            self.add("softmax", [x], F32, x.shape, ops.Softmax(self.rng.randrange(x.type.rank)))

    def gather(self) -> None:
        x = self.pick(least=1)
        if x is not None and isinstance(x.shape[0], int) and x.shape[0] > 0:
            index = self.g.const(torch.tensor([0, -1, x.shape[0] - 1]))
            self.add("gather", [x, index], x.dtype, (3, *x.shape[1:]), ops.Gather(IndexKind.take, 0))

    def store(self) -> None:
        """An input as stored integers. (Of computed values rounding would show how passes changed them.)"""
        x = self.rng.choice([v for v in self.g.inputs if v.dtype == F32])
        q = self.rng.choice(QUANTS)
        attrs = ops.Requantize(y_zero=q.zero, scale=float(np.float32(1) / q.scale))
        self.add("requantize", [x], DType.i8, x.shape, attrs, q)

    def stored(self) -> Value | None:
        ok = [v for v in self.pool if v.dtype == DType.i8 and v.type.quant is not None]
        return self.rng.choice(ok) if ok else None

    def load(self) -> None:
        x = self.stored()
        if x is not None and x.type.quant is not None:
            q = x.type.quant
            self.add("requantize", [x], F32, x.shape, ops.Requantize(x_zero=q.zero, scale=float(q.scale)))

    def integer(self) -> None:
        """One operator on stored integers."""
        x, q = self.stored(), self.rng.choice(QUANTS)
        if x is None or x.type.quant is None:
            return
        zero, how = x.type.quant.zero, self.rng.randrange(4)
        if how == 0:
            m, s = fixed_point(float(x.type.quant.scale) / float(q.scale))
            self.add("requantize", [x], DType.i8, x.shape, ops.Requantize(zero, q.zero, m, s), q)
        elif how == 1:
            gen = torch.Generator().manual_seed(self.rng.getrandbits(40))
            table = self.g.const(torch.randint(-128, 128, (256,), generator=gen).to(torch.int8))
            self.add("lookup", [x, table], DType.i8, x.shape, ops.Lookup(), q)
        elif how == 2:
            attrs = ops.Binary(BinaryKind.add, zero, zero, q.zero, 3, 5, 3)
            self.add("binary", [x, x], DType.i8, x.shape, attrs, q)
        elif x.type.rank > 0 and 0 not in x.shape:
            attrs = ops.Qreduce(ReduceKind.mean, (0,), zero, q.zero, 3, 1)
            self.add("qreduce", [x], DType.i8, (1, *x.shape[1:]), attrs, q)

    def copy(self) -> None:
        x = self.pick()
        if x is not None:
            self.add("copy", [x], x.dtype, x.shape, ops.Copy())

    def branch(self) -> None:
        x, y = self.pick(dtype=F32), self.pick(dtype=F32)
        if x is None or y is None:
            return
        axes = tuple(range(y.type.rank))
        top = self.add("reduce", [y], F32, (1,) * y.type.rank, ops.Reduce(ReduceKind.sum, axes))
        code = (In(MapOp.load, F32, (), 0), In(MapOp.const_, F32, (), 0.3), In(MapOp.gt, DType.bool, (0, 1)))
        p = self.g.node("map", [top], [Type(DType.bool, top.shape)], ops.Map(code))[0]
        graphs = []
        for k in range(2):
            sub = Graph(f"branch{k}")
            a, b = sub.value(x.type), sub.value(y.type)
            sub.inputs = [a, b]
            c = sub.const(torch.tensor(1.5 + k))
            code = (In(MapOp.load, F32, (), 0), In(MapOp.load, F32, (), 1), In(MapOp.mul, F32, (0, 1)))
            z = sub.node("map", [a, c], [x.type], ops.Map(code))[0]
            if k:
                z = sub.node("map", [z], [x.type], ops.Map((In(MapOp.load, F32, (), 0), In(MapOp.tanh, F32, (0,)))))[0]
            sub.outputs = [z]
            graphs.append(sub)
        self.pool += self.g.node("if", [p, x, y], [x.type], ops.If(), graphs=graphs)

    def loop(self) -> None:
        x = self.pick(dtype=F32)
        if x is None:
            return
        i = self.add("map", [], DType.i64, (), ops.Map((In(MapOp.const_, DType.i64, (), 0),)))
        count = Type(DType.i64, ())
        cond, body = Graph("cond"), Graph("body")
        for sub in (cond, body):
            sub.inputs = [sub.value(count), sub.value(x.type)]
        code = (In(MapOp.load, DType.i64, (), 0), In(MapOp.const_, DType.i64, (), 3), In(MapOp.lt, DType.bool, (0, 1)))
        cond.outputs = cond.node("map", [cond.inputs[0]], [Type(DType.bool, ())], ops.Map(code))
        code = (In(MapOp.load, DType.i64, (), 0), In(MapOp.const_, DType.i64, (), 1), In(MapOp.add, DType.i64, (0, 1)))
        j = body.node("map", [body.inputs[0]], [count], ops.Map(code))[0]
        code = (
            In(MapOp.load, F32, (), 0),
            In(MapOp.const_, F32, (), 0.5),
            In(MapOp.mul, F32, (0, 1)),
            In(MapOp.sin, F32, (2,)),
        )
        body.outputs = [j, body.node("map", [body.inputs[1]], [x.type], ops.Map(code))[0]]
        self.pool.append(self.g.node("while", [i, x], [count, x.type], ops.While(2), graphs=[cond, body])[1])


def fits(v: Value, x: Value) -> bool:
    """True when v broadcasts to x."""
    tail = x.shape[x.type.rank - v.type.rank :] if v.type.rank <= x.type.rank else None
    return tail is not None and all(d == 1 or d == o for d, o in zip(v.shape, tail, strict=True))


STEPS = ["unary", "unary", "scalar", "scalar", "binary", "binary", "binary", "choose", "cast", "positions", "reshape", "reshape",
         "permute", "permute", "expand", "slice", "slice", "reduce", "concat", "pad", "matmul", "matmul", "conv", "conv", "norm",
         "softmax", "gather", "copy", "branch", "loop", "store", "load", "integer"]  # fmt: skip


def random_module(rng: Random, symbolic: bool = False, steps: int = 14) -> tuple[Module, list[torch.Tensor]]:
    """A module of one entry and inputs for it."""
    m = Maker(rng, symbolic)
    first: int | Dim = N if symbolic else m.n
    m.input((first, 4))
    m.input((2, 4, 3))
    m.input((first, 1), rng.choice([F32, DType.i32, DType.f16]))
    state = State("memory", Type(F32, (4,)), torch.arange(4.0))
    read = Value("memory", state.type, state=state)
    m.pool.append(read)
    for _ in range(steps):
        getattr(m, rng.choice(STEPS))()
        m.pool = [v for v in m.pool if isinstance(v.type.count, Dim) or v.type.count < 4000]
    new = [v for v in m.pool if v.dtype == F32 and v.shape == (4,)]
    m.g.writes = [(state, rng.choice(new))]
    made = [v for v in m.pool if v.node is not None]
    m.g.outputs = list(dict.fromkeys([made[-1], *rng.sample(made, min(3, len(made)))] if made else [m.pool[0]]))
    module = Module("random", {"main": m.g})
    name_values(module)
    return module, m.data


def copy_module(module: Module) -> Module:
    """A deep copy, through the text."""
    data = {}
    for g in module.entries.values():
        stack = [g]
        while stack:
            at = stack.pop()
            for v in at.values():
                if v.const is not None:
                    data[v.const.name] = v.const.data
                elif v.state is not None and v.state.init is not None:
                    data[v.state.name] = v.state.init
            data.update({s.name: s.init for s, _ in at.writes if s.init is not None})
            stack += [s for n in at.nodes for s in n.graphs]
    return parse_module(print_module(module), data | scale_arrays(module))


__all__ = ["Maker", "copy_module", "dtype_of", "random_module"]
