"""How a model was quantised and how well: a row per kernel of the lowered program, totals, and the steps of a search.

What is integer is read off the lowered graphs, not off the recipe: a row says what the runtime does. Signal-to-quantisation-noise
ratios (SQNR, in dB, 10 log10(sum of squares / sum of squared errors)) come from quantize/measure.py and are matched by place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from trivet.error import Error

if TYPE_CHECKING:
    from trivet.ir.graph import Module, Node, Value
    from trivet.quantize.measure import Measured

VERSION = 1
CEILING = 150.0  # dB; no noise at all counts as that
FORMS = ("integer", "weights", "half", "float")


@dataclass(slots=True)
class Layer:
    """One kernel of the program.

    Attributes:
        entry: of the program.
        module: path in the user's model; several, joined by " + ", where the kernel stands for several.
        op: the model's operators without namespaces: "conv2d + relu".
        source: file:line in the user's code.
        form: "integer": computes on stored integers; "weights": in float, on weights stored in 8 or 4 bits; "half": float with
            16-bit storage; "float".
        stored: dtype of the result in memory: "i8", "i16", "f32", ..
        weights: dtype that the weights are stored in, "" without weights: "i8", "i4", "f16", "f32".
        macs: multiply-adds at the example's sizes.
        sqnr: dB of the result, the whole network being quantised; None: not measured.
        alone: dB of the result when only this layer is quantised (its inputs are right before they are stored); None: not measured.
        why: for "float", why.
        nodes: names, in the exported graph, of the model's operators that it stands for, without the entry's name: what a rule
            "node:.." of a recipe means. Empty where the quantisation was not ours.
    """

    entry: str
    module: str
    op: str
    source: str = ""
    form: str = "float"
    stored: str = ""
    weights: str = ""
    macs: int = 0
    sqnr: float | None = None
    alone: float | None = None
    why: str = ""
    nodes: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        return " ".join(t for t in (self.module, f"({self.source})" if self.source else "") if t) or self.entry

    @property
    def low(self) -> float:
        """What layers are ordered by, the worst first: dB alone where known, else in the whole network, else infinite."""
        known = [x for x in (self.alone, self.sqnr) if x is not None]
        return known[0] if known else float("inf")

    def __str__(self) -> str:
        return f"{self.op} at {self.where}"


@dataclass(slots=True)
class Step:
    """One try of the search for max_drop. kept: layers in higher precision (all that the try kept); score: of the metric."""

    kept: list[str]
    precision: str
    score: float
    holds: bool


@dataclass(slots=True)
class Report:
    """What happened to a model.

    Attributes:
        recipe: its name, or what it says.
        batches: calibration batches seen; 0: none were needed or given.
        layers: kernels in order of execution, without those that only move data or compute on indices.
        bytes_before, bytes_after: weights of the model, and of the program.
        search: tries of the metric's search, in order; the last one that holds is the program.
        score, reference: metric of the program and of the float model; None without metric.
        notes: other things to know, a line each.
    """

    recipe: str = ""
    batches: int = 0
    layers: list[Layer] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    search: list[Step] = field(default_factory=list)
    score: float | None = None
    reference: float | None = None
    notes: list[str] = field(default_factory=list)

    # -- figures
    def share(self, form: str) -> tuple[float, float]:
        """Part of the multiply-adds and part of the kernels that have a form, each 0..1."""
        macs = sum(x.macs for x in self.layers)
        mine = [x for x in self.layers if x.form == form]
        return (sum(x.macs for x in mine) / macs if macs else 0.0, len(mine) / len(self.layers) if self.layers else 0.0)

    def worst(self, count: int = 0) -> list[Layer]:
        """Measured layers, lowest dB first; at most count, 0: all."""
        known = sorted((x for x in self.layers if x.low != float("inf")), key=lambda x: x.low)
        return known[: count or len(known)]

    # -- text
    def head(self) -> list[str]:
        """Lines of totals."""
        macs = sum(x.macs for x in self.layers)
        batches = f", {self.batches} calibration batch{'es' if self.batches != 1 else ''}" if self.batches else ""
        lines = [f"quantised by {self.recipe or 'the model itself'}{batches}: {len(self.layers)} kernels, "
                 f"{count_text(macs)} multiply-adds"]  # fmt: skip
        for form in FORMS:
            a, b = self.share(form)
            n = sum(x.form == form for x in self.layers)
            if n:
                lines.append(
                    f"  {_FORM_TEXT[form]}: {n} kernels ({100 * b:.0f} %), {100 * a:.1f} % of the multiply-adds"
                )
        if self.bytes_before:
            lines.append(f"  weights: {self.bytes_before:,} bytes before, {self.bytes_after:,} after "
                         f"({self.bytes_after / self.bytes_before:.3f})")  # fmt: skip
        if self.score is not None and self.reference is not None:
            lines.append(
                f"  metric: {self.score:.6g}, in float {self.reference:.6g} ({self.score - self.reference:+.3g})"
            )
        for s in self.search:
            what = f"{len(s.kept)} layers in {s.precision}: {', '.join(s.kept)}" if s.kept else "as the recipe says"
            lines.append(f"  search: {s.score:.6g} {'holds' if s.holds else 'is too low'}, {what}")
        return lines + [f"  {n}" for n in self.notes]

    def table(self, *, worst: bool = False, count: int = 0) -> str:
        """The report as text.

        Args:
            worst: worst layers first; else in order of execution.
            count: rows at most, 0: all.
        """
        rows = self.worst() + [x for x in self.layers if x.low == float("inf")] if worst else list(self.layers)
        cells = [("dB", "alone", "form", "stored", "weights", "layer")]
        for x in rows[: count or len(rows)]:
            why = f": {x.why}" if x.why else ""
            layer = f"{x.op} at {x.module or x.source or x.entry}{why}"
            cells.append((decibel_text(x.sqnr), decibel_text(x.alone), x.form, x.stored, x.weights, layer))
        width = [max(len(c[i]) for c in cells) for i in range(5)]
        lines = [f"{a:>{width[0]}}  {b:>{width[1]}}  {c:<{width[2]}}  {d:<{width[3]}}  {e:<{width[4]}}  {f}".rstrip()
                 for a, b, c, d, e, f in cells]  # fmt: skip
        return "\n".join(self.head() + (lines if rows else []))

    def __str__(self) -> str:
        return self.table()

    # -- data
    def to_json(self) -> dict[str, Any]:
        """Plain data for tools and for the file; from_json reads it."""
        form = {f: dict(zip(("macs", "kernels"), self.share(f), strict=True)) for f in FORMS}
        return {"version": VERSION, **asdict(self), "coverage": form}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """What to_json gave. Fields of later versions are ignored.

        Raises:
            Error: data that is no report.
        """

        def make(kind: Any, row: Mapping[str, Any]) -> Any:
            names = {f.name for f in fields(kind)}
            return kind(**{k: v for k, v in row.items() if k in names})

        try:
            report: Report = make(Report, data)
            report.layers = [make(Layer, row) for row in data["layers"]]
            report.search = [make(Step, row) for row in data["search"]]
        except (TypeError, KeyError, AttributeError) as e:
            raise Error(f"this is no report of a quantisation: {e}") from None
        return report


_FORM_TEXT = {"integer": "in integers", "weights": "in float on quantised weights", "half": "in float, stored in 16 bits",
              "float": "in float"}  # fmt: skip


def decibel(signal: float, noise: float) -> float:
    """10 log10(signal / noise), within +-CEILING; NaN and inf count as noise without end."""
    if not math.isfinite(noise) or not math.isfinite(signal):
        return -CEILING
    if noise <= 0.0:
        return CEILING
    return max(-CEILING, min(CEILING, 10 * math.log10(signal / noise))) if signal > 0 else -CEILING


def sqnr(wanted: Any, got: Any) -> float:
    """Signal over noise in dB, within +-CEILING; -CEILING when sizes differ. Equal inf and nan are no noise.

    Args:
        wanted, got: numpy arrays or torch tensors, read as f64.
    """
    import numpy as np

    a, b = (
        np.asarray(x.detach().double() if hasattr(x, "detach") else x, np.float64).reshape(-1) for x in (wanted, got)
    )
    if a.size != b.size:
        return -CEILING
    counts = np.isfinite(a) | ((a != b) & ~(np.isnan(a) & np.isnan(b)))
    a, b = a[counts], b[counts]
    with np.errstate(over="ignore", invalid="ignore"):
        return decibel(float(a @ a), float(((a - b) ** 2).sum()))


def decibel_text(x: float | None) -> str:
    """A cell of a table."""
    return "" if x is None else f"{x:.1f}"


def count_text(n: int) -> str:
    """Numbers as people read them: 385.9 M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return str(n)


