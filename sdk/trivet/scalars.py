"""Arithmetic on Python numbers that depend on sizes or tensors: SymInt, SymFloat, SymBool nodes of an fx graph.

An integer is a dimension and needs no node, unless it depends on a number that is none. A float, a bool, or an integer that
may be negative is a 0-d value (f64, bool, i64) computed by a map.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trivet.error import Error
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
    if isinstance(val, torch.SymInt) and not any(_is_value(importer, a) for a in node.args):
        return importer.table.dim(val)
    if isinstance(val, torch.SymInt) and (size := _size(importer, val)) is not None:
        return size
    if not _needed(node):
        return None
    kind = {"SymInt": "int", "SymFloat": "float", "SymBool": "bool"}[type(val).__name__]
    dtype = {"int": DType.i64, "float": DType.f64, "bool": DType.bool}[kind]
    e = Expr()
    v = importer.builder.expression(e, _formula(importer, e, node).cast(dtype), dtype, ())
    importer.numbers[v] = kind
    return v


def _is_value(importer: Importer, a: Any) -> bool:
    import torch

    return isinstance(a, torch.fx.Node) and (importer.env[a] is None or isinstance(importer.env[a], Value))


def _size(importer: Importer, val: torch.SymInt) -> int | Dim | None:
    """The integer as a dimension, where it is one."""
    try:
        size = importer.table.dim(val)
    except Error:
        return None
    known = importer.builder.graph.symbols
    return size if not isinstance(size, Dim) or size.symbols() <= known.keys() else None


def is_number_only(node: torch.fx.Node) -> bool:
    """True when an integer is used in arithmetic only: never as a size, an index or a condition of control flow."""
    import torch

    seen, todo = {node}, [node]
    while todo:
        at = todo.pop()
        for user in at.users:
            if user in seen or user.op == "output" or _is_assertion(user):
                continue
            if is_scalar(user.meta.get("val")):
                seen.add(user)
                todo.append(user)
            elif not isinstance(user.target, torch._ops.OpOverload) or not _takes_number(user, at):
                return False
    return True


def _takes_number(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """True when each argument of an operator that that is this node is a Scalar, not a size."""
    places = user.target._schema.arguments  # type: ignore[union-attr]
    given = [*zip((p.type for p in places), user.args, strict=False),
             *((p.type, user.kwargs[p.name]) for p in places if p.name in user.kwargs)]  # fmt: skip
    return all(node not in _nodes(a) or str(t) in ("number", "Optional[number]", "Tensor") for t, a in given)


def _nodes(a: Any) -> list[Any]:
    return [n for x in a for n in _nodes(x)] if isinstance(a, (list, tuple)) else [a]


def _is_assertion(node: torch.fx.Node) -> bool:
    from trivet.importer import ASSERTIONS

    return str(node.target) in ASSERTIONS


def _needed(node: torch.fx.Node) -> bool:
    """False when nothing but assertions reads the number, directly or through others."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if _is_assertion(user) or user in seen:
                continue
            if not is_scalar(user.meta.get("val")):
                return True
            seen.add(user)
            todo.append(user)
    return False


def _formula(importer: Importer, e: Expr, node: torch.fx.Node) -> Reg:
    """The node's number as a register, computed in f64 (integers: in i64, bools: in bool)."""
    name = _name(node.target)
    regs = [_register(importer, e, a) for a in node.args]
    if name in ("not", "not_"):
        return regs[0].cast(DType.bool).logical_not()
    if name in ("float", "to_float"):
        return regs[0].cast(DType.f64)
    if name == "ite":
        return regs[0].cast(DType.bool).select(regs[1], regs[2])
    if name in ("neg", "abs", "_abs") and regs[0].dtype != DType.f64:
        return regs[0].cast(DType.i64).do(_UNARY[name])
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
