"""Chooses, per 3x3 convolution, between the direct sum and Winograd's algorithm (hal/cpu/conv_winograd.c).

Tiles of 4x4 outputs need four times fewer products, of 2x2 2.25 times; their weights are 4 and 1.8 times as large. Which one
is quickest depends on the map's size (tiles at the edge are computed whole), on the channels (transforms cost per channel,
products per pair of channels), and on how long the larger weight takes to come from memory.
Results differ from the direct sum's by rounding, about twice as much as its own.
"""

from __future__ import annotations

from dataclasses import replace

from trivet.fbs.structs import DType
from trivet.ir.graph import Module, Node
from trivet.pipeline import Context
from trivet.schedule import all_graphs

LANES = 16  # products of a cycle
REACHED = 0.85  # of them, in the product's inner loop
TRANSFORM = {2: (60, 50), 4: (200, 150)}  # cycles a tile of LANES channels: of the input, of the output
CALL = 20  # cycles a tile and point
STREAM = 6  # bytes a cycle of weights from memory
GAIN = 0.85  # what is left of the time, at most
UNKNOWN = 32  # a map's size when it is not known


def choose_winograd(module: Module, ctx: Context) -> None:
    """Sets Conv.winograd of the CPU's convolutions where it pays."""
    variant = next((t.variant for t in getattr(ctx.target, "all", ()) if t.name == "cpu"), "")
    if variant == "cortex_m":
        return
    found: dict[int, int] = {}
    for entry in module.entries.values():
        for graph in all_graphs(entry):
            for node in graph.nodes:
                if m := winograd_tile(node):
                    node.attrs = replace(node.attrs, winograd=m)
                    found[m] = found.get(m, 0) + 1
    if found:
        text = ", ".join(f"{n} with {m}x{m} outputs" for m, n in sorted(found.items()))
        ctx.report.note("choose_winograd", f"{sum(found.values())} convolutions: {text}")


def winograd_tile(node: Node) -> int:
    """Outputs of a tile along an axis, 2 or 4, or 0: the direct sum."""
    if node.op != "conv" or node.delegate not in ("", "cpu") or node.attrs.packed:
        return 0
    a, w, y = node.attrs, node.inputs[1], node.outputs[0]
    plain = a.nd == 2 and not a.transposed and a.groups == 1 and set(a.stride) == set(a.dilation) == {1}
    if not plain or w is None or w.const is None or w.dtype != DType.f32 or tuple(w.shape[2:]) != (3, 3):
        return 0
    out, cin = int(str(w.shape[0])), int(str(w.shape[1]))
    if cin < LANES // 2 or out < LANES // 2:
        return 0
    batch = y.shape[0] if isinstance(y.shape[0], int) else 1
    height, width = (d if isinstance(d, int) else UNKNOWN for d in y.shape[2:])
    if not batch * height * width:
        return 0
    panels = -(-out // LANES)
    direct = batch * height * width * 9 * cin * panels / (REACHED if panels > 1 else 0.75 * REACHED)
    costs = {0: direct * GAIN}
    for m, (into, back) in TRANSFORM.items():
        points = (m + 2) ** 2
        tiles = batch * -(-height // m) * -(-width // m)
        product = tiles * points * (cin * panels / REACHED + CALL)
        transforms = tiles * (into * -(-cin // LANES) + back * panels)
        costs[m] = max(product, points * cin * out * 4 / STREAM) + transforms
    return min(costs, key=lambda m: costs[m])
