"""From a module, an ExportedProgram or a .pt2 file to an ExportedProgram of functional operators that we have handlers for.

Nothing is copied: the parameters and buffers of the result are the module's own tensors.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivet import ao_capture, rnn_capture
from trivet.error import Error

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram


@dataclass(slots=True)
class Captured:
    """One entry on its way to the IR.

    Attributes:
        name: of the entry.
        program: after decomposition.
        forward: the module's forward(), for the names of arguments; None when a program was given.
        guards: conditions on sizes, as sympy relations over the symbols of the program.
        texts: the same as Python text over the arguments, in place of guards for a program that was loaded from a file.
    """

    name: str
    program: ExportedProgram
    forward: Any
    guards: list[Any]
    texts: list[str]


def export_program(name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None,
                   dynamic_shapes: Any, handled: Collection[str]) -> Captured:  # fmt: skip
    """Captures one entry.

    Args:
        name: of the entry, for messages.
        model: module, ExportedProgram, or path of a .pt2 file.
        args: example arguments (not used for a program or a file).
        kwargs: example keyword arguments.
        dynamic_shapes: as for torch.export.export.
        handled: operators that must stay whole.

    Raises:
        Error: torch.export's, in short.
    """
    program = trace(name, model, args, kwargs, dynamic_shapes)
    forward = getattr(model, "forward", None) if program is not model else None
    texts = list(getattr(program, "_guards_code", []))
    env = _shape_env(program)
    traced = len(env.guards) if env is not None else 0
    done = _decompose(name, program, handled)
    guards = _conditions(_shape_env(done), traced)
    return Captured(name, done, forward, guards, [] if traced else texts)


def trace(
    name: str, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic_shapes: Any
) -> ExportedProgram:
    """torch.export's program of one entry, nothing decomposed. Arguments and errors as of export_program."""
    import torch

    if dynamic_shapes is not None and not isinstance(model, torch.nn.Module):
        raise Error(f"entry {name!r}: dynamic_shapes belong to a module; an exported program has its own",
                    remedy="pass dynamic_shapes to torch.export.export, or give the module itself")  # fmt: skip
    if isinstance(model, (str, os.PathLike)):
        return _load(Path(model))
    if isinstance(model, torch.export.ExportedProgram):
        return model
    if isinstance(model, torch.nn.Module):
        return _export(name, model, args, kwargs, dynamic_shapes)
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise Error(f"entry {name!r}: {model.__name__} is a class; a module made of it is expected",
                    remedy=f"write {model.__name__}(...)")  # fmt: skip
    if callable(model):
        raise Error(f"entry {name!r}: a {type(model).__name__} cannot be exported",
                    remedy="wrap the function in a torch.nn.Module whose forward() calls it")  # fmt: skip
    raise Error(f"entry {name!r}: expected a torch.nn.Module, an ExportedProgram or the path of a .pt2 file, "
                f"got {type(model).__name__}")  # fmt: skip


