"""From the words of a command line to a model with example arguments.

A model is named as PATH.pt2, or as MODULE:NAME or FILE.py:NAME, where NAME is a torch.nn.Module, a class that needs no
arguments, or a function without arguments. The function may return the module alone or a tuple
(module, args[, kwargs[, dynamic_shapes]]), or {entry: (module, args[, kwargs])}.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trivet.error import Error

_DTYPES = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i64": "int64", "i32": "int32",
           "i16": "int16", "i8": "int8", "u8": "uint8", "bool": "bool"}  # fmt: skip


@dataclass(slots=True)
class Source:
    """What to export. model: as for trivet.export."""

    model: Any
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    dynamic_shapes: Any = None


def find_model(spec: str, examples: Sequence[str] = (), dynamic: Sequence[str] = ()) -> Source:
    """The model behind a name, with examples and dynamic sizes from the command line in place of its own.

    Args:
        spec: PATH.pt2, MODULE:NAME or FILE.py:NAME.
        examples: one per argument, SHAPE or DTYPE:SHAPE, e.g. "1x3x224x224", "i64:1x16".
        dynamic: ARGUMENT.AXIS=[NAME:]MIN..MAX, the argument by position or name, e.g. "0.2=h:64..512".

    Raises:
        Error: no such file or name, or it is no model.
    """
    source = _find(spec)
    if examples:
        source.args = tuple(example(e) for e in examples)
        source.kwargs = None
    if dynamic:
        source.dynamic_shapes = dynamic_shapes(dynamic, source)
    return source


def _find(spec: str) -> Source:
    import torch

    if spec.endswith(".pt2"):
        if not Path(spec).is_file():
            raise Error(f"no such file: {spec}")
        return Source(spec)
    found = named(spec, "model", "write FILE.py:NAME, MODULE:NAME or FILE.pt2")
    if callable(found) and not isinstance(found, torch.nn.Module):
        found = _called(spec, found)
    if isinstance(found, (torch.nn.Module, torch.export.ExportedProgram, Mapping)):
        return Source(found)
    if isinstance(found, (tuple, list)) and 1 <= len(found) <= 4 and isinstance(found[0], torch.nn.Module):
        args = found[1] if len(found) > 1 else ()
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        return Source(found[0], args, found[2] if len(found) > 2 else None, found[3] if len(found) > 3 else None)
    raise Error(f"{spec} gives a {type(found).__name__}",
                remedy="return a torch.nn.Module, (module, args[, kwargs[, dynamic_shapes]]) or {entry: ...}")  # fmt: skip


def named(spec: str, what: str, remedy: str = "write FILE.py:NAME or MODULE:NAME") -> Any:
    """What FILE.py:NAME or MODULE:NAME names.

    Args:
        spec: the name.
        what: is expected, and remedy: how to name it, for messages.

    Raises:
        Error: no such file, module or name.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise Error(f"{spec!r} names no {what}", remedy=remedy)
    found: Any = _module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, dir(found), 1)
            raise Error(f"{where} has no {part!r}", remedy=f"is it {close[0]!r}?" if close else "")
        found = getattr(found, part)
    return found


def _called(spec: str, function: Any) -> Any:
    try:
        return function()
    except Error:
        raise
    except Exception as e:
        raise Error(f"{spec}() failed: {type(e).__name__}: {e}", remedy="it must work without arguments") from e