# ---- the lowered program ------------------------------------------------------------------------------------------------
_MOVES = frozenset(("copy", "gather", "scatter", "pad", "sort"))
_WEIGHTED = {
    "conv": 1,
    "matmul": 1,
    "rnn": 1,
    "qconv": 1,
    "qmatmul": 1,
    "qrnn": 1,
    "gather": 0,
    "qgather": 0,
}  # operand with the weights


def read_layers(module: Module, why: Mapping[str, str] | None = None) -> list[Layer]:
    """The rows of a module that has gone through all passes, unmeasured. Operators in branches and loops are never quantised.

    Args:
        module: lowered.
        why: name of a value: why the node that makes it stayed float.
    """
    from trivet.schedule import all_graphs, is_kernel

    out = []
    for name, entry in module.entries.items():
        sizes = {s.name: int(s.hint if s.hint is not None else max(s.min, 1)) for s in entry.symbols.values()}
        for graph in all_graphs(entry):
            for node in graph.nodes:
                if is_kernel(node) and (form := _form(node)):
                    inside = "" if graph is entry else "it is in a branch or loop"
                    out.append(_layer(name, node, form, sizes, (why or {}).get(node.outputs[0].name, "") or inside))
    return out


def _layer(entry: str, node: Node, form: str, sizes: Mapping[str, int], why: str) -> Layer:
    loc, y, w = node.loc, node.outputs[0], _weights(node)
    weights = "" if w is None else "i4" if getattr(node.attrs, "bits", 8) == 4 else w.dtype.name
    return Layer(entry, loc.module, op_text(loc.origin) or node.op, loc.source, form, y.dtype.name, weights, macs(node, sizes),
                 why=why if form == "float" else "")  # fmt: skip