def _load(path: Path) -> ExportedProgram:
    import torch

    if not path.is_file():
        raise Error(f"no such file: {path}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    except Exception as e:
        raise Error(f"{path} is no readable .pt2 file: {first_line(e)}",
                    remedy="write it with torch.export.save() of the same torch version") from e  # fmt: skip


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[bool]:
    """The module in eval mode; its own modes come back afterwards. Yields whether that changes what it computes."""
    modes = {m: m.training for m in model.modules()}
    try:
        model.eval()
    except NotImplementedError:  # a captured graph, prepared or converted by pt2e, refuses: it has one mode
        for m in modes:
            m.training = False
    try:
        yield any(training and _has_modes(m) for m, training in modes.items())
    finally:
        for m, training in modes.items():
            m.training = training


def _has_modes(m: torch.nn.Module) -> bool:
    """Whether a module of torch computes something else in training."""
    import torch

    if isinstance(m, torch.nn.modules.batchnorm._NormBase):
        return m.track_running_stats
    if isinstance(m, torch.nn.modules.dropout._DropoutNd):
        return m.p > 0
    return isinstance(m, (torch.nn.RNNBase, torch.nn.MultiheadAttention)) and bool(m.dropout)


def _export(name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None,
            dynamic_shapes: Any) -> ExportedProgram:  # fmt: skip
    import torch

    if not isinstance(args, (tuple, list)):
        raise Error(f"entry {name!r}: the example arguments must be a tuple, got {type(args).__name__}",
                    remedy="write (x,) for one argument")  # fmt: skip
    whole = rnn_capture.whole_rnns(), ao_capture.plain_linears()
    with evaluation(model) as trained, torch.no_grad(), whole[0], whole[1], quiet():
        if trained:
            warnings.warn("the model is in training mode; it is captured in eval mode (no dropout, stored statistics)",
                          UserWarning, stacklevel=_user_level())  # fmt: skip
        printed = io.StringIO()  # torch prints whole graphs to stderr before it raises
        try:
            with redirect_stderr(printed):
                program = torch.export.export(model, tuple(args), kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        except Error:
            raise
        except Exception as e:
            raise _explained(name, e) from e
        sys.stderr.write(printed.getvalue())
        return program


def _user_level() -> int:
    """For warnings.warn in the caller: the first frame that is not of this package."""
    here, level, frame = os.path.dirname(__file__) + os.sep, 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame, level = frame.f_back, level + 1
    return level


def _decompose(name: str, program: ExportedProgram, handled: Collection[str]) -> ExportedProgram:
    """Functionalises and decomposes, except what kernels do better whole."""
    import torch
    from torch.export import default_decompositions

    table: Any = default_decompositions()
    table.update(rnn_capture.decompositions())
    for op in list(table.keys()):
        if str(op) in handled:
            table.pop(op)
    try:
        with torch.no_grad(), quiet():
            decomposed: ExportedProgram = program.run_decompositions(table)
            return decomposed
    except Exception as e:
        refuse_views(program, e)
        raise _explained(name, e) from e


def refuse_views(
    program: ExportedProgram, cause: Exception | None = None, written: Collection[Key] | None = None
) -> None:
    """Raises when a buffer that is written (None: any) shares memory with another parameter or buffer.

    Eager sees a write in both; an exported program does not.
    """
    if written is not None and not written:
        return
    by_storage: dict[Any, list[tuple[str, Key]]] = {}
    for name, t in {**program.state_dict, **program.constants}.items():
        if hasattr(t, "untyped_storage") and t.numel():
            by_storage.setdefault(key_of(t)[0], []).append((name, key_of(t)))
    for group in by_storage.values():
        for a, ka in group if len(group) > 1 else ():
            for b, kb in group:
                if ka != kb and (written is None or ka in written) and _overlap(ka, kb):
                    raise Error(f"buffer {a!r} is written, and {b!r} is a view of the same memory",
                                remedy="register one of them only, and make the view in forward()") from cause  # fmt: skip


Key = tuple[Any, ...]


def key_of(t: torch.Tensor) -> Key:
    """Equal for tensors that are the same memory in the same form."""
    if t.numel() == 0:
        return (id(t),)
    return (t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)


def _overlap(a: Key, b: Key) -> bool:
    """Whether the address ranges of two tensors of one storage meet."""

    def span(k: Key) -> tuple[int, int]:
        last = k[1] + sum((d - 1) * s for d, s in zip(k[2], k[3], strict=True))
        return int(k[1]) * k[4].itemsize, int(last + 1) * k[4].itemsize

    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1


def _shape_env(program: ExportedProgram) -> Any:
    """torch's record of symbolic sizes, None for a program without tensor inputs."""
    for node in program.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.shape_env
    return None


# Where torch asks about sizes only to choose strides: what it finds there says nothing about results.
_LAYOUT = re.compile(r"_prims_common.*(contiguous|stride|should_swap|dense|channels_last|\bge$|physical_perm)|"
                     r"_reshape_view_helper_core_alg$")  # fmt: skip


def _conditions(env: Any, traced: int) -> list[Any]:
    """The conditions that results depend on. traced: how many guards there were before decomposition."""
    out = []
    for i, guard in enumerate(env.guards if env is not None else ()):
        place = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        file, function = getattr(place, "filename", ""), getattr(place, "name", "")
        if _LAYOUT.search(f"{file} {function}"):
            continue
        inner = os.sep + "_decomp" + os.sep in file or os.sep + "_refs" + os.sep in file
        if i >= traced and not inner and _one_or_more(guard.expr):
            continue  # the second trace asks in C++, again for strides; what matters came up in the first
        out.append(env.replace(guard.expr))
    return out


def _one_or_more(expr: Any) -> bool:
    """Whether a relation only says that a size is not 0 or 1."""
    kind, limit = type(expr).__name__, getattr(expr, "rhs", None)
    return (kind == "Unequality" and limit in (0, 1)) or (kind == "StrictGreaterThan" and limit == 1) or (
        kind == "GreaterThan" and limit == 2)  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Hides warnings and log lines of torch.export about its own inner workings."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*were assigned during export.*")
        warnings.filterwarnings("ignore", message=".*RNN module weights are not part of single contiguous chunk.*")
        warnings.filterwarnings("ignore", module=r"torch\..*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        try:
            yield
        finally:
            logging.disable(level)


# ---- messages -----------------------------------------------------------------------------------------------------------
_REMEDIES: tuple[tuple[str, str], ...] = (
    (r"Constraints violated|specialized|not all values of|inferred to be a constant",
     "give the dimension that torch.export names a fixed size or the range it suggests, or Dim.AUTO"),
    (r"data-dependent|GuardOnDataDependentSymNode|unbacked|Could not guard",
     "branch with torch.cond or torch.where, or state the range with torch._check()"),
    (r"Unsupported input type .*numpy", "pass torch tensors as example arguments: torch.from_numpy(x)"),
    (r"numpy|\.item\(\)", "keep the computation in torch operators"),
    (r"missing a required argument|missing \d+ required|too many positional|unexpected keyword|takes \d+ positional",
     "pass the example arguments that forward() takes"),
    (r"dynamic_shapes|^IndexError: list assignment",
     "dynamic_shapes must have the structure of the arguments, and axes that they have"),
)  # fmt: skip


def _explained(name: str, e: Exception) -> Error:
    """torch.export's failure in two lines: reason and the user's line."""
    text = f"{type(e).__name__}: {e}"
    remedy = next(
        (r for pattern, r in _REMEDIES if re.search(pattern, text)),
        "see whether model(*args) works with these arguments, then torch.export.export(model, args, strict=False)",
    )
    where = user_line_of_exception(e)
    return Error(f"entry {name!r}: torch.export cannot capture it: {first_line(e)}", node=where, remedy=remedy)


def first_line(e: BaseException, width: int = 300) -> str:
    """What an exception says, without the listings that follow."""
    lines = []
    for line in str(e).splitlines():
        if re.match(r"\s*(File \"|from user code|Caused by|For more information|The following call|Traceback)", line):
            break
        if line.strip():
            lines.append(line.strip())
    text = " ".join(lines)
    text = text if len(text) <= width else text[: width - 3] + "..."
    return f"{type(e).__name__}: {text}" if text else type(e).__name__


def user_line_of_exception(e: BaseException) -> str:
    """The innermost frame of the user's code as "file.py:12", "" when there is none."""
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(e.__traceback__)]
    frames += [(m[1], int(m[2])) for m in _FRAME.finditer(str(e))]
    return _innermost(frames)


def user_line(stack_trace: str | None) -> str:
    """The same from node.meta["stack_trace"]."""
    return _innermost([(m[1], int(m[2])) for m in _FRAME.finditer(stack_trace or "")])


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _innermost(frames: list[tuple[str, int]]) -> str:
    import torch

    ours = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep, "<")
    for file, line in reversed(frames):
        if not file.startswith(ours) and f"{os.sep}lib{os.sep}python" not in file.split("site-packages")[0]:
            return f"{_short(file)}:{line}"
        if "site-packages" in file and not file.startswith(ours):
            return f"{_short(file)}:{line}"
    return ""


def _short(file: str) -> str:
    """Relative to the working directory, to site-packages, or the bare name: machine paths stay out of programs."""
    here = os.getcwd() + os.sep
    if file.startswith(here):
        return file[len(here) :]
    if "site-packages" + os.sep in file:
        return file.split("site-packages" + os.sep)[-1]
    return os.path.basename(file)
