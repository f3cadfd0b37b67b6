"""Recipes: what is stored in how many bits, as data.

A `Spec` describes one kind of stored value, a `Recipe` a whole model: its weights, its activations, and what is different in some
modules or for some operators. `recipe("w8a8")` makes the usual ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from trivet.error import Error

DTYPES = {"i8": 8, "i16": 16, "i4": 4}
GRANULARITIES = ("tensor", "channel", "group", "row")
OBSERVERS = ("minmax", "percentile", "mse", "histogram")
HALVES = ("f16", "bf16")
KNOWN = "w8a8, w8a8-dynamic, w8a16, w8, w4g32 (any multiple of 8), w4g32a8, f16, bf16"


@dataclass(frozen=True, slots=True)
class Spec:
    """How values are stored: real = scale * (stored - zero).

    Attributes:
        dtype: "i8"; "i16" (activations only); "i4" (weights only).
        symmetric: zero is 0; symmetric weights use -127..127 in 8 bits, symmetric activations too.
        granularity: what shares a scale: "tensor"; "channel": each output channel of a weight; "group": each run of `group` inputs of
            an output channel; "row": each row of an activation, while the program runs.
        group: see granularity.
        observer: how the range is chosen: "minmax": all values seen; "percentile": cuts off the same share of values at both ends;
            "mse": the range with the least squared error; "histogram": torchao's search for that.
        percentile: of "percentile": share of the values, in %, that lie inside.
        bins: of "histogram".
        dynamic: ranged while the program runs, without calibration.
    """

    dtype: str = "i8"
    symmetric: bool = True
    granularity: str = "tensor"
    group: int = 0
    observer: str = "minmax"
    percentile: float = 99.99
    bins: int = 2048
    dynamic: bool = False

    def __post_init__(self) -> None:
        _types(self)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("granularity", self.granularity, GRANULARITIES)
        _one_of("observer", self.observer, OBSERVERS)
        if (self.granularity == "group") != (self.group != 0):
            raise Error(f"group={self.group} with granularity {self.granularity!r}",
                        remedy="write granularity='group' and group=32, or neither")  # fmt: skip
        if self.group and (self.group < 8 or self.group % 8):
            raise Error(f"group={self.group}: a group is a multiple of 8 values")
        if not 50 < self.percentile <= 100:
            raise Error(f"percentile={self.percentile}: a share above 50 and up to 100 (in %) is expected")
        if not 16 <= self.bins <= 1 << 20:
            raise Error(f"bins={self.bins}: from 16 to 1048576 are possible")
        if self.granularity != "tensor" and self.observer not in ("minmax", "mse"):
            raise Error(f"observer {self.observer!r} works per tensor only", remedy="use 'minmax' or 'mse'")
        if self.dynamic and self.observer != "minmax":
            raise Error(f"observer {self.observer!r} needs calibration; dynamic ranges are minimum and maximum")

    @property
    def limits(self) -> tuple[int, int]:
        """Least and largest stored number."""
        top = (1 << (DTYPES[self.dtype] - 1)) - 1
        return (-top, top) if self.symmetric and self.dtype != "i4" else (-top - 1, top)

    def to_json(self) -> dict[str, Any]:
        """Plain data; fields with their default values are left out."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Spec:
        """What to_json gave. Raises Error for other data."""
        return Spec(**_known(Spec, data))

    def __str__(self) -> str:
        if self.granularity == "group":
            share = f"groups of {self.group}"
        else:
            share = f"per {self.granularity}"
        kind = "symmetric" if self.symmetric else "affine"
        more = f" {self.percentile:g}" if self.observer == "percentile" else ""
        return f"{self.dtype} {kind} {share}, {'dynamic' if self.dynamic else self.observer + more}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is quantised.

    Attributes:
        weight: of convolutions, matrix products, recurrent layers and embeddings; None: they stay float. Where a target has no kernel for
            4-bit weights (convolutions), 8 bits are used.
        activation: of the values between integer operators; None: float, and only weights are stored small.
        rules: what is different, {pattern: Recipe, name of one, or None (stays float)}; kept as pairs. A pattern is a module path, in which
            * and ? stand for text, and means everything inside of that module too ("encoder.layers.*.norm1", "head"); "op:" and a kind
            of operator ("op:softmax"); or "node:" and the name of one operator in the exported graph ("node:linear_3"), as reports give
            it. The last rule that fits wins. Of a rule's recipe only weight and activation count.
        bias_correction: makes up for the mean error of each channel, as seen on the calibration data.
        data_rounding: rounds weights so that results are near on the calibration data, where few inputs go into an output.
        equalize: shifts scale between neighbouring layers, where the function stays the same, so that channels have like ranges.
        equalize_relu6: also across relu6, where it clips nothing that the calibration data holds.
        quantize_io: inputs and outputs of the program are stored integers, where integer operators read or make them; with half,
            16-bit floats.
        half: "f16" or "bf16": 16-bit floats in place of all this.
    """

    weight: Spec | None = None
    activation: Spec | None = None
    rules: tuple[tuple[str, Recipe | None], ...] = ()
    bias_correction: bool = False
    data_rounding: bool = False
    equalize: bool = False
    equalize_relu6: bool = False
    quantize_io: bool = False
    half: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", _rules(self.rules))
        _types(self, skip=("rules",))
        if self.half:
            _one_of("half", self.half, HALVES)
            if self.weight is not None or self.activation is not None:
                raise Error(f"half={self.half!r} together with weight or activation: one of them is possible")
        if self.weight is not None:
            _check_weight(self.weight)
        if self.activation is not None:
            _check_activation(self.activation)
            if self.weight is None:
                raise Error("a recipe with activation needs weight: integer operators have integer weights",
                            remedy="add weight=Spec('i8', granularity='channel')")  # fmt: skip
            if not self.activation.dynamic and (not self.weight.symmetric or self.weight.group):
                raise Error("static activations go with symmetric weights per channel or tensor",
                            remedy="take a dynamic activation or none, or drop group and symmetric=False of weight")  # fmt: skip
        static = self.static or any(r is not None and r.static for _, r in self.rules)
        for option in ("bias_correction", "data_rounding", "equalize", "quantize_io"):
            if getattr(self, option) and not static and not (self.half and option == "quantize_io"):
                raise Error(f"{option} goes with activations of calibrated range only")
        if self.equalize_relu6 and not self.equalize:
            raise Error("equalize_relu6 belongs to equalize=True")

    @property
    def static(self) -> bool:
        """True when activations are stored with ranges that calibration finds."""
        return self.activation is not None and not self.activation.dynamic

    @property
    def calibrated(self) -> bool:
        """True when some part of the model needs calibration data."""
        return self.static or any(r is not None and r.static for _, r in self.rules)

    def at(self, module: str, op: str, node: str = "") -> Recipe | None:
        """What counts for an operator of kind op, called node, in the module of that path; None: it stays float."""
        found: Recipe | None = self
        for pattern, r in self.rules:
            if matches(pattern, module, op, node):
                found = r
        return found

    def keep(self, patterns: Mapping[str, Recipe | str | None] | tuple[str, ...] | list[str]) -> Recipe:
        """This recipe with rules added: {pattern: recipe}, or patterns of what stays float."""
        more = patterns if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
        return replace(self, rules=self.rules + _rules(more))

    @property
    def name(self) -> str:
        """Of the preset that it is, "" for others."""
        for name in ("w8a8", "w8a8-dynamic", "w8a16", "w8", *HALVES):
            if recipe(name) == self:
                return name
        group = self.weight.group if self.weight is not None else 0
        for name in (f"w4g{group}", f"w4g{group}a8") if group else ():
            if recipe(name) == self:
                return name
        return ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, from_json reads it."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "rules":
                value = [[p, None if r is None else r.to_json()] for p, r in value]
            elif isinstance(value, Spec):
                value = value.to_json()
            if value != (list(f.default) if f.name == "rules" else f.default):  # type: ignore[arg-type]
                out[f.name] = value
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | str) -> Recipe:
        """What to_json gave, or its text.

        Raises:
            Error: data that is no recipe.
        """
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except (ValueError, RecursionError) as e:
                raise Error(f"this is no recipe: {e}") from None
        values = _known(Recipe, data)
        for name in ("weight", "activation"):
            if values.get(name) is not None:
                values[name] = Spec.from_json(values[name])
        try:
            pairs = [(p, None if r is None else Recipe.from_json(r)) for p, r in values.get("rules", ())]
        except (TypeError, ValueError) as e:
            raise Error(f"these are no rules of a recipe: {e}") from None
        return Recipe(**{**values, "rules": tuple(pairs)})

    def __str__(self) -> str:
        base = replace(self, rules=()) if self.rules else self
        if name := base.name:
            lines = [name]
        else:
            lines = [f"weights {self.weight or 'float'}; activations {self.activation or 'float'}"]
            lines += [f"  {o}" for o in self._options]
        return "\n".join(lines + [f"  {p}: {'float' if r is None else r}" for p, r in self.rules])

    @property
    def _options(self) -> list[str]:
        names = ("bias_correction", "data_rounding", "equalize", "equalize_relu6", "quantize_io")
        return [n for n in names if getattr(self, n)]


def matches(pattern: str, module: str, op: str, node: str = "") -> bool:
    """Whether a rule's pattern means an operator: see Recipe.rules. A path of "" is the model itself."""
    if pattern.startswith("op:"):
        return fnmatchcase(op, pattern[3:])
    if pattern.startswith("node:"):
        return fnmatchcase(node, pattern[5:])
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(len(parts) + 1))