def calibration(spec: str, source: Source) -> Any:
    """Calibration batches behind a name: an iterable of argument tuples.

    Args:
        spec: FILE.npz with an array per argument, by name, else in order: one batch, or where arrays have one axis more than the
            example arguments, a batch per row. Or FILE.py:NAME, MODULE:NAME: an iterable, or a function that returns one.
        source: the model with its example arguments.

    Raises:
        Error: no such file or name, or arrays that do not match the arguments.
    """
    if not spec.endswith(".npz"):
        found = named(spec, "calibration data", "write FILE.npz, FILE.py:NAME or MODULE:NAME")
        return _called(spec, found) if callable(found) else found
    if isinstance(source.model, (str, Mapping)) or source.args is None:
        raise Error(f"{spec}: arrays go with one torch.nn.Module and its example arguments",
                    remedy="name a function that returns the batches: FILE.py:NAME")  # fmt: skip
    import numpy as np
    import torch

    try:
        with np.load(spec, allow_pickle=False) as z:
            data = {k: torch.from_numpy(z[k]) for k in z.files}
    except (OSError, ValueError) as e:
        raise Error(f"cannot read {spec}: {e}") from None
    names, examples = _argument_names(source), [*source.args, *(source.kwargs or {}).values()]
    arrays = [data[n] for n in names] if all(n in data for n in names) else list(data.values())
    if len(arrays) != len(examples):
        raise Error(f"{spec}: {len(examples)} arrays expected ({', '.join(names)}), got {', '.join(data)}")
    ranks = {a.ndim - getattr(x, "ndim", 0) for a, x in zip(arrays, examples, strict=True)}
    if ranks not in ({0}, {1}):
        raise Error(f"{spec}: arrays of the example arguments' rank, or all of one more axis, expected")
    batches = [arrays] if ranks == {0} else list(zip(*arrays, strict=False))
    args, keys = len(source.args), list(source.kwargs or {})
    return [(tuple(b[:args]), dict(zip(keys, b[args:], strict=True))) if keys else tuple(b) for b in batches]


def _module(where: str) -> Any:
    try:
        if not where.endswith(".py"):
            if "" not in sys.path:
                sys.path.insert(0, "")
            return importlib.import_module(where)
        path = Path(where).resolve()
        if not path.is_file():
            raise Error(f"no such file: {where}")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise Error(f"{where} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent))
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
        return module
    except Error:
        raise
    except Exception as e:
        raise Error(f"cannot import {where}: {type(e).__name__}: {e}") from e


def shape_of(text: str) -> tuple[int, ...]:
    """Sizes of a text: 1x3x224x224 -> (1, 3, 224, 224); empty or "scalar" -> ()."""
    if text in ("", "scalar"):
        return ()
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise Error(f"{text!r} is no shape", remedy="write sizes with x between them: 1x3x224x224")
    return tuple(int(n) for n in text.split("x"))


def example(text: str) -> Any:
    """A torch tensor for SHAPE or DTYPE:SHAPE: normal numbers for floats, zeros for the rest."""
    import torch

    dtype, _, shape = text.rpartition(":")
    name = _DTYPES.get(dtype or "f32", dtype)
    if name not in _DTYPES.values():
        raise Error(f"{dtype!r} is no dtype", remedy=f"dtypes: {', '.join(_DTYPES)}")
    t = getattr(torch, name)
    sizes = shape_of(shape)
    if t.is_floating_point:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(t)
    return torch.zeros(sizes, dtype=t)


def dynamic_shapes(words: Sequence[str], source: Source) -> Any:
    """torch's dynamic_shapes for ARGUMENT.AXIS=[NAME:]MIN..MAX; equal names are equal sizes."""
    from torch.export import Dim

    given: dict[str, dict[int, Any]] = {}
    dims: dict[str, Any] = {}
    for word in words:
        m = re.fullmatch(r"(\w+)\.(\d+)=(?:(\w+):)?(\d+)\.\.(\d*)", word)
        if m is None:
            raise Error(
                f"{word!r} is no dynamic size", remedy="write ARGUMENT.AXIS=MIN..MAX, e.g. 0.1=1..512 or ids.1=n:1..512"
            )
        argument, axis, name, low, high = m.groups()
        name = name or f"{'arg' if argument.isdigit() else ''}{argument}_{axis}"
        if name not in dims:
            dims[name] = Dim(name, min=int(low), max=int(high) if high else None)
        given.setdefault(argument, {})[int(axis)] = dims[name]
    names = _argument_names(source)
    by_name = {names[int(a)] if a.isdigit() and int(a) < len(names) else a: axes for a, axes in given.items()}
    if unknown := set(by_name) - set(names):
        raise Error(f"no argument {', '.join(sorted(unknown))}; arguments: {', '.join(names)}")
    return {n: by_name.get(n) for n in names}


def _argument_names(source: Source) -> list[str]:
    """The parameters of forward() that the example arguments fill."""
    import inspect

    if isinstance(source.model, (str, Mapping)):
        raise Error("dynamic sizes from the command line go with one torch.nn.Module",
                    remedy="return dynamic_shapes from the function")  # fmt: skip
    names = list(inspect.signature(source.model.forward).parameters)
    return [*names[: len(source.args or ())], *(source.kwargs or {})]
