"""The operators of the IR: attributes and operands of each. README.md in sdk/ gives their meaning.

Operators with a number in schema/ops.fbs (Op) are kernels; their attribute dataclasses have the fields of the fbs struct
(other fields are the emitter's). The rest exists only before storage is assigned: views, concat, control flow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trivet.fbs.structs import (
    Act,
    BinaryKind,
    DType,
    GridPad,
    IndexKind,
    MapOp,
    NormKind,
    PadMode,
    PoolKind,
    ReduceKind,
    ResizeMode,
    RnnKind,
    ScanKind,
    ScatterReduce,
)
from trivet.ir.dim import Dim


# ---- kernels ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Instr:
    """One step of a map expression in SSA form: args are positions of earlier instructions. load: value is the input's
    position; const: a number; dim: an int or Dim; iota: the output axis.
    """

    op: MapOp
    dtype: DType
    args: tuple[int, ...] = ()
    value: Any = None


@dataclass(frozen=True, slots=True)
class Map:
    """y = f(inputs), inputs broadcast to the output's shape; the last instruction is the result."""

    code: tuple[Instr, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    pass


@dataclass(frozen=True, slots=True)
class Reduce:
    """Output has size 1 along axes. argmax, argmin: i64; with all axes: position in the flattened input. sum and prod of
    integers and bool: i64 (or the output's dtype). sum, prod, mean and var of f16 and bf16: that dtype or f32.
    """

    kind: ReduceKind
    axes: tuple[int, ...]
    correction: float = 1.0  # var


@dataclass(frozen=True, slots=True)
class Scan:
    kind: ScanKind
    axis: int
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class Matmul:
    """inputs a[.., M, K], b[.., K, N] (or packed), bias (broadcast to the output) or None, residual or None.
    y = act(a @ b + bias + residual).
    """

    packed: bool = False
    act: Act = Act.none
    lo: float = 0.0
    hi: float = 0.0


@dataclass(frozen=True, slots=True)
class Conv:
    """inputs x[N, C, spatial..], w[O, C/groups, k..] (transposed: [C, O/groups, k..]), bias[O] or None, residual or None.
    pad_hi and output_padding show in the output's shape only.
    """

    nd: int
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    packed: bool = False
    act: Act = Act.none
    lo: float = 0.0
    hi: float = 0.0
    kernel: tuple[int, ...] = ()  # w's spatial sizes; must be set when packed
    winograd: int = 0  # 2 or 4: when packed, w is transformed for tiles of so many outputs a side; 0: it is in panels


@dataclass(frozen=True, slots=True)
class Pool:
    """x[N, C, spatial..] -> y, or y and indices (i64, flat position in the input plane; max only)."""

    kind: PoolKind
    nd: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    pad: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    count_include_pad: bool = True
    divisor: int = 0
    adaptive: bool = False
    ceil_mode: bool = False  # for shape inference; the kernel sees the output's shape


@dataclass(frozen=True, slots=True)
class Norm:
    """inputs x, weight or None, bias or None. layer, rms: over the last `axes` axes; group: x[N, C, ..] in `groups`."""

    kind: NormKind
    eps: float
    axes: int = 1
    groups: int = 1


@dataclass(frozen=True, slots=True)
class Softmax:
    axis: int
    log: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """inputs q[.., H, L, D], k[.., G, S, D], v[.., G, S, E], mask (bool: True takes part; float: added; broadcastable to
    [.., H, L, S]) or None, more_k[.., G, R, D] and more_v[.., G, R, E] or None: keys and values that follow those of k and v
    (the mask then has S + R columns). H is a multiple of G. A row that nothing takes part in gives zeros, with nan_rows NaN.
    """

    scale: float
    causal: bool = False  # aligned to the top left, as torch's is_causal
    nan_rows: bool = False


@dataclass(frozen=True, slots=True)
class Gather:
    """take: y[.., i.., ..] = x with axis replaced by the index's shape. elements: torch.gather. Negative indices count from
    the end; one out of range is an error at run time.
    """

    kind: IndexKind
    axis: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """inputs x, index, updates. take: x with rows index of axis replaced by (or combined with) updates, whose shape is x's with axis
    replaced by the index's shape. elements: torch.scatter. Output has x's shape and may share its storage.
    """

    kind: IndexKind
    axis: int
    reduce: ScatterReduce = ScatterReduce.none
    include_self: bool = True


@dataclass(frozen=True, slots=True)
class Pad:
    """lo, hi per axis; negative crops (constant mode only)."""

    mode: PadMode
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Sort:
    """x -> values, indices (i64). Stable; NaN is the largest. Top-k when the outputs are shorter along axis."""

    axis: int
    descending: bool = False
    k: int | Dim | None = None


@dataclass(frozen=True, slots=True)
class Rnn:
    """One layer, one direction. inputs x[T, N, I], w_ih[G*H, I], w_hh[G*H, H or P], b_ih or None, b_hh or None, h0[N, H or P]
    or None, c0[N, H] or None (lstm), w_proj[P, H] or None. outputs y[T, N, H or P], h[N, H or P], and c[N, H] (lstm).
    Gate order as torch's: lstm i f g o, gru r z n. packed: w_ih, w_hh and w_proj are (each by trvk_pack).
    """

    kind: RnnKind
    reverse: bool = False
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Resize:
    """x[N, C, spatial..]. scale: output/input where the caller gave it, else 0 (from the sizes). Cubic: coefficient a."""

    mode: ResizeMode
    nd: int
    align_corners: bool = False
    scale: tuple[float, ...] = ()
    cubic_a: float = -0.75


@dataclass(frozen=True, slots=True)
class GridSample:
    """x[N, C, H, W], grid[N, h, w, 2]."""

    mode: ResizeMode
    pad: GridPad
    align_corners: bool = False


@dataclass(frozen=True, slots=True)
class Nonzero:
    """x -> i64 [symbol, rank]; the symbol is data-dependent."""

    symbol: str


@dataclass(frozen=True, slots=True)
class Item:
    """A scalar integer tensor becomes the symbol's value. No output."""

    symbol: str


# ---- quantised: arithmetic as the comments of schema/ops.fbs say. Numbers in attributes are explicit; Type.quant of the values
# says the same for people and passes.
@dataclass(frozen=True, slots=True)
class Requantize:
    """f32 -> i8 or i16; i8 or i16 -> f32; i8 or i16 -> i8 or i16. One scale for all elements.
    Only before fold_qdq: from or to f32 with no attribute given, the stored value's Type.quant, of any kind, says it all.
    Then real = scale * (stored - zero) + offset, and stored = clamp(zero + half_even((real - offset) * (1 / scale))), each
    operation rounded to f32.
    """

    x_zero: int = 0
    y_zero: int = 0
    multiplier: int = 0
    shift: int = 0
    scale: float = 1.0
    lo: int = -128
    hi: int = 127


@dataclass(frozen=True, slots=True)
class Rowquant:
    """x (f32) as qmatmul's dynamic 1 (affine: 2) reads its rows, the last axis: quantised and made real again. Only before fold_qdq."""

    affine: bool = False


@dataclass(frozen=True, slots=True)
class Binary:
    """a, b (i8 or i16, broadcast to the output) -> y of their dtype."""

    kind: BinaryKind
    a_zero: int
    b_zero: int
    y_zero: int
    a_multiplier: int
    b_multiplier: int
    shift: int
    lo: int = -128
    hi: int = 127


@dataclass(frozen=True, slots=True)
class Lookup:
    """x (i8 or u8), table[256] -> y of the table's dtype: table[x + 128] for i8, table[x] for u8."""


@dataclass(frozen=True, slots=True)
class Qconv:
    """inputs x (i8, i16, f32), w i8, scale, bias or None; shapes as of conv.
    x stored: acc = sum((x - x_zero) * w) + bias (i32[O]). y stored: scale is i32[2, O], rows multiplier and shift; y =
    clamp(y_zero + rescale(acc, ..)). y f32: act(f32(acc) * scale[o]), scale f32[O].
    x f32: y = act(sum(x * w) * scale[o] + bias[o]), all f32.
    """

    nd: int
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    packed: int = 0  # 1: in panels, 2: by rows (hal/cpu/README.md)
    act: Act = Act.none
    lo: float = 0.0
    hi: float = 0.0
    kernel: tuple[int, ...] = ()
    x_zero: int = 0
    y_zero: int = 0


@dataclass(frozen=True, slots=True)
class Qmatmul:
    """inputs a[.., M, K] (i8, i16, f32), b[.., K, N] (i8; u8 with values 0..15 where bits is 4; or packed), scale, bias[N] or
    None, offset or None. See schema/ops.fbs for the arithmetic of the forms.
    """

    packed: int = 0  # 1: in panels, 2: by rows (hal/cpu/README.md)
    bits: int = 8
    act: Act = Act.none
    dynamic: int = 0
    group: int = 0
    a_zero: int = 0
    b_zero: int = 0
    y_zero: int = 0
    lo: float = 0.0
    hi: float = 0.0


@dataclass(frozen=True, slots=True)
class Qgather:
    """inputs table[V, D] (i8, u8 0..15, or packed as b of qmatmul with N = V, K = D), index (i64 or i32, any shape), scale, offset
    or None -> y[index shape, D] f32.
    """

    packed: bool = False
    bits: int = 8
    group: int = 0
    zero: int = 0


@dataclass(frozen=True, slots=True)
class Qpool:
    """Average pooling of x[N, C, spatial..] (i8, i16)."""

    nd: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    pad: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    count_include_pad: bool = True
    divisor: int = 0
    adaptive: bool = False
    ceil_mode: bool = False
    x_zero: int = 0
    y_zero: int = 0
    multiplier: int = 0
    shift: int = 0
    lo: int = -128
    hi: int = 127


@dataclass(frozen=True, slots=True)
class Qreduce:
    """mean or sum of x (i8, i16); the output has size 1 along axes."""

    kind: ReduceKind
    axes: tuple[int, ...]
    x_zero: int = 0
    y_zero: int = 0
    multiplier: int = 0
    shift: int = 0
    lo: int = -128
    hi: int = 127


@dataclass(frozen=True, slots=True)
class Qsoftmax:
    """x i8, table i32[256] -> y i8 with scale 1/256."""

    axis: int
    y_zero: int = -128
    lo: int = -128
    hi: int = 127


@dataclass(frozen=True, slots=True)
class Qnorm:
    """x i8, weight i32 or None, bias i32 or None (both of the shape of the last `axes` axes) -> y i8. layer and rms."""

    kind: NormKind
    axes: int = 1
    x_zero: int = 0
    y_zero: int = 0
    multiplier: int = 0
    shift: int = 0
    lo: int = -128
    hi: int = 127
    eps: int = 0


@dataclass(frozen=True, slots=True)
class Qresize:
    """Linear, x[N, C, spatial..] (i8, i16) -> the same scale."""

    nd: int
    align_corners: bool = False


@dataclass(frozen=True, slots=True)
class Qrnn:
    """inputs x[T, N, I] i8, w_ih[G*H, I] i8, w_hh[G*H, H] i8, scale i32[4, G*H], table i16[2, 513], b_ih i32 or None, b_hh i32
    or None, h0[N, H] i16 or None, c0[N, H] i16 or None -> y[T, N, H] i8 (scale 2^-7), h[N, H] i16 (2^-15), c[N, H] i16 (2^-11,
    lstm). lstm, gru, tanh.
    """

    kind: RnnKind
    reverse: bool = False
    packed: bool = False
    x_zero: int = 0


# ---- views: no work at run time once storage is assigned (a copy node is put in where it cannot be a view) --------------
@dataclass(frozen=True, slots=True)
class Permute:
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """To the output type's shape, same number of elements, row-major meaning."""


@dataclass(frozen=True, slots=True)
class Expand:
    """Broadcast (numpy rules) to the output type's shape."""


@dataclass(frozen=True, slots=True)
class Slice:
    """start .. start + step * (size - 1) along axis; the output's shape gives the size. step may be negative (flip)."""

    axis: int
    start: int | Dim = 0
    step: int = 1


@dataclass(frozen=True, slots=True)
class Window:
    """torch.Tensor.unfold: a new last axis of length size, moved by step along axis."""

    axis: int
    size: int
    step: int


@dataclass(frozen=True, slots=True)
class Diagonal:
    """torch.diagonal: axes a and b go, the diagonal comes last."""

    offset: int
    a: int
    b: int


@dataclass(frozen=True, slots=True)
class Bitcast:
    """Same bits, another dtype of the same size, or other real numbers that they stand for."""


@dataclass(frozen=True, slots=True)
class Concat:
    axis: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between memories: a step of its own. memory: as Value.memory, of the result. Input and output are laid out alike,
    without gaps.
    """

    memory: str


@dataclass(frozen=True, slots=True)
class If:
    """inputs[0]: one bool; the others feed both graphs' inputs. graphs: then, else."""


@dataclass(frozen=True, slots=True)
class While:
    """inputs: `carried` values, then values that stay. graphs: cond (one bool), body (new carried). outputs: carried."""

    carried: int


@dataclass(frozen=True, slots=True)
class OpInfo:
    """attrs: dataclass; inputs: names, a trailing "?" marks optional ones, a single "*" any number; outputs: how many
    (min, max).
    """

    attrs: type
    inputs: tuple[str, ...]
    outputs: tuple[int, int] = (1, 1)
    kernel: bool = True
    view: bool = field(default=False)


def _view(attrs: type) -> OpInfo:
    return OpInfo(attrs, ("x",), kernel=False, view=True)


OPS: dict[str, OpInfo] = {
    "map": OpInfo(Map, ("*",)),
    "copy": OpInfo(Copy, ("x",)),
    "reduce": OpInfo(Reduce, ("x",)),
    "scan": OpInfo(Scan, ("x",)),
    "matmul": OpInfo(Matmul, ("a", "b", "bias?", "residual?")),
    "conv": OpInfo(Conv, ("x", "w", "bias?", "residual?")),
    "pool": OpInfo(Pool, ("x",), (1, 2)),
    "norm": OpInfo(Norm, ("x", "weight?", "bias?")),
    "softmax": OpInfo(Softmax, ("x",)),
    "attention": OpInfo(Attention, ("q", "k", "v", "mask?", "more_k?", "more_v?")),
    "gather": OpInfo(Gather, ("x", "index")),
    "scatter": OpInfo(Scatter, ("x", "index", "updates")),
    "pad": OpInfo(Pad, ("x",)),
    "sort": OpInfo(Sort, ("x",), (2, 2)),
    "rnn": OpInfo(Rnn, ("x", "w_ih", "w_hh", "b_ih?", "b_hh?", "h0?", "c0?", "w_proj?"), (2, 3)),
    "resize": OpInfo(Resize, ("x",)),
    "grid_sample": OpInfo(GridSample, ("x", "grid")),
    "nonzero": OpInfo(Nonzero, ("x",)),
    "item": OpInfo(Item, ("x",), (0, 0)),
    "requantize": OpInfo(Requantize, ("x",)),
    "rowquant": OpInfo(Rowquant, ("x",), kernel=False),
    "binary": OpInfo(Binary, ("a", "b")),
    "lookup": OpInfo(Lookup, ("x", "table")),
    "qconv": OpInfo(Qconv, ("x", "w", "scale", "bias?")),
    "qmatmul": OpInfo(Qmatmul, ("a", "b", "scale", "bias?", "offset?")),
    "qgather": OpInfo(Qgather, ("table", "index", "scale", "offset?")),
    "qpool": OpInfo(Qpool, ("x",)),
    "qreduce": OpInfo(Qreduce, ("x",)),
    "qsoftmax": OpInfo(Qsoftmax, ("x", "table")),
    "qnorm": OpInfo(Qnorm, ("x", "weight?", "bias?")),
    "qresize": OpInfo(Qresize, ("x",)),
    "qrnn": OpInfo(Qrnn, ("x", "w_ih", "w_hh", "scale", "table", "b_ih?", "b_hh?", "h0?", "c0?"), (2, 3)),
    "permute": _view(Permute),
    "reshape": _view(Reshape),
    "expand": _view(Expand),
    "slice": _view(Slice),
    "window": _view(Window),
    "diagonal": _view(Diagonal),
    "bitcast": _view(Bitcast),
    "concat": OpInfo(Concat, ("*",), kernel=False),
    "transfer": OpInfo(Transfer, ("x",), kernel=False),
    "if": OpInfo(If, ("*",), (0, 255), kernel=False),
    "while": OpInfo(While, ("*",), (0, 255), kernel=False),
}
