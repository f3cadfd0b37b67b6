"""A border of zeros in front of a convolution becomes the convolution's own padding.

Uneven borders ("same" padding of strided convolutions) fit too: a convolution holds the low side, its output's size fixes
the high side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trivet.fbs.structs import PadMode
from trivet.ir.graph import Module
from trivet.ir.rewrite import Rewriter, graphs_of

if TYPE_CHECKING:
    from trivet.pipeline import Context

LARGEST = (1 << 15) - 1  # what ConvAttrs.pad holds


def fuse_pad(module: Module, context: Context) -> None:
    """The pass."""
    for graph, _ in graphs_of(module):
        rw = Rewriter(graph)
        for n in graph.nodes:
            if n.op != "conv" or n.attrs.transposed:
                continue
            border = n.inputs[0].node if n.inputs[0] is not None else None
            if border is None or border.op != "pad":
                continue
            p = border.attrs
            lo = tuple(a + b for a, b in zip(n.attrs.pad, p.lo[2:], strict=True))
            zero = p.mode == PadMode.constant and p.value == 0 and not any((*p.lo[:2], *p.hi[:2]))
            # a crop must not come back as padding, nor the other way round
            grows = min((*p.lo[2:], *p.hi[2:], *n.attrs.pad)) >= 0
            if zero and grows and max(lo) <= LARGEST:
                rw.become(n, "conv", [border.inputs[0], *n.inputs[1:]], replace(n.attrs, pad=lo), border.loc)
        rw.finish()
