"""Generated cases of the operators on quantised values: the reference evaluator against the C kernels, bit for bit.

A Case is one node with data. `compare` evaluates it and runs it on every ISA of the machine, in random memory layouts, whole and
in tiles, and with packed weights where the operator packs them. Generators draw from a numpy Generator, so that a case is one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from heavy import isa_levels, laid_out, place

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import Act, DType, Op, RnnKind
from trivet.fixed_point import fixed_point
from trivet.ir import ops
from trivet.ir.evaluate import evaluate_node
from trivet.ir.graph import Node, Value
from trivet.ir.interop import dtype_of, torch_dtype
from trivet.ir.types import Type
from trivet.targets.cpu_part import attribute_row
from trivet.writer import attrs_struct, records

Rng = np.random.Generator
LIMITS = {torch.int8: (-128, 127), torch.int16: (-(1 << 15), (1 << 15) - 1), torch.int32: (-(1 << 31), (1 << 31) - 1)}
LAYOUTS = ("dense", "dense", "last", "gaps", "flip")


@dataclass
class Case:
    """One node. outs: dtype and shape of each output. near: for results whose sums have no order, the sum of the sizes of
    what is added, which roundings are relative to; None: exact, but for activations that are no clamp. dense: operands that
    take no strides.
    """

    op: str
    attrs: Any
    inputs: Sequence[torch.Tensor | None]
    outs: Sequence[tuple[torch.dtype, tuple[int, ...]]]
    near: torch.Tensor | None = None
    dense: Sequence[int] = ()
    pack: Sequence[int] = field(default=())  # operands that the operator can read packed


def node_of(case: Case) -> Node:
    """The case as a node of the IR."""
    ins = [None if x is None else Value(f"x{i}", Type(dtype_of(x), tuple(x.shape))) for i, x in enumerate(case.inputs)]
    outs = [Value(f"y{i}", Type(dtype_of(d), tuple(s))) for i, (d, s) in enumerate(case.outs)]
    node = Node(case.op, list(ins), outs, case.attrs)
    for i, v in enumerate(outs):
        v.node, v.index = node, i
    return node


def struct_of(op: str, attrs: Any) -> Any:
    return records(attrs_struct(Op[op]), [attribute_row(attrs)])


def compare(case: Case, rng: Rng) -> None:
    """Raises AssertionError with the case when a kernel gives something else."""
    want = evaluate_node(node_of(case), list(case.inputs), {})
    forms = [(case.attrs, list(case.inputs))]
    packed = _packed(case)
    if packed is not None:
        forms.append(packed)
    for attrs, inputs in forms:
        for isa in isa_levels(int(Op[case.op])):
            try:
                got = run(case, attrs, inputs, isa, rng)
            except Error as e:
                raise AssertionError(f"{case.op} on {isa}: {e}\n{attrs}\n{_operands(case)}") from None
            for g, w in zip(got, want, strict=True):
                _same(case, g, w, isa, attrs)


def run(case: Case, attrs: Any, inputs: list[Any], isa: str, rng: Rng) -> list[torch.Tensor]:
    """The C kernel's results."""
    ins = [x if x is None or i in case.dense or not isinstance(x, torch.Tensor) else place(x, pick(rng, LAYOUTS))
           for i, x in enumerate(inputs)]  # fmt: skip
    outs = [laid_out(shape, dtype, pick(rng, LAYOUTS)) for dtype, shape in case.outs]
    struct = struct_of(case.op, attrs)
    tmp = [np.full(n, 0xAA, np.uint8) for n in scratch(case, attrs, struct)]
    native.run_op(int(Op[case.op]), ins, outs, struct, tmp=tmp, tiles=pick(rng, (0, 0, 1, 3, 7)), isa=isa)
    return outs


def scratch(case: Case, attrs: Any, struct: Any) -> list[int]:
    """Bytes of scratch, as the planner asks for them."""
    from trivet.targets.cpu import Cpu

    node = node_of(case)
    node.attrs = attrs
    return [int(str(n)) for n in Cpu().scratch(node)]


def _packed(case: Case) -> tuple[Any, list[Any]] | None:
    """Attributes and operands with the weights packed; None where the operator does not pack them."""
    if not case.pack:
        return None
    attrs = replace(case.attrs, packed=True)
    if case.op == "qconv":
        attrs = replace(attrs, kernel=tuple(case.inputs[1].shape[2:]))  # type: ignore[union-attr]
    struct, inputs = struct_of(case.op, attrs), list(case.inputs)
    for i in case.pack:
        w = inputs[i]
        assert w is not None
        if not native.pack_bytes(int(Op[case.op]), struct, int(dtype_of(w)), tuple(w.shape)):
            return None
        inputs[i] = torch.from_numpy(native.pack(int(Op[case.op]), struct, w).copy())
    return attrs, inputs


