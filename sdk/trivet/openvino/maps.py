"""Map expressions as OpenVINO layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

from trivet.fbs.structs import DType, MapOp
from trivet.ir.graph import Node
from trivet.ir.ops import Instr
from trivet.ir.types import is_float
from trivet.openvino.net import NAMES, Net, Port

Size = Callable[[object], Port]  # an int or Dim as i64[1]

_UNARY = {
    MapOp.neg: "Negative", MapOp.abs: "Abs", MapOp.sign: "Sign", MapOp.floor: "Floor", MapOp.ceil: "Ceiling", MapOp.exp: "Exp",
    MapOp.log: "Log", MapOp.sqrt: "Sqrt", MapOp.sin: "Sin", MapOp.cos: "Cos", MapOp.tan: "Tan", MapOp.asin: "Asin",
    MapOp.acos: "Acos", MapOp.atan: "Atan", MapOp.sinh: "Sinh", MapOp.cosh: "Cosh", MapOp.tanh: "Tanh", MapOp.erf: "Erf",
    MapOp.sigmoid: "Sigmoid", MapOp.relu: "ReLU",
}  # fmt: skip
_LATER = {MapOp.asinh: ("Asinh", 4), MapOp.acosh: ("Acosh", 4), MapOp.atanh: ("Atanh", 4), MapOp.silu: ("Swish", 4),
          MapOp.hard_swish: ("HSwish", 4), MapOp.softplus: ("SoftPlus", 4), MapOp.mish: ("Mish", 4)}  # fmt: skip
_BINARY = {
    MapOp.add: "Add", MapOp.sub: "Subtract", MapOp.mul: "Multiply", MapOp.div: "Divide", MapOp.pow: "Power",
    MapOp.min: "Minimum", MapOp.max: "Maximum",
}  # fmt: skip
_COMPARE = {MapOp.eq: "Equal", MapOp.ne: "NotEqual", MapOp.lt: "Less", MapOp.le: "LessEqual", MapOp.gt: "Greater",
            MapOp.ge: "GreaterEqual"}  # fmt: skip
_LOGIC = {MapOp.and_: "LogicalAnd", MapOp.or_: "LogicalOr", MapOp.xor_: "LogicalXor"}
_MADE = {MapOp.rsqrt, MapOp.recip, MapOp.exp2, MapOp.log2, MapOp.log10, MapOp.trunc, MapOp.round, MapOp.gelu, MapOp.gelu_tanh,
         MapOp.elu, MapOp.hard_sigmoid, MapOp.select, MapOp.cast, MapOp.is_nan, MapOp.floor_div, MapOp.logical_not}  # fmt: skip
_FLOAT = (DType.f32, DType.f16)
_ROUNDING = {MapOp.min, MapOp.max, MapOp.neg, MapOp.abs}  # exact on i32


def refuses(node: Node) -> str:
    """Why a map is not taken, "" when it is."""
    code: Sequence[Instr] = node.attrs.code
    for i in code:
        name = i.op.name.rstrip("_")
        given = [code[a].dtype for a in i.args]
        if i.op in (MapOp.load, MapOp.const_, MapOp.cast, MapOp.dim, MapOp.select):
            if i.op == MapOp.cast and is_float(given[0]) and not is_float(i.dtype) and i.dtype != DType.bool:
                return f"a cast of {given[0].name} to {i.dtype.name} leaves numbers out of range open in OpenVINO"
            if i.op == MapOp.cast and (
                i.dtype in (DType.u8, DType.i8) or (i.dtype, given[0]) == (DType.i32, DType.i64)
            ):
                return f"a cast of {given[0].name} to {i.dtype.name} does not wrap in OpenVINO"
            continue
        if i.op in _COMPARE:
            continue
        if i.op in (MapOp.logical_not, *_LOGIC):
            if any(d != DType.bool for d in given):
                return f"{name} of {given[0].name} has no layer in OpenVINO"
            continue
        if i.dtype == DType.bool and i.op != MapOp.is_nan:
            return f"{name} of bool has no layer in OpenVINO"
        if i.op not in _UNARY and i.op not in _LATER and i.op not in _BINARY and i.op not in _MADE:
            return f"{name} has no layer in OpenVINO"
        if given[0] not in _FLOAT and not (given[0] == DType.i32 and i.op in _ROUNDING):
            return f"{name} of {given[0].name}: integers of OpenVINO's CPU device do not wrap as defined"
    return ""


def lower(net: Net, node: Node, inputs: Sequence[Port], size: Size) -> Port:
    """The value of the expression, broadcast to the output's shape."""
    out: list[Port] = []
    code: Sequence[Instr] = node.attrs.code
    shape = node.outputs[0].shape
    for i in code:
        if i.op == MapOp.load:
            out.append(inputs[i.value])
        elif i.op == MapOp.const_:
            out.append(net.const(i.value, i.dtype))
        elif i.op == MapOp.dim:
            out.append(_cast(net, net.add("Squeeze", [size(i.value), net.const([0])]), i.dtype))
        else:
            out.append(instr(net, i.op, i.dtype, [out[a] for a in i.args], [code[a].dtype for a in i.args]))
    loads = [v for v in node.inputs if v is not None]
    if any(v.shape == shape for v in loads):
        return out[-1]
    parts = [size(d) for d in shape]
    target = net.add("Concat", parts, axis=0) if parts else net.const(())
    return net.add("Broadcast", [out[-1], target], opset=3, mode="numpy")


