"""Rounding of weights by the error that they make in the layer's result, not each to its nearest number.

The error of one weight is made up for by the weights after it, as far as their inputs go together in the calibration data: optimal
brain quantisation in a fixed order, as in Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", ICLR 2023 (section 3.3), here for convolutions and grouped ones too. Scales stay as they are.

Few data show less of how inputs go together: their products count for less then, and without them the nearest number is best.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trivet.quantize.fold import CONVS
from trivet.quantize.fxgraph import argument, assign, fetch, target
from trivet.quantize.improve import run

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule, Node

ROWS = 8192  # inputs of a layer that count per batch at most, spread over it
PLENTY = 8  # rows per weight of a channel that are enough in all
DAMPING = 0.01  # of the mean diagonal: how little is believed of directions that the data hardly show
WIDEST = 4096  # inputs of a channel; wider layers keep the nearest numbers
# Products of different inputs are shrunk as if this many rows per weight of a channel had been seen in which they do not go together.
# On synthetic inputs of four kinds, from a quarter of a row per weight on: 0.3 to 1.01 of the error of nearest numbers, without up to 2.7.
SHRINK = 2
BLOCK = 64


def round_to_data(
    prepared: GraphModule, reference: GraphModule, batches: Sequence[Sequence[Any]], *, centred: bool = False
) -> tuple[int, int]:
    """Puts weights of convolutions and linear layers on numbers that their scale can store, so that nearest rounding keeps them.

    Args:
        prepared: graph with observers that have seen the data, before convert; its weights become new tensors.
        reference: float graph, its nodes of the same names.
        batches: leaves of calls.
        centred: the mean of the inputs does not count, since biases are corrected afterwards.

    Returns:
        How many layers have weights rounded so, and how many have not: shared weights, more inputs than WIDEST.
    """
    twins = {n.name: n for n in reference.graph.nodes}
    modules = dict(prepared.named_modules(remove_duplicate=False))
    readers = Counter(str(n.target) for n in prepared.graph.nodes if n.op == "get_attr")
    layers: dict[Node, tuple[Node, Any]] = {}  # node of the reference: node of prepared, observer of its weights
    left = 0
    for n in prepared.graph.nodes:
        w: Any = n.args[1] if target(n) in (*CONVS, "aten.linear") and n.name in twins else None
        if w is None or w.op != "call_module":
            continue
        left += 1
        own = len(w.users) == 1 and len(w.args[0].users) == 1
        if not own or w.args[0].op != "get_attr" or readers[str(w.args[0].target)] != 1:
            continue
        observer = modules[str(w.target)]
        wide = fetch(reference, str(twins[n.name].args[1].target))[0].numel()
        if hasattr(observer, "min_val") and 0 < wide <= WIDEST:
            layers[twins[n.name]] = (n, observer)
    sums: dict[Node, tuple[Tensor, Tensor, int]] = {}  # of products [groups, K, K], of inputs [groups, K], rows

    def see(n: Node, out: Any) -> Any:
        values[n] = out
        if n in layers:
            shape = fetch(reference, str(n.args[1].target)).shape  # type: ignore[union-attr]
            most = min(ROWS, max(ROWS // PLENTY, PLENTY * math.prod(shape[1:]) // len(batches)))
            x = _rows(n, values[n.args[0]], shape, most)  # type: ignore[index]
            h, total, count = sums.get(n, (0, 0, 0))
            sums[n] = (h + x.transpose(1, 2) @ x, total + x.sum(1), count + x.shape[1])
        return out

    for flat in batches if layers else ():
        values: dict[Node, Any] = {}
        run(reference, flat, see)
    done = 0
    for twin, (n, observer) in layers.items():
        source = n.args[1].args[0]  # type: ignore[union-attr]
        w = fetch(prepared, str(source.target)).detach()  # type: ignore[union-attr]
        scale, zero = observer.calculate_qparams()
        h, total, count = sums.get(twin, (w, w, 0))
        if not count or scale.numel() not in (1, w.shape[0]) or bool((zero != 0).any()):
            continue
        if centred:  # of inputs that are nearly constant this leaves rounding errors: the diagonal keeps above them
            least = 1e-9 * h.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(h.shape[2], dtype=h.dtype)
            h = h - total[:, :, None] * total[:, None] / count + least
        share = count / (count + SHRINK * h.shape[2])
        h = share * h + (1 - share) * torch.diag_embed(h.diagonal(dim1=1, dim2=2))
        rows = w.double().reshape(h.shape[0], w.shape[0] // h.shape[0], -1)
        s = scale.detach().reshape(-1).double().expand(w.shape[0])
        q = _round(rows, h, s.reshape(h.shape[0], -1), observer.quant_min, observer.quant_max)
        assign(prepared, str(source.target), (q.reshape(len(w), -1) * s[:, None]).reshape(w.shape).float())  # type: ignore[union-attr]
        done += 1
    prepared.graph.eliminate_dead_code()
    prepared.recompile()
    return done, left - done


def _rows(n: Node, x: Tensor, shape: Sequence[int], most: int) -> Tensor:
    """What the channels of a layer multiply with their weights of a shape: f64 [groups, rows, K], about most of the rows."""
    if target(n) == "aten.linear":
        rows = x.reshape(-1, x.shape[-1])
        rows = rows[:: max(1, -(-len(rows) // most))].double()
        return rows[None]
    cells, groups = len(shape) - 2, int(argument(n, "groups") or 1)

    def sizes(name: str) -> list[int]:
        given = argument(n, name)
        return [int(given[i % len(given)]) for i in range(cells)]

    if x.dim() == cells + 1:
        x = x[None]
    stride, dilation, kernel = sizes("stride"), sizes("dilation"), shape[2:]
    pad = argument(n, "padding")
    if isinstance(pad, str):
        total = [d * (k - 1) if pad == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in sizes("padding")]
    x = F.pad(x, [p for side in reversed(sides) for p in side])
    for i, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        x = x.unfold(2 + i, d * (k - 1) + 1, s)[..., ::d]  # [N, C, out.., k..]
    places = len(x) * math.prod(x.shape[2 : 2 + cells])
    every = slice(None, None, max(1, math.ceil((places / most) ** (1 / cells))))
    x = x[tuple([slice(None)] * 2 + [every] * cells)]
    rows = x.movedim(1, -1 - cells).flatten(0, cells).double()
    return rows.reshape(len(rows), groups, math.prod(shape[1:])).movedim(1, 0)


def _round(w: Tensor, h: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Stored numbers of w[groups, rows, K], given the sums of products h[groups, K, K] and scale[groups, rows]."""
    k = w.shape[2]
    mean = h.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30)
    h = h + (DAMPING * mean)[:, None, None] * torch.eye(k, dtype=h.dtype)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    w, s, out = w.clone(), scale[:, :, None], torch.empty_like(w)
    for a in range(0, k, BLOCK):
        b = min(a + BLOCK, k)
        errors = torch.zeros(w.shape[0], w.shape[1], b - a, dtype=w.dtype)
        for i in range(a, b):
            out[:, :, i : i + 1] = q = (w[:, :, i : i + 1] / s).round().clamp(low, high)
            e = (w[:, :, i : i + 1] - q * s) / factor[:, i, i][:, None, None]
            w[:, :, i:b] -= e * factor[:, i, i:b][:, None]
            errors[:, :, i - a : i - a + 1] = e
        w[:, :, b:] -= errors @ factor[:, a:b, b:]
    return out
