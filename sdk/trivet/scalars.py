"""Arithmetic on Python numbers that depend on sizes or tensors: SymInt, SymFloat, SymBool nodes of an fx graph.

An integer is a dimension and needs no node. A float or bool is a 0-d value (f64, bool) computed by a map.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trivet.fbs.structs import DType, MapOp
from trivet.ir.dim import Dim
from trivet.ir.expr import Expr, Reg
from trivet.ir.graph import Value

if TYPE_CHECKING:
    import torch

    from trivet.importer import Importer

_UNARY = {"neg": MapOp.neg, "abs": MapOp.abs, "_abs": MapOp.abs, "floor": MapOp.floor, "ceil": MapOp.ceil,
          "trunc": MapOp.trunc, "sqrt": MapOp.sqrt, "exp": MapOp.exp, "log": MapOp.log, "log2": MapOp.log2,
          "sin": MapOp.sin, "cos": MapOp.cos, "tan": MapOp.tan, "tanh": MapOp.tanh, "sinh": MapOp.sinh,
          "cosh": MapOp.cosh, "asin": MapOp.asin, "acos": MapOp.acos, "atan": MapOp.atan}  # fmt: skip
_BINARY = {"add": MapOp.add, "sub": MapOp.sub, "mul": MapOp.mul, "truediv": MapOp.div, "floordiv": MapOp.floor_div,
           "mod": MapOp.mod, "pow": MapOp.pow, "max": MapOp.max, "min": MapOp.min, "eq": MapOp.eq, "ne": MapOp.ne,
           "lt": MapOp.lt, "le": MapOp.le, "gt": MapOp.gt, "ge": MapOp.ge, "and_": MapOp.and_, "or_": MapOp.or_,
           "xor": MapOp.xor_}  # fmt: skip


def is_scalar(val: Any) -> bool:
    """True for the meta value of a node that computes a Python number."""
    import torch

    return isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


def scalar(importer: Importer, node: torch.fx.Node, val: Any) -> Any:
    """What the node's number is in the IR: a number, a Dim or a 0-d value; None when only assertions read it."""
    import torch

    if isinstance(val, (bool, int, float)):
        return val
    if isinstance(val, torch.SymInt):
        return importer.table.dim(val)
    if not _needed(node):
        return None
    is_float = isinstance(val, torch.SymFloat)
    dtype = DType.f64 if is_float else DType.bool
    e = Expr()
    v = importer.builder.expression(e, _formula(importer, e, node), dtype, ())
    importer.numbers[v] = "float" if is_float else "bool"
    return v


def _needed(node: torch.fx.Node) -> bool:
    """False when nothing but assertions reads the number, directly or through others."""
    from trivet.importer import ASSERTIONS

    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if str(user.target) in ASSERTIONS or user in seen:
                continue
            if not is_scalar(user.meta.get("val")):
                return True
            seen.add(user)
            todo.append(user)
    return False


def _formula(importer: Importer, e: Expr, node: torch.fx.Node) -> Reg:
    """The node's number as a register, computed in f64 (bools: in bool)."""
    name = _name(node.target)
    regs = [_register(importer, e, a) for a in node.args]
    if name in ("not", "not_"):
        return regs[0].cast(DType.bool).logical_not()
    if name in ("float", "to_float"):
        return regs[0].cast(DType.f64)
    if name == "ite":
        return regs[0].cast(DType.bool).select(regs[1], regs[2])
    if name in _UNARY:
        return regs[0].cast(DType.f64).do(_UNARY[name])
    if name in _BINARY:
        a, b = regs
        if name in ("and_", "or_", "xor") and a.dtype == b.dtype == DType.bool:
            return a.do(_BINARY[name], b)
        wide = DType.f64 if DType.f64 in (a.dtype, b.dtype) or name == "truediv" else DType.i64
        return a.cast(wide).do(_BINARY[name], b.cast(wide))
    raise importer.builder.error("this arithmetic on a number that depends on the input is not supported",
                                 "compute it with tensor operators")  # fmt: skip


def _register(importer: Importer, e: Expr, a: Any) -> Reg:
    import torch

    x = importer.env[a] if isinstance(a, torch.fx.Node) else a
    if isinstance(x, Value):
        return e.load(x)
    if isinstance(x, bool):
        return e.const(x, DType.bool)
    if isinstance(x, float):
        return e.const(x, DType.f64)
    if isinstance(x, (int, Dim)):
        return e.dim(x, DType.i64)
    raise importer.builder.error("a number that only assertions were to read is read")


def _name(target: Any) -> str:
    """Names as in the tables: operator.truediv is "truediv", torch._sym_sqrt is "sqrt", torch.sym_max is "max"."""
    name = str(getattr(target, "__name__", target))
    return re.sub(r"^_?sym_", "", name)