def check_rules(r: Recipe, modules: Collection[str], kinds: Collection[str], nodes: Collection[str] = ()) -> None:
    """Refuses a rule that means nothing in a model: with a misspelt path, what should stay float would be quantised silently.

    Args:
        r: the recipe.
        modules: paths of all operators.
        kinds: of operators that rules may name, in this model or not.
        nodes: names of all operators.

    Raises:
        Error: naming the rule and what comes near it.
    """
    for pattern, _ in r.rules:
        scheme, _, name = pattern.rpartition(":") if pattern.startswith(("op:", "node:")) else ("", "", pattern)
        known = {"op": kinds, "node": nodes, "": modules}[scheme]
        if not any(matches(pattern, x, x, x) for x in known):
            near = get_close_matches(name, known, 3, 0.3)
            what = {"op": "kind of operator", "node": "operator", "": "module"}[scheme]
            raise Error(f"the rule for {pattern!r} means no {what} of this model",
                        remedy=f"near it: {', '.join(near)}" if near else "print the report of an export without rules")  # fmt: skip


# ---- presets ------------------------------------------------------------------------------------------------------------


def recipe(given: str | Recipe | None) -> Recipe:
    """A recipe by name: w8a8, w8a8-dynamic, w8a16, w8, w4g<n>, w4g<n>a8, f16, bf16; a Recipe comes back as it is.

    Raises:
        Error: an unknown name.
    """
    if isinstance(given, Recipe):
        return given
    if not isinstance(given, str):
        raise Error(f"quantize must be a name or a trivet.Recipe, got {type(given).__name__}", remedy=f"known: {KNOWN}")
    if given == "w8a8":
        return Recipe(W8, Spec("i8", symmetric=False, observer="mse"), bias_correction=True, data_rounding=True)
    if given == "w8a8-dynamic":
        return Recipe(W8, ROWS)
    if given == "w8a16":
        return Recipe(W8, Spec("i16"), bias_correction=True, data_rounding=True)
    if given == "w8":
        return Recipe(W8)
    if given in HALVES:
        return Recipe(half=given)
    match = re.fullmatch(r"w4g(\d{1,6})(a8)?", given)
    if match is None:
        raise Error(f"there is no recipe {given!r}", remedy=f"known: {KNOWN}")
    if not int(match[1]):
        raise Error(f"{given}: a group is a multiple of 8 values", remedy=f"known: {KNOWN}")
    weight = Spec("i4", granularity="group", group=int(match[1]), observer="mse")
    return Recipe(weight, ROWS if match[2] else None)