def _cast(net: Net, x: Port, dtype: DType) -> Port:
    return net.add("Convert", [x], destination_type=NAMES[dtype])


def instr(net: Net, op: MapOp, dtype: DType, x: list[Port], given: Sequence[DType]) -> Port:
    """One instruction that reads registers."""

    def k(v: float) -> Port:
        return net.const(v, dtype)

    def f(kind: str, *a: Port, opset: int = 1) -> Port:
        return net.add(kind, list(a), opset=opset)

    if op in _UNARY:
        return f(_UNARY[op], *x)
    if op in _LATER:
        return f(_LATER[op][0], *x, opset=_LATER[op][1])
    if op in _BINARY:
        return f(_BINARY[op], *x)
    if op in _COMPARE:
        return f(_COMPARE[op], *x)
    if op in _LOGIC:
        return f(_LOGIC[op], *x)
    if op == MapOp.logical_not:
        return f("LogicalNot", *x)
    if op == MapOp.cast:
        if dtype == DType.bool and given[0] != DType.bool:
            return f("NotEqual", x[0], net.const(0, given[0]))
        return x[0] if dtype == given[0] else _cast(net, x[0], dtype)
    if op == MapOp.select:
        cond = x[0] if given[0] == DType.bool else f("NotEqual", x[0], net.const(0, given[0]))
        return f("Select", cond, x[1], x[2])
    if op == MapOp.is_nan:
        return f("IsNaN", x[0], opset=10)
    if op == MapOp.rsqrt:
        return f("Divide", k(1), f("Sqrt", *x))
    if op == MapOp.recip:
        return f("Divide", k(1), *x)
    if op == MapOp.exp2:
        return f("Power", k(2), *x)
    if op in (MapOp.log2, MapOp.log10):
        return f("Multiply", f("Log", *x), k(1 / log(2 if op == MapOp.log2 else 10)))
    if op == MapOp.trunc:
        return f("Multiply", f("Sign", *x), f("Floor", f("Abs", *x)))
    if op == MapOp.round:
        return net.add("Round", x, opset=5, mode="half_to_even")
    if op == MapOp.floor_div:
        return f("Floor", f("Divide", *x))
    if op in (MapOp.gelu, MapOp.gelu_tanh):
        return net.add("Gelu", x, opset=7, approximation_mode="ERF" if op == MapOp.gelu else "TANH")
    if op == MapOp.elu:
        return net.add("Elu", x, alpha=1.0)
    assert op == MapOp.hard_sigmoid
    return f("HardSigmoid", x[0], k(1 / 6), k(0.5))