def _same(case: Case, got: torch.Tensor, want: torch.Tensor, isa: str, attrs: Any) -> None:
    if got.dtype.is_floating_point and case.near is not None:
        ok = (got.double() - want.double()).abs() <= case.near * 2e-6 + 1e-30
        ok |= got == want
    elif getattr(attrs, "act", Act.none) not in (Act.none, Act.clamp):
        ok = torch.isclose(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    elif got.dtype.is_floating_point:
        ok = (got.contiguous().view(torch.int32) == want.contiguous().view(torch.int32)) | (got.isnan() & want.isnan())
    else:
        ok = got == want
    if bool(ok.all()):
        return
    at = tuple(int(i) for i in (~ok).nonzero()[0])
    raise AssertionError(f"{case.op} on {isa}: at {at} the kernel gives {got[at].item()!r}, the reference {want[at].item()!r} "
                         f"({int((~ok).sum())} of {ok.numel()} differ)\n{attrs}\n{_operands(case)}")  # fmt: skip


def _operands(case: Case) -> str:
    return "\n".join("none" if x is None else f"{x.dtype} {list(x.shape)} {x}" for x in case.inputs)


# ---- numbers ------------------------------------------------------------------------------------------------------------
def pick(rng: Rng, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def chance(rng: Rng, p: float) -> bool:
    return bool(rng.random() < p)


def ints(
    rng: Rng, shape: Sequence[int], dtype: torch.dtype, lo: int | None = None, hi: int | None = None
) -> torch.Tensor:
    """Stored numbers: all over the range, only its ends, one number, or small ones."""
    a, b = LIMITS.get(dtype, (0, 255))
    lo, hi = a if lo is None else lo, b if hi is None else hi
    kind = rng.random()
    shape = tuple(shape)
    if kind < 0.15:
        x = np.where(rng.random(shape) < 0.5, lo, hi)
    elif kind < 0.25:
        x = np.full(shape, pick(rng, (lo, hi, max(lo, 0))))
    elif kind < 0.4:
        x = rng.integers(max(lo, -3), min(hi, 3), shape, endpoint=True)
    else:
        x = rng.integers(lo, hi, shape, endpoint=True)
    return torch.from_numpy(np.asarray(x).astype(np.int64)).to(dtype)


def floats(rng: Rng, shape: Sequence[int], special: float = 0.2) -> torch.Tensor:
    """Real numbers of any size; some are zeros, tiny, huge, infinite or no number."""
    shape = tuple(shape)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)
    if chance(rng, 0.2):
        x = np.round(x * 2) / 2  # ties
    y = torch.from_numpy(np.asarray(x).astype(np.float32))
    if y.numel() and chance(rng, special):
        odd = np.array([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan, 0.5, 1.5, -2.5], np.float32)
        where = torch.from_numpy(np.asarray(rng.random(shape) < 0.3))
        y = torch.where(where, torch.from_numpy(np.asarray(rng.choice(odd, shape))), y)
    return y


def scale_of(rng: Rng) -> float:
    """A scale: a usual one, a power of two (which makes ties), or an extreme one."""
    s = pick(rng, (rng.random() + 1e-3, 2.0 ** int(rng.integers(-20, 8)), 10.0 ** rng.uniform(-38, 37), 1.0))
    return float(np.float32(s))


def multiplier(rng: Rng, bits: int = 31, most_shift: int = 62, fits: float = 0.0) -> tuple[int, int]:
    """Multiplier and shift: one that brings numbers as large as `fits` into the range of i8, one of a usual size, an extreme one."""
    kind = rng.random()
    if fits > 0 and kind < 0.7:
        return fixed_point(min(100 / fits * 10.0 ** rng.uniform(-1, 0.5), 2.0 ** (bits - 1)), bits, most_shift)
    if kind < 0.85:
        return int(rng.integers(1 << (bits - 1), 1 << bits)), int(rng.integers(bits - 10, min(bits + 14, most_shift)))
    m = pick(rng, (0, 1, 2, 3, 1 << (bits - 1), (1 << bits) - 1, int(rng.integers(1 << bits))))
    return m, pick(rng, (0, 1, 2, 15, 31, most_shift - 1, most_shift, int(rng.integers(most_shift + 1))))


def multipliers(rng: Rng, n: int, fits: float = 0.0) -> torch.Tensor:
    """i32 [2, n]."""
    rows = [multiplier(rng, fits=fits) for _ in range(n)]
    return torch.tensor(rows, dtype=torch.int32).reshape(n, 2).t().contiguous()


def zero_of(rng: Rng, dtype: torch.dtype) -> int:
    """A zero point: in the middle, at an end, anywhere."""
    lo, hi = LIMITS[dtype]
    return pick(rng, (0, 0, lo, hi, int(rng.integers(lo, hi + 1))))


def bounds_of(rng: Rng, dtype: torch.dtype) -> dict[str, int]:
    """lo and hi: the dtype's, or narrower."""
    lo, hi = LIMITS[dtype]
    if chance(rng, 0.5):
        a, b = sorted(int(t) for t in rng.integers(lo, hi + 1, 2))
        lo, hi = pick(rng, ((a, hi), (lo, b), (a, b), (a, a)))
    return {"lo": lo, "hi": hi}


def stored(rng: Rng) -> torch.dtype:
    return pick(rng, (torch.int8, torch.int8, torch.int16))


def size(rng: Rng, *options: int) -> int:
    return pick(rng, options or (0, 1, 1, 2, 3, 5, 8, 17))


def shape_of(rng: Rng, most: int = 4) -> tuple[int, ...]:
    """Any rank; sometimes one long row."""
    if chance(rng, 0.1):
        return (int(rng.integers(500, 1600)),)
    return tuple(
        size(rng, 0, 1, 2, 3, 4, 6) if chance(rng, 0.15) else size(rng, 1, 2, 3, 5)
        for _ in range(rng.integers(most + 1))
    )


def broadcasts(rng: Rng, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that broadcasts to shape."""
    return tuple(
        1 if chance(rng, 0.25) else n for n in shape[int(rng.integers(len(shape) + 1)) if chance(rng, 0.3) else 0 :]
    )


RNN_GATES = {RnnKind.lstm: 4, RnnKind.gru: 3, RnnKind.tanh: 1}
__all__ = ["Case", "DType", "Rng", "RNN_GATES", "bounds_of", "broadcasts", "chance", "compare", "floats", "ints", "multiplier",
           "multipliers", "ops", "pick", "scale_of", "shape_of", "size", "stored", "torch_dtype", "zero_of"]  # fmt: skip
