"""Model and program side by side on the same data: errors of the results, and the first layer beyond tolerance.

The model runs operator by operator (its exported graph, interpreted by torch), the program with a tap on every command.
What a command wrote is matched with the value of an operator: first by name, then by content, since fusion and folding
make commands that stand for several operators. A command's value without counterpart is harmless when something correct
was computed from it; the first one for which that is not so is where the program leaves the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trivet.bench import find_entry
from trivet.error import Error
from trivet.reader import EntryView, Place
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
    """

    time: int
    place: Place
    value: str
    shape: tuple[int, ...]
    twin: str
    error: float
    harmless: bool


@dataclass(slots=True)
class Comparison:
    """What compare() found. outputs: the error of each result tensor; first: where the program leaves the model."""

    entry: str
    tolerance: float
    outputs: list[float]
    layers: list[Layer]
    first: Layer | None

    @property
    def ok(self) -> bool:
        return all(e <= self.tolerance for e in self.outputs)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        worst = max(self.outputs, default=0.0)
        lines = [f"entry {self.entry}: largest relative error of {len(self.outputs)} results {worst:.3g}, "
                 f"tolerance {self.tolerance:g}: {'ok' if self.ok else 'beyond'}"]  # fmt: skip
        if self.first is not None:
            f = self.first
            how = f"error {f.error:.3g} against {f.twin}" if f.twin else "nothing like it in the model"
            lines.append(f"first layer beyond tolerance: {f.place.brief or f.value} at {f.place.where or 'time ' + str(f.time)}"
                         f" ({f.value} {list(f.shape)}): {how}")  # fmt: skip
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """For tools."""

        def layer(x: Layer) -> dict[str, Any]:
            return {"time": x.time, "op": x.place.op, "module": x.place.module, "source": x.place.source,
                    "value": x.value, "shape": list(x.shape), "twin": x.twin,
                    "error": None if x.error != x.error else x.error, "harmless": x.harmless}  # fmt: skip

        return {"entry": self.entry, "ok": self.ok, "tolerance": self.tolerance, "outputs": self.outputs,
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
    errors = [relative_error(_array(w), _array(g))
              for w, g in zip(pytree.tree_leaves(wanted), pytree.tree_leaves(got), strict=True)
              if isinstance(w, (torch.Tensor, int, float))]  # fmt: skip
    found: list[Layer] = []
    first = None
    if layers:
        reference = trace(model, args, kwargs, dynamic_shapes)
        plan = file_view(method).entry(method.name)
        found = match(taps, reference, plan, tolerance)
        if not all(e <= tolerance for e in errors):
            first = _first(found, tolerance)
    return Comparison(method.name, tolerance, errors, found, first)


def trace(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any = None) -> dict[str, Array]:
    """The value of every operator of the model's exported graph on this data, by the node's name."""
    import torch
    from torch.utils import _pytree as pytree

    from trivet.importer import handlers
    from trivet.tracing import export_program

    program = export_program("forward", copy.deepcopy(model), copy.deepcopy(args), copy.deepcopy(kwargs) or None, dynamic_shapes,
                             handlers()).program  # fmt: skip
    values: dict[str, Array] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            out = super().run_node(n)
            if n.op == "call_function":
                parts = out if isinstance(out, (tuple, list)) else [out]
                for i, t in enumerate(parts):
                    if isinstance(t, torch.Tensor) and t.layout == torch.strided:
                        values[n.name if i == 0 else f"{n.name}.{i}"] = _array(t)
            return out

    module = program.module(check_guards=False)
    flat = pytree.tree_leaves((copy.deepcopy(args), copy.deepcopy(kwargs)))
    with torch.no_grad():
        Recorder(module).run(*flat, enable_io_processing=False)
    return values


def match(taps: Sequence[Tap], reference: Mapping[str, Array], plan: EntryView, tolerance: float) -> list[Layer]:
    """A Layer per tap, in order of execution; marks the harmless ones."""
    by_count: dict[int, list[tuple[str, Array]]] = {}
    for name, value in reference.items():
        by_count.setdefault(value.size, []).append((name, value))
    layers, sources = [], []
    writers: dict[int, list[int]] = {}  # storage: taps that wrote it
    for i, tap in enumerate(taps):
        inputs = [v for v in tap.command.inputs if v is not None]
        sources.append([w for v in inputs for w in writers.get(int(plan.values[v]["storage"]), [])])
        writers.setdefault(int(plan.values[tap.value]["storage"]), []).append(i)
        twin, error = _twin(tap, reference, by_count.get(tap.data.size, []), tolerance)
        layers.append(Layer(tap.command.time, plan.place(tap.command.time), tap.name or f"value {tap.value}",
                            tap.data.shape, twin, error, error <= tolerance))  # fmt: skip
    for i in range(len(layers) - 1, -1, -1):  # what something correct was computed from is harmless
        if layers[i].harmless:
            for j in sources[i]:
                layers[j].harmless = True
    return layers


def _twin(tap: Tap, reference: Mapping[str, Array], candidates: Iterable[tuple[str, Array]],
          tolerance: float) -> tuple[str, float]:  # fmt: skip
    """The operator whose value this is: by name, then by content. (name, error); ("", nan) when there is none."""
    best, error = "", float("nan")
    named = reference.get(tap.name)
    if named is not None and named.size == tap.data.size:
        best, error = tap.name, relative_error(named, tap.data)
        if error <= tolerance:
            return best, error
    flat = tap.data.reshape(-1)
    at = np.linspace(0, max(flat.size - 1, 0), min(_SAMPLES, flat.size), dtype=np.int64)
    few = flat[at]
    for name, value in candidates:
        if value.dtype.kind != flat.dtype.kind or relative_error(value.reshape(-1)[at], few) > 1e3 * tolerance:
            continue
        e = relative_error(value, tap.data)
        if e <= tolerance:
            return name, e
    return best, error


def _first(layers: Sequence[Layer], tolerance: float) -> Layer | None:
    """Where the program leaves the model: the first harmful layer that has a twin, else the first harmful one."""
    harmful = [x for x in layers if not x.harmless]
    return next((x for x in harmful if x.twin and x.error > tolerance), harmful[0] if harmful else None)


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
