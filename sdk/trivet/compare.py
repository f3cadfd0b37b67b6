"""Model and program side by side on the same data: errors of the results, and the first layer beyond tolerance.

The model runs operator by operator (its exported graph, interpreted by torch), the program with a tap on every command.
What a command wrote is matched with the value of an operator: first by name, then by content, since fusion and folding
make commands that stand for several operators. A command's value without counterpart is harmless when something correct
was computed from it; the first one for which that is not so is where the program leaves the model.

Programs with quantised values are judged by the signal-to-noise ratio (SQNR, dB) of the dequantised values; their commands are
matched by place in the model first, since rounding leaves less of a content to recognise.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trivet.bench import find_entry
from trivet.error import Error
from trivet.fbs.structs import Op
from trivet.ir.graph import Loc
from trivet.quantize.report import CEILING, sqnr
from trivet.reader import EntryView, FileView, Place
from trivet.runtime import Net, load
from trivet.taps import Tap, file_view, run_tapped

Array = np.ndarray[Any, Any]
_SAMPLES = 32


@dataclass(slots=True)
class Layer:
    """One command's output beside the model's.

    Attributes:
        place: operator, module path, source line, placement.
        value: its name in the plan.
        twin: the model's operator that it was compared with, "" when there is none.
        error: largest difference over the twin's largest magnitude; nan without twin.
        harmless: within tolerance, or something correct was computed from it.
        sqnr: dB against the twin; nan without twin.
    """

    time: int
    place: Place
    value: str
    shape: tuple[int, ...]
    twin: str
    error: float
    harmless: bool
    sqnr: float = float("nan")


@dataclass(slots=True)
class Comparison:
    """What compare() found.

    Attributes:
        outputs, sqnrs: relative error and dB of each result tensor.
        first: where the program leaves the model.
        min_sqnr: what every result and layer must reach in dB; None: the tolerance counts.
    """

    entry: str
    tolerance: float
    outputs: list[float]
    layers: list[Layer]
    first: Layer | None
    sqnrs: list[float] = field(default_factory=list)
    min_sqnr: float | None = None

    @property
    def ok(self) -> bool:
        if self.min_sqnr is not None:
            return all(x >= self.min_sqnr for x in self.sqnrs)
        return all(e <= self.tolerance for e in self.outputs)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        worst = max(self.outputs, default=0.0)
        if self.min_sqnr is not None:
            lines = [f"entry {self.entry}, quantised: {len(self.outputs)} results at {min(self.sqnrs, default=CEILING):.1f} dB or more, "
                     f"{self.min_sqnr:g} dB wanted: {'ok' if self.ok else 'below'}"]  # fmt: skip
        else:
            lines = [f"entry {self.entry}: largest relative error of {len(self.outputs)} results {worst:.3g}, "
                     f"tolerance {self.tolerance:g}: {'ok' if self.ok else 'beyond'}"]  # fmt: skip
        if self.first is not None:
            f = self.first
            much = f"{f.sqnr:.1f} dB" if self.min_sqnr is not None else f"error {f.error:.3g}"
            how = f"{much} against {f.twin}" if f.twin else "nothing like it in the model"
            lines.append(f"first layer beyond tolerance: {f.place.brief or f.value} at {f.place.where or 'time ' + str(f.time)}"
                         f" ({f.value} {list(f.shape)}): {how}")  # fmt: skip
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """For tools."""

        def layer(x: Layer) -> dict[str, Any]:
            return {"time": x.time, "op": x.place.op, "module": x.place.module, "source": x.place.source,
                    "value": x.value, "shape": list(x.shape), "twin": x.twin,
                    "error": None if x.error != x.error else x.error, "sqnr": None if x.sqnr != x.sqnr else x.sqnr,
                    "harmless": x.harmless}  # fmt: skip

        return {"entry": self.entry, "ok": self.ok, "tolerance": self.tolerance, "outputs": self.outputs,
                "sqnrs": self.sqnrs, "min_sqnr": self.min_sqnr,
                "first": None if self.first is None else layer(self.first),
                "layers": [layer(x) for x in self.layers]}  # fmt: skip


def compare(
    model: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    program: Any = None,
    entry: str = "",
    dynamic_shapes: Any = None,
    tolerance: float = 1e-4,
    min_sqnr: float = 20.0,
    threads: int = 0,
    layers: bool = True,
) -> Comparison:
    """Runs model and program on the same data.

    Args:
        model: the torch.nn.Module of the entry.
        args: arguments to run with (torch tensors).
        kwargs: keyword arguments.
        program: a Program, a path, bytes, or a loaded Net; None: the model is exported for it.
        entry: of the program; "" is `forward` or the only one.
        dynamic_shapes: for the export.
        tolerance: largest relative error that is fine.
        min_sqnr: for quantised programs, in place of tolerance: least SQNR in dB that is fine.
        threads: as for load.
        layers: look into the layers too; else only the results.

    Raises:
        Error: the model cannot be exported, the arguments do not fit the program.
    """
    import torch
    from torch.utils import _pytree as pytree

    if not isinstance(model, torch.nn.Module):
        raise Error(f"a torch.nn.Module expected, got {type(model).__name__}")
    args, kwargs = tuple(args), dict(kwargs or {})
    if program is None:
        from trivet.api import export

        program = export(model, copy.deepcopy(args), copy.deepcopy(kwargs) or None, dynamic_shapes=dynamic_shapes)
    net = program.session() if isinstance(program, Net) else load(program, threads=threads)
    method = find_entry(net, entry)
    with torch.no_grad(), _evaluation(model):
        wanted = copy.deepcopy(model)(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        values = method.info.signature.flatten_inputs(args, kwargs)
        results, taps = run_tapped(method, values) if layers else (method.run(values), [])
    got = method.info.signature.unflatten_outputs(
        [_number(results[i], i in method._numbers) for i in range(len(results))]
    )
    pairs = [(_array(w), _array(g))
             for w, g in zip(pytree.tree_leaves(wanted), pytree.tree_leaves(got), strict=True)
             if isinstance(w, (torch.Tensor, int, float))]  # fmt: skip
    view = file_view(method)
    plan = view.entry(method.name)
    result = Comparison(method.name, tolerance, [relative_error(w, g) for w, g in pairs], [], None,
                        [sqnr(w, g) for w, g in pairs], min_sqnr if _quantised(view) else None)  # fmt: skip
    if layers:
        result.layers = match(taps, trace(model, args, kwargs, dynamic_shapes), plan, tolerance, result.min_sqnr)
        if not result.ok:
            result.first = _first(result.layers)
    return result


def _quantised(view: FileView) -> bool:
    """Whether a program's values differ from the model's by more than rounding of floats."""
    return view.quantization is not None or any(e.quants or any(Op[c.op] >= Op.requantize for c in e.commands if c.op in Op.__members__)
                                                for e in view.entries)  # fmt: skip


@dataclass(slots=True)
class Trace:
    """The value of every input and operator of the model's exported graph, and where it comes from, by the node's name."""

    values: dict[str, Array] = field(default_factory=dict)
    places: dict[str, Loc] = field(default_factory=dict)


def trace(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None) -> Trace:
    """Runs the model operator by operator."""
    import torch
    from torch.utils import _pytree as pytree

    from trivet.importer import handlers, location
    from trivet.tracing import export_program

    program = export_program("forward", copy.deepcopy(model), copy.deepcopy(args), copy.deepcopy(kwargs) or None, dynamic_shapes,
                             handlers()).program  # fmt: skip
    found = Trace()

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            out = super().run_node(n)
            if n.op in ("call_function", "placeholder"):
                parts = out if isinstance(out, (tuple, list)) else [out]
                for i, t in enumerate(parts):
                    if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                        name = n.name if i == 0 else f"{n.name}.{i}"
                        found.values[name], found.places[name] = _array(t), location(n)
            return out

    module = program.module(check_guards=False)
    flat = pytree.tree_leaves((copy.deepcopy(args), copy.deepcopy(kwargs)))
    with torch.no_grad():
        Recorder(module).run(*flat, enable_io_processing=False)
    return found


def match(
    taps: Sequence[Tap], reference: Trace, plan: EntryView, tolerance: float, min_sqnr: float | None
) -> list[Layer]:
    """A Layer per tap, in order of execution; marks the harmless ones. min_sqnr: None: the tolerance counts."""
    by_count: dict[int, list[tuple[str, Array]]] = {}
    for name, value in reference.values.items():
        by_count.setdefault(value.size, []).append((name, value))
    layers, sources = [], []
    writers: dict[int, list[int]] = {}  # storage: taps that wrote it
    for i, tap in enumerate(taps):
        inputs = [v for v in tap.command.inputs if v is not None]
        sources.append([w for v in inputs for w in writers.get(int(plan.values[v]["storage"]), [])])
        writers.setdefault(int(plan.values[tap.value]["storage"]), []).append(i)
        stored, place = plan.quants.get(tap.value), plan.place(tap.command.time)
        real = tap.data if stored is None else stored.real(tap.data)
        same = by_count.get(real.size, [])
        if min_sqnr is None:
            twin, error = _twin(tap.name, real, reference.values, same, tolerance)
            good = error <= tolerance
        else:
            twin = _quantised_twin(tap.name, real, place, reference, same, min_sqnr)
            error = relative_error(reference.values[twin], real) if twin else float("nan")
        db = sqnr(reference.values[twin], real) if twin else float("nan")
        if min_sqnr is not None:
            good = db >= min_sqnr
        layers.append(
            Layer(tap.command.time, place, tap.name or f"value {tap.value}", tap.data.shape, twin, error, good, db)
        )
    for i in range(len(layers) - 1, -1, -1):  # what something correct was computed from is harmless
        if layers[i].harmless:
            for j in sources[i]:
                layers[j].harmless = True
    return layers


def _twin(name: str, real: Array, reference: Mapping[str, Array], candidates: Iterable[tuple[str, Array]],
          tolerance: float) -> tuple[str, float]:  # fmt: skip
    """The operator whose value this is: by name, then by content. (name, error); ("", nan) when there is none."""
    best, error = "", float("nan")
    named = reference.get(name)
    if named is not None and named.size == real.size:
        best, error = name, relative_error(named, real)
        if error <= tolerance:
            return best, error
    flat = real.reshape(-1)
    at = np.linspace(0, max(flat.size - 1, 0), min(_SAMPLES, flat.size), dtype=np.int64)
    few = flat[at]
    for other, value in candidates:
        if value.dtype.kind != flat.dtype.kind or relative_error(value.reshape(-1)[at], few) > 1e3 * tolerance:
            continue
        e = relative_error(value, real)
        if e <= tolerance:
            return other, e
    return best, error


def _quantised_twin(name: str, real: Array, place: Place, reference: Trace, candidates: Sequence[tuple[str, Array]],
                    min_sqnr: float) -> str:  # fmt: skip
    """The operator whose value this is within quantisation noise, "" when there is none: of those of the same place and the same
    operators, else of all, the nearest one; one of another place only if it is near enough.
    """
    alike = [(n, v) for n, v in candidates if v.dtype.kind == real.dtype.kind]
    modules, sources = set(place.module.split(" + ")), set(place.source.split(" + "))
    here = [
        (n, v)
        for n, v in alike
        if n == name or (reference.places[n].module in modules and reference.places[n].source in sources)
    ]
    here = [(n, v) for n, v in here if reference.places[n].origin in place.op] or here
    scored = [(sqnr(v, real), n) for n, v in here or alike]
    best = max(scored, default=(0.0, ""), key=lambda t: t[0])
    return best[1] if here or best[0] >= min_sqnr else ""


def _first(layers: Sequence[Layer]) -> Layer | None:
    """Where the program leaves the model: the first harmful layer that has a twin, else the first harmful one."""
    harmful = [x for x in layers if not x.harmless]
    return next((x for x in harmful if x.twin), harmful[0] if harmful else None)


def relative_error(wanted: Array, got: Array) -> float:
    """Largest difference over the largest magnitude of what is wanted; equal inf and nan are equal.

    inf when sizes differ or a nan or inf stands where none should.
    """
    if wanted.size != got.size:
        return float("inf")
    if wanted.size == 0:
        return 0.0
    a, b = wanted.reshape(-1).astype(np.float64), got.reshape(-1).astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        difference = float(np.abs(a[finite] - b[finite]).max())
    if difference == 0.0:
        return 0.0
    return difference / max(float(np.abs(a[finite]).max()), 1e-30)


def _array(x: Any) -> Array:
    import torch

    if isinstance(x, torch.Tensor):
        x = x.detach().resolve_neg()
        return np.array((x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy())
    return np.asarray(x)


def _number(x: Any, wanted: bool) -> Any:
    return x.item() if wanted else x


def _evaluation(model: Any) -> Any:
    from trivet.tracing import evaluation

    return evaluation(model)
