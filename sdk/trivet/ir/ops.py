"""The operators of the IR: attributes and operands of each. README.md in sdk/ gives their meaning.

Operators with a number in schema/ops.fbs (Op) are kernels; their attribute dataclasses have the fields of the fbs struct
(other fields are the emitter's). The rest exists only before storage is assigned: views, concat, control flow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trivet.fbs.structs import (
    Act,
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
    integers and bool: i64 (or the output's dtype).
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
    [.., H, L, S]) or None. H is a multiple of G. A row that nothing takes part in gives zeros.
    """

    scale: float
    causal: bool = False  # aligned to the top left, as torch's is_causal


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
    """Same bits, another dtype of the same size."""


@dataclass(frozen=True, slots=True)
class Concat:
    axis: int


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
    "attention": OpInfo(Attention, ("q", "k", "v", "mask?")),
    "gather": OpInfo(Gather, ("x", "index")),
    "scatter": OpInfo(Scatter, ("x", "index", "updates")),
    "pad": OpInfo(Pad, ("x",)),
    "sort": OpInfo(Sort, ("x",), (2, 2)),
    "rnn": OpInfo(Rnn, ("x", "w_ih", "w_hh", "b_ih?", "b_hh?", "h0?", "c0?", "w_proj?"), (2, 3)),
    "resize": OpInfo(Resize, ("x",)),
    "grid_sample": OpInfo(GridSample, ("x", "grid")),
    "nonzero": OpInfo(Nonzero, ("x",)),
    "item": OpInfo(Item, ("x",), (0, 0)),
    "permute": _view(Permute),
    "reshape": _view(Reshape),
    "expand": _view(Expand),
    "slice": _view(Slice),
    "window": _view(Window),
    "diagonal": _view(Diagonal),
    "bitcast": _view(Bitcast),
    "concat": OpInfo(Concat, ("*",), kernel=False),
    "if": OpInfo(If, ("*",), (0, 255), kernel=False),
    "while": OpInfo(While, ("*",), (0, 255), kernel=False),
}
