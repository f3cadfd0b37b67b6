"""What the kernels of the IR mean, in torch: one function per op, (node, inputs, output shapes, dims) -> outputs.

Floats narrower than f32 are computed in f32 and rounded once. See reference_map.py for map, evaluate.py for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from trivet.error import Error
from trivet.fbs.structs import (
    Act,
    GridPad,
    IndexKind,
    NormKind,
    PadMode,
    PoolKind,
    ReduceKind,
    ResizeMode,
    RnnKind,
    ScanKind,
    ScatterReduce,
)
from trivet.ir import ops
from trivet.ir.interop import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from trivet.ir.graph import Node

Shapes = Sequence[tuple[int, ...]]


def widen(x: Tensor) -> Tensor:
    """f16 and bf16 to f32; others as they are."""
    return x.float() if x.dtype.itemsize == 2 and x.is_floating_point() else x


def _out(node: Node, i: int = 0) -> Any:
    return torch_dtype(node.outputs[i].dtype)


def activate(x: Tensor, a: ops.Matmul | ops.Conv | ops.Qmatmul | ops.Qconv) -> Tensor:
    """The activation of an epilogue."""
    import torch
    from torch.nn import functional as fn

    if a.act == Act.clamp:
        return torch.clamp(x, a.lo, a.hi)
    if a.act == Act.leaky:
        return torch.where(x > 0, x, x * a.lo)
    if a.act == Act.elu:
        return torch.where(x > 0, x, torch.expm1(x) * a.lo)
    if a.act == Act.gelu_tanh:
        return fn.gelu(x, approximate="tanh")
    plain: dict[Act, Callable[[Tensor], Tensor]] = {
        Act.sigmoid: torch.sigmoid, Act.tanh: torch.tanh, Act.gelu: fn.gelu, Act.silu: fn.silu,
        Act.hard_swish: fn.hardswish, Act.hard_sigmoid: fn.hardsigmoid}  # fmt: skip
    return plain[a.act](x) if a.act != Act.none else x


def _copy(node: Node, x: list[Any], shapes: Shapes) -> list[Tensor]:
    return [x[0].clone()]


def _reduce(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Reduce = node.attrs
    x: Tensor = inputs[0]
    kept = [i for i in range(x.dim()) if i not in a.axes]
    # the reduced axes become one axis at the end: a reduction over no axes is one over an axis of size 1
    size = prod(x.shape[i] for i in a.axes)
    x = x.permute((*kept, *a.axes)).reshape([x.shape[i] for i in kept] + [size])
    out = _out(node)
    k = a.kind
    if k in (ReduceKind.sum, ReduceKind.prod):
        acc = widen(torch.empty(0, dtype=out)).dtype
        y = x.to(acc).sum(-1) if k == ReduceKind.sum else x.to(acc).prod(-1)
    elif k == ReduceKind.mean:
        y = widen(x).mean(-1)
    elif k == ReduceKind.var:
        y = widen(x).var(-1, correction=a.correction)
    elif k == ReduceKind.any:
        y = (x != 0).any(-1)
    elif k == ReduceKind.all:
        y = (x != 0).all(-1)
    else:
        names = {
            ReduceKind.max: "amax",
            ReduceKind.min: "amin",
            ReduceKind.argmax: "argmax",
            ReduceKind.argmin: "argmin",
        }
        if x.dtype == torch.bool:
            x = x.to(torch.uint8)
        y = getattr(x, names[k])(-1)
    return [y.to(out).reshape(shapes[0])]


def _scan(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Scan = node.attrs
    out = _out(node)
    x = widen(inputs[0].to(out))
    if a.kind in (ScanKind.sum, ScanKind.prod):
        y = x.cumsum(a.axis, dtype=x.dtype) if a.kind == ScanKind.sum else x.cumprod(a.axis, dtype=x.dtype)
        start: float = float(a.kind == ScanKind.prod)
    else:
        y = (x.cummax(a.axis) if a.kind == ScanKind.max else x.cummin(a.axis)).values
        info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        start = info.min if a.kind == ScanKind.max else info.max
        if x.is_floating_point():
            start = float("-inf") if a.kind == ScanKind.max else float("inf")
    if a.exclusive and y.shape[a.axis]:
        first = torch.full_like(y.narrow(a.axis, 0, 1), start)
        y = torch.cat([first, y.narrow(a.axis, 0, y.shape[a.axis] - 1)], a.axis)
    return [y.to(out)]


def _epilogue(node: Node, y: Tensor, bias: Any, residual: Any) -> list[Tensor]:
    if bias is not None:
        y = y + widen(bias)
    if residual is not None:
        y = y + widen(residual)
    return [activate(y, node.attrs).to(_out(node))]


def _matmul(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a, b, bias, residual = (*inputs, None, None)[:4]
    if node.attrs.packed:
        raise Error("packed weights have no reference: evaluate before pack_weights", node=str(node.loc))
    y = widen(a) @ widen(b)
    return _epilogue(node, y, bias, residual)


def _conv(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a: ops.Conv = node.attrs
    x, w, bias, residual = (*inputs, None, None)[:4]
    if a.packed:
        raise Error("packed weights have no reference: evaluate before pack_weights", node=str(node.loc))
    x, w = widen(x), widen(w)
    integers = None if x.is_floating_point() else x.dtype
    if integers:
        x, w = x.double(), w.double()
    y = conv_sum(x, w, a, shapes[0])
    if integers:
        y = y.to(integers)
    return _epilogue(node, y, None if bias is None else bias.reshape([-1] + [1] * a.nd), residual)


def conv_sum(x: Tensor, w: Tensor, a: ops.Conv | ops.Qconv, shape: Sequence[int]) -> Tensor:
    """The sums of products of a convolution whose output has this shape."""
    import torch
    from torch.nn import functional as fn

    want = shape[2:]
    if 0 in shape:
        return x.new_zeros(tuple(shape))
    if a.transposed:
        f = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)[a.nd - 1]
        full = f(x, w, None, a.stride, 0, 0, a.groups, a.dilation)
        # padding crops at the low side; the high side is cropped, or filled with the zeros of output_padding
        return fn.pad(
            full, _pads([-p for p in a.pad], [o + p - s for o, p, s in zip(want, a.pad, full.shape[2:], strict=True)])
        )
    span = [d * (k - 1) + 1 for d, k in zip(a.dilation, w.shape[2:], strict=True)]
    high = [(o - 1) * s + e - n - p
            for o, s, e, n, p in zip(want, a.stride, span, x.shape[2:], a.pad, strict=True)]  # fmt: skip
    return (torch.conv1d, torch.conv2d, torch.conv3d)[a.nd - 1](
        fn.pad(x, _pads(a.pad, high)), w, None, a.stride, 0, a.dilation, a.groups)  # fmt: skip


def _pads(low: Sequence[int], high: Sequence[int]) -> list[int]:
    return [p for pair in reversed(list(zip(low, high, strict=True))) for p in pair]


def _pool(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch
    from torch.nn import functional as fn

    a: ops.Pool = node.attrs
    x: Tensor = widen(inputs[0]) if a.kind == PoolKind.avg else inputs[0]
    want, size = shapes[0][2:], x.shape[2:]
    if a.adaptive:
        if a.kind == PoolKind.avg:
            return [getattr(fn, f"adaptive_avg_pool{a.nd}d")(x, want).to(_out(node))]
        return list(getattr(fn, f"adaptive_max_pool{a.nd}d")(x, want, return_indices=True)[: len(node.outputs)])
    stride, pad, dilation = a.stride or a.kernel, a.pad or (0,) * a.nd, a.dilation or (1,) * a.nd
    # per axis: position of every cell of every window [out, kernel], and whether it lies in the input
    cells = [torch.arange(o)[:, None] * s - p + torch.arange(k)[None] * d
             for o, s, p, k, d in zip(want, stride, pad, a.kernel, dilation, strict=True)]  # fmt: skip
    inside = [(c >= 0) & (c < n) for c, n in zip(cells, size, strict=True)]
    n = prod(a.kernel)
    flat = torch.zeros([1] * (2 * a.nd), dtype=torch.int64)
    valid = torch.ones([1] * (2 * a.nd), dtype=torch.bool)
    counted = torch.ones([1] * (2 * a.nd), dtype=torch.bool)
    w = x
    for i in range(a.nd):
        shape = [1] * (2 * a.nd)
        shape[2 * i], shape[2 * i + 1] = want[i], a.kernel[i]
        at = cells[i].clamp(0, max(size[i] - 1, 0))
        w = w.index_select(2 + 2 * i, at.reshape(-1))
        w = w.reshape(*w.shape[: 2 + 2 * i], *at.shape, *w.shape[3 + 2 * i :])
        flat = flat * size[i] + at.reshape(shape)
        valid = valid & inside[i].reshape(shape)
        counted = counted & (cells[i] < size[i] + pad[i]).reshape(shape)
    order = [2 * i for i in range(a.nd)] + [2 * i + 1 for i in range(a.nd)]

    def windows(t: Tensor) -> Tensor:
        lead = t.dim() - 2 * a.nd
        t = t.expand(*t.shape[:lead], *(e for i in range(a.nd) for e in (want[i], a.kernel[i])))
        return t.permute(*range(lead), *(lead + i for i in order)).reshape(*t.shape[:lead], *want, n)

    w, flat, valid, counted = windows(w), windows(flat), windows(valid), windows(counted)
    if a.kind == PoolKind.avg:
        total = torch.where(valid, w, torch.zeros_like(w)).sum(-1)
        cells_in = (counted if a.count_include_pad else valid).sum(-1)
        return [(total / (a.divisor or cells_in)).to(_out(node))]
    low = float("-inf") if x.is_floating_point() else torch.iinfo(x.dtype).min
    w = torch.where(valid, w, torch.full_like(w, low))
    # as torch: the first of equal values, but the last NaN; a cell outside never gives the index
    best = torch.where(valid, w, torch.full_like(w, low)).argmax(-1)
    tie = (w == w.amax(-1, keepdim=True)) & valid
    best = torch.where(tie.any(-1), tie.to(torch.uint8).argmax(-1), best)
    if x.is_floating_point():
        nan = w.isnan()
        last = n - 1 - nan.flip(-1).to(torch.uint8).argmax(-1)
        best = torch.where(nan.any(-1), last, best)
    out = [w.gather(-1, best[..., None])[..., 0]]
    if len(node.outputs) > 1:
        out.append(flat.expand(*best.shape, n).gather(-1, best[..., None])[..., 0])
    return out


def _norm(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Norm = node.attrs
    x, weight, bias = (*inputs, None, None)[:3]
    x = widen(x)
    weight, bias = (None if t is None else widen(t) for t in (weight, bias))
    if a.kind == NormKind.layer:
        y = torch.nn.functional.layer_norm(x, x.shape[x.dim() - a.axes :], weight, bias, a.eps)
    elif a.kind == NormKind.group:
        n, c = x.shape[:2]
        g = x.reshape(n, a.groups, -1)
        y = (g - g.mean(-1, keepdim=True)) / (g.var(-1, correction=0, keepdim=True) + a.eps).sqrt()
        y = y.reshape(x.shape)
        for t, op in ((weight, torch.mul), (bias, torch.add)):
            if t is not None:
                y = op(y, t.reshape([c] + [1] * (x.dim() - 2)))
    else:
        axes = tuple(range(x.dim() - a.axes, x.dim()))
        y = x * torch.rsqrt((x * x).mean(axes, keepdim=True) + a.eps)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    return [y.to(_out(node))]


def _softmax(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    f = torch.log_softmax if node.attrs.log else torch.softmax
    return [f(widen(inputs[0]), node.attrs.axis).to(_out(node))]


def _attention(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Attention = node.attrs
    q, k, v, mask, more_k, more_v = (*inputs, None, None, None)[:6]
    if more_k is not None:
        k, v = torch.cat([k, more_k], -2), torch.cat([v, more_v], -2)
    q, k, v = widen(q), widen(k), widen(v)
    heads = q.shape[-3]
    k = k.repeat_interleave(heads // k.shape[-3], -3)
    v = v.repeat_interleave(heads // v.shape[-3], -3)
    s = q @ k.transpose(-1, -2) * a.scale
    ninf = torch.tensor(float("-inf"), dtype=s.dtype)
    if a.causal:
        s = torch.where(torch.ones(s.shape[-2:], dtype=torch.bool).tril(), s, ninf)
    if mask is not None:
        s = torch.where(mask, s, ninf) if mask.dtype == torch.bool else s + widen(mask)
    p = torch.softmax(s, -1)
    nothing = (s == ninf).all(-1, keepdim=True) & (not a.nan_rows)
    return [(torch.where(nothing, torch.zeros_like(p), p) @ v).to(_out(node))]


def _wrap(node: Node, index: Tensor, size: int) -> Tensor:
    index = index.long()
    index = index.where(index >= 0, index + size)
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise Error(f"index out of range: expected -{size}..{size - 1}", node=str(node.loc))
    return index


def _gather(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    a: ops.Gather = node.attrs
    x: Tensor = inputs[0]
    index = _wrap(node, inputs[1], x.shape[a.axis])
    if a.kind == IndexKind.elements:
        return [x.gather(a.axis, index)]
    return [x.index_select(a.axis, index.reshape(-1)).reshape(shapes[0])]


def _scatter(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Scatter = node.attrs
    x, index, updates = inputs
    index = _wrap(node, index, x.shape[a.axis])
    if a.kind == IndexKind.take:
        updates = updates.reshape([*x.shape[: a.axis], index.numel(), *x.shape[a.axis + 1 :]])
        index = index.reshape([-1 if i == a.axis else 1 for i in range(x.dim())]).expand(updates.shape)
    if a.reduce == ScatterReduce.none:
        return [x.scatter(a.axis, index, updates)]
    names = {ScatterReduce.sum: "sum", ScatterReduce.prod: "prod", ScatterReduce.max: "amax", ScatterReduce.min: "amin",
             ScatterReduce.mean: "mean"}  # fmt: skip
    wide = x.to(torch.int64) if x.dtype == torch.bool else widen(x)
    y = wide.scatter_reduce(a.axis, index, updates.to(wide.dtype), names[a.reduce], include_self=a.include_self)
    return [y != 0 if x.dtype == torch.bool else y.to(x.dtype)]


def _pad(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Pad = node.attrs
    x: Tensor = inputs[0]
    for axis, (lo, hi) in enumerate(zip(a.lo, a.hi, strict=True)):
        n = x.shape[axis]
        at = torch.arange(-lo, n + hi)
        if a.mode == PadMode.constant:
            keep = (at >= 0) & (at < n)
            y = torch.full([*x.shape[:axis], len(at), *x.shape[axis + 1 :]], a.value).to(x.dtype)
            y.movedim(axis, 0)[keep] = x.movedim(axis, 0)[at[keep]]
            x = y
            continue
        if a.mode == PadMode.reflect:
            at = at.abs()
            at = torch.where(at >= n, 2 * (n - 1) - at, at)
        elif a.mode == PadMode.replicate:
            at = at.clamp(0, n - 1)
        else:
            at = at % n
        x = x.index_select(axis, at)
    return [x]


def _sort(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Sort = node.attrs
    v, i = torch.sort(inputs[0], dim=a.axis, descending=a.descending, stable=True)
    n = shapes[0][a.axis]
    return [v.narrow(a.axis, 0, n), i.narrow(a.axis, 0, n)]


def _rnn(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Rnn = node.attrs
    wide = [None if t is None else widen(t) for t in (*inputs, *[None] * 5)[:8]]
    x, w_ih, w_hh, b_ih, b_hh, h, c, w_proj = wide
    assert x is not None and w_ih is not None and w_hh is not None
    steps, n, _ = x.shape
    hidden = w_ih.shape[0] // {RnnKind.lstm: 4, RnnKind.gru: 3}.get(a.kind, 1)
    h = x.new_zeros(n, w_hh.shape[1]) if h is None else h
    c = x.new_zeros(n, hidden) if c is None else c
    b_ih = x.new_zeros(w_ih.shape[0]) if b_ih is None else b_ih
    b_hh = x.new_zeros(w_ih.shape[0]) if b_hh is None else b_hh
    y = x.new_zeros(steps, n, h.shape[1])
    for t in reversed(range(steps)) if a.reverse else range(steps):
        p, q = x[t] @ w_ih.T + b_ih, h @ w_hh.T + b_hh
        if a.kind == RnnKind.lstm:
            i, f, g, o = (p + q).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            h = h if w_proj is None else h @ w_proj.T
        elif a.kind == RnnKind.gru:
            (pr, pz, pn), (qr, qz, qn) = p.chunk(3, 1), q.chunk(3, 1)
            r, z = torch.sigmoid(pr + qr), torch.sigmoid(pz + qz)
            h = (1 - z) * torch.tanh(pn + r * qn) + z * h
        else:
            h = torch.tanh(p + q) if a.kind == RnnKind.tanh else torch.relu(p + q)
        y[t] = h
    return [t.to(_out(node)) for t in (y, h, c)[: len(node.outputs)]]


def _resize(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    import torch

    a: ops.Resize = node.attrs
    names = {ResizeMode.nearest: "upsample_nearest{}d", ResizeMode.nearest_exact: "_upsample_nearest_exact{}d"}
    linear = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
    x, size = widen(inputs[0]), list(shapes[0][2:])
    x = x if x.is_floating_point() else x.double()
    scale = [s or None for s in a.scale] or [None] * a.nd
    if a.mode in names:
        y = getattr(torch.ops.aten, names[a.mode].format(a.nd)).default(x, size, *scale)
    elif a.mode == ResizeMode.linear:
        y = getattr(torch.ops.aten, linear[a.nd - 1]).default(x, size, a.align_corners, *scale)
    elif a.nd == 2 and a.cubic_a == -0.75:
        y = torch.ops.aten.upsample_bicubic2d.default(x, size, a.align_corners, *scale)
    else:
        raise Error(
            f"cubic resize has a reference for two axes and a = -0.75, not {a.nd} and {a.cubic_a}", node=str(node.loc)
        )
    return [y.to(_out(node))]


def _grid_sample(node: Node, inputs: list[Any], shapes: Shapes) -> list[Tensor]:
    from torch.nn import functional as fn

    a: ops.GridSample = node.attrs
    mode = {ResizeMode.nearest: "nearest", ResizeMode.linear: "bilinear", ResizeMode.cubic: "bicubic"}[a.mode]
    pad = {GridPad.zeros: "zeros", GridPad.border: "border", GridPad.reflection: "reflection"}[a.pad]
    y = fn.grid_sample(widen(inputs[0]), widen(inputs[1]), mode=mode, padding_mode=pad, align_corners=a.align_corners)
    return [y.to(_out(node))]


KERNELS: Mapping[str, Callable[[Node, list[Any], Shapes], list[Tensor]]] = {
    "copy": _copy, "reduce": _reduce, "scan": _scan, "matmul": _matmul, "conv": _conv, "pool": _pool, "norm": _norm,
    "softmax": _softmax, "attention": _attention, "gather": _gather, "scatter": _scatter, "pad": _pad, "sort": _sort,
    "rnn": _rnn, "resize": _resize, "grid_sample": _grid_sample,
}  # fmt: skip