def _weights(node: Node) -> Value | None:
    at = _WEIGHTED.get(node.op)
    w = node.inputs[at] if at is not None and at < len(node.inputs) else None
    return w if w is not None and w.const is not None else None


def op_text(origin: str) -> str:
    """The operators of a Loc without namespaces, overloads and what only stores: conv2d + relu."""
    names = [re.sub(r"^[\w.]*?\.?(\w+)\.\w+$", r"\1", t) if "." in t else t for t in origin.split(" + ") if t]
    kept = [n for n in names if not re.match(r"(de)?quantize(_|$)|choose_qparams", n)]
    return " + ".join(dict.fromkeys(kept)) or ("quantize" if names else "")


def _form(node: Node) -> str:
    """What a kernel computes on, "" for one that has no say: indices, conversions, activations that only move."""
    from trivet.fbs.structs import DType
    from trivet.ir.types import is_float
    from trivet.passes.fold_qdq import form_of

    if node.op in _MOVES and _weights(node) is None:
        return ""
    form = form_of(node)
    if form != "float":
        return form
    stored = _weights(node)
    values = [stored] if stored is not None else [v for v in node.outputs if is_float(v.dtype)]
    return "half" if values and all(v.dtype in (DType.f16, DType.bf16) for v in values) else "float"


def macs(node: Node, sizes: Mapping[str, int]) -> int:
    """Multiply-adds of a node at given sizes of the symbols."""
    from trivet import cost
    from trivet.ir.dim import evaluate

    def shape(v: Value) -> tuple[int, ...]:
        return tuple(evaluate(d, sizes) for d in v.shape)

    inputs = [None if v is None else shape(v) for v in node.inputs]
    return cost.macs(node.op, node.attrs, inputs, [shape(v) for v in node.outputs]) if inputs else 0


# ---- SQNR to layers -----------------------------------------------------------------------------------------------------
def attach(layers: Sequence[Layer], measured: Iterable[Measured]) -> None:
    """Gives the layers the dB of the operators that they stand for: the last one of each, by entry, module path, line and operator.

    Layers that the same place made (a module called twice) take their share of its operators in order.
    """
    rows = list(measured)
    same: dict[tuple[str, str, str, str], list[Layer]] = {}
    for x in layers:
        same.setdefault((x.entry, x.module, x.source, x.op), []).append(x)
    for (entry, module, source, op), group in same.items():
        modules, sources, ops = (set(t.split(" + ")) for t in (module, source, op))
        found = [m for m in rows if m.entry == entry and m.op in ops and m.module in modules and m.source in sources]
        each = len(found) // len(group)
        for i, x in enumerate(group if found else ()):
            mine = found[i * each : (i + 1) * each] or found
            x.nodes = list(dict.fromkeys(m.twin for m in mine if m.twin))
            if x.form == "float":
                x.why = next((m.why for m in mine if m.why), x.why)
            if not each:  # several kernels for one operator
                continue
            known, single = [m.sqnr for m in mine if m.sqnr is not None], [m.alone for m in mine if m.alone is not None]
            x.sqnr = round(known[-1], 2) if known else None
            x.alone = round(single[-1], 2) if single else None