# ---- validation ---------------------------------------------------------------------------------------------------------
def _check_weight(s: Spec) -> None:
    if s.dtype == "i16":
        raise Error("weights are stored in 8 or 4 bits, not 16", remedy="dtype 'i8', or half='f16' for 16-bit floats")
    if s.dynamic or s.granularity == "row":
        raise Error("weights do not change while the program runs: granularity 'tensor', 'channel' or 'group'")
    if not s.symmetric and not s.group:
        raise Error("affine weights come in groups only", remedy="symmetric=True, or granularity='group'")


def _check_activation(s: Spec) -> None:
    if s.dtype == "i4":
        raise Error("activations are stored in 8 or 16 bits, not 4")
    if s.dtype == "i16" and not s.symmetric:
        raise Error("16-bit activations are symmetric", remedy="symmetric=True")
    if s.granularity != ("row" if s.dynamic else "tensor"):
        raise Error(f"{'dynamic' if s.dynamic else 'calibrated'} activations have a scale per {'row' if s.dynamic else 'tensor'}, "
                    f"not per {s.granularity}", remedy="granularity='row' and dynamic=True, or granularity='tensor'")  # fmt: skip
    if s.dynamic and s.dtype != "i8":
        raise Error("dynamic activations are stored in 8 bits")


def _rules(given: Any) -> tuple[tuple[str, Recipe | None], ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    out = []
    try:
        for pattern, r in pairs:
            if not isinstance(pattern, str) or pattern in ("op:", "node:"):
                raise Error(f"the pattern of a rule is a module path, 'op:kind' or 'node:name', got {pattern!r}")
            out.append((pattern, None if r is None or r == "float" else recipe(r)))
    except (TypeError, ValueError):
        raise Error(f"rules are {{pattern: recipe}}, got {given!r}") from None
    for pattern, r in out:
        if r is not None and (r.rules or r.half):
            raise Error(f"the rule for {pattern!r} has {'rules of its own' if r.rules else 'half'}",
                        remedy="a rule says weight and activation; write nested rules one after the other")  # fmt: skip
    return tuple(out)


def _types(x: Any, skip: tuple[str, ...] = ()) -> None:
    """Checks field types by those of the defaults (Spec | None where the default is None)."""
    for f in fields(x):
        value = getattr(x, f.name)
        if f.name in skip:
            continue
        if f.default is None:
            good = value is None or isinstance(value, Spec)
            want = "a Spec or None"
        elif isinstance(f.default, float):
            good, want = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
        else:
            good, want = type(value) is type(f.default), type(f.default).__name__
        if not good:
            raise Error(f"{f.name} of a {type(x).__name__} must be {want}, got {value!r}")


def _one_of(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise Error(f"{name}={value!r}", remedy=f"known: {', '.join(allowed)}")


def _known(kind: Any, data: Any) -> dict[str, Any]:
    names = {f.name for f in fields(kind) if f.default is not MISSING}
    if not isinstance(data, Mapping) or (extra := sorted(set(data) - names)):
        raise Error(
            f"this is no {kind.__name__}: "
            + (f"unknown {', '.join(extra)}" if isinstance(data, Mapping) else f"{data!r}")
        )
    return dict(data)


W8 = Spec("i8", granularity="channel")
ROWS = Spec("i8", granularity="row", dynamic=True)
