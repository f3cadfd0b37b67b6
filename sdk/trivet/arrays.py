"""Between the caller's arrays (numpy, torch, DLPack, Python numbers) and the memory that a session binds.

An input is taken where it lies when it is dense row-major, native-endian, aligned CPU memory; otherwise it is copied to
that form. Nothing is ever cast: another dtype is an error. torch is used only when the caller used it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trivet import native
from trivet.error import Error
from trivet.fbs.structs import DType

NUMPY: dict[DType, np.dtype[Any]] = {DType.bool: np.dtype(np.bool_), DType.u8: np.dtype(np.uint8), DType.i8: np.dtype(np.int8),
         DType.i16: np.dtype(np.int16), DType.i32: np.dtype(np.int32), DType.i64: np.dtype(np.int64),
         DType.f16: np.dtype(np.float16), DType.f32: np.dtype(np.float32), DType.f64: np.dtype(np.float64)}  # fmt: skip
_FROM_NUMPY: dict[tuple[str, int], DType] = {(d.kind, d.itemsize): k for k, d in NUMPY.items()}
ITEMSIZE: dict[DType, int] = {d: 2 if d == DType.bf16 else NUMPY[d].itemsize for d in DType if d != DType.none}
_FLOATS = (DType.f16, DType.bf16, DType.f32, DType.f64)
LONG = {DType.bool: "bool", DType.u8: "uint8", DType.i8: "int8", DType.i16: "int16", DType.i32: "int32",
        DType.i64: "int64", DType.f16: "float16", DType.bf16: "bfloat16", DType.f32: "float32",
        DType.f64: "float64"}  # fmt: skip
_CPU = (1, 0)  # DLPack's device pair
_PAD = np.zeros(256, np.uint8)  # where empty arrays point: a session wants an address
EMPTY = int(_PAD.ctypes.data + 127 & ~127)

_torch_codes: dict[Any, DType] = {}
_torch_dtypes: dict[DType, Any] = {}


@dataclass(frozen=True, slots=True)
class Slot:
    """An input or output position of an entry. value: its id in the plan; low, high: range of each axis, equal where
    static.
    """

    index: int
    name: str
    dtype: DType
    value: int
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.low)

    @property
    def static(self) -> bool:
        return self.low == self.high

    def __str__(self) -> str:
        dims = ", ".join(span(a, b) for a, b in zip(self.low, self.high, strict=True))
        return f"{self.name or self.index}: {LONG[self.dtype]}[{dims}]"


@dataclass(slots=True)
class Buffer:
    """Dense memory to bind. keep: what owns it; container: "torch", "numpy" or "" (a Python number)."""

    address: int
    shape: tuple[int, ...]
    nbytes: int
    keep: Any
    container: str


def span(low: int, high: int) -> str:
    """A range as people write it: 3, 1..512, 2.. (no upper bound)."""
    return str(low) if low == high else f"{low}..{high}" if high < 1 << 61 else f"{low}.."


def torch_module() -> Any:
    """Torch if the process has imported it, else None: a torch tensor cannot exist without."""
    torch = sys.modules.get("torch")
    if torch is not None and not _torch_codes and hasattr(torch, "bfloat16"):
        for code, name in LONG.items():
            _torch_codes[getattr(torch, name)] = code
            _torch_dtypes[code] = getattr(torch, name)
    return torch


def torch_dtype(code: DType) -> Any:
    """Torch's dtype; only where torch_module() is there."""
    torch_module()
    return _torch_dtypes[code]


def dtype_name(x: Any) -> str:
    """The dtype of an array for messages, without the library's prefix."""
    return str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch.")


# ---- inputs ---------------------------------------------------------------------------------------------------------------
def accept(x: Any, slot: Slot) -> Buffer:
    """Memory of an input for a slot; checks dtype and device (sizes: check_shape).

    Raises:
        Error: naming the input, what was expected and what came.
    """
    torch = torch_module()
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(x, slot)
    if isinstance(x, np.ndarray):
        return _from_numpy(x, slot, "numpy")
    if isinstance(x, (bool, int, float)):
        return _from_number(x, slot)
    if isinstance(x, np.generic):
        return _from_numpy(np.asarray(x), slot, "numpy")
    if hasattr(x, "__dlpack__") or type(x).__name__ == "PyCapsule":
        return _from_dlpack(x, slot)
    remedy = "pass a numpy array, a torch tensor or an object with __dlpack__"
    if isinstance(x, (list, tuple)) and slot.dtype != DType.bf16:
        remedy += f", e.g. numpy.asarray(x, numpy.{LONG[slot.dtype]})"
    raise Error(f"expected a {LONG[slot.dtype]} tensor of rank {slot.rank}, got {type(x).__name__}", node=_where(slot),
                remedy=remedy)  # fmt: skip


def _where(slot: Slot) -> str:
    return f"input {slot.index}" + (f" '{slot.name}'" if slot.name else "")


def _wrong_dtype(x: Any, slot: Slot, how: str) -> Error:
    want = LONG[slot.dtype]
    return Error(f"dtype {want} expected, got {dtype_name(x)}", node=_where(slot), remedy=f"convert it: {how}")


def check_shape(shape: Sequence[int], slot: Slot) -> None:
    """Rank and the range of every axis.

    Raises:
        Error: e.g. "axis 1: expected 1..512, got 600".
    """
    if len(shape) != slot.rank:
        dims = ", ".join(span(a, b) for a, b in zip(slot.low, slot.high, strict=True))
        raise Error(f"rank {slot.rank} expected ([{dims}]), got {len(shape)} ({list(shape)})", node=_where(slot))
    for axis, (n, low, high) in enumerate(zip(shape, slot.low, slot.high, strict=True)):
        if not low <= n <= high:
            how = (
                "" if low == high else "inside the range that dynamic_shapes gave at export, or export with a wider one"
            )
            raise Error(f"axis {axis}: expected {span(low, high)}, got {n}", node=_where(slot),
                        remedy=f"pass a size {how}" if how else "")  # fmt: skip


def _from_torch(x: Any, slot: Slot) -> Buffer:
    torch = torch_module()
    if x.layout is not torch.strided or x.is_nested:
        raise Error(f"a dense tensor expected, got layout {x.layout}", node=_where(slot), remedy="x.to_dense()")
    if x.device.type != "cpu":
        raise Error(f"a tensor in CPU memory expected, got device {x.device}", node=_where(slot), remedy="x.cpu()")
    if _torch_codes.get(x.dtype) != slot.dtype:
        raise _wrong_dtype(x, slot, f"x.to(torch.{LONG[slot.dtype]})")
    address, item = x.data_ptr(), ITEMSIZE[slot.dtype]
    if not x.is_contiguous() or address % item or x.is_neg():
        y = x.detach().resolve_neg().contiguous()
        x = y.clone() if y.data_ptr() % item else y
        address = x.data_ptr()
    return Buffer(address or EMPTY, tuple(x.shape), x.numel() * item, x, "torch")


def _address(x: np.ndarray[Any, Any]) -> int:
    """Where a dense array lies; __array_interface__ would say it too, in five times the time."""
    if x.nbytes == 0:
        return EMPTY
    ffi = native.library().ffi
    return int(ffi.cast("uintptr_t", ffi.from_buffer(x)))


def _from_numpy(x: np.ndarray[Any, Any], slot: Slot, container: str) -> Buffer:
    if slot.dtype == DType.bf16:
        raise Error(f"dtype bfloat16 expected, got {dtype_name(x)}: numpy has no bfloat16", node=_where(slot),
                    remedy="pass a torch.bfloat16 tensor, or another library's bfloat16 array through DLPack")  # fmt: skip
    if _FROM_NUMPY.get((x.dtype.kind, x.dtype.itemsize)) != slot.dtype:
        raise _wrong_dtype(x, slot, f"x.astype(numpy.{LONG[slot.dtype]})")
    if type(x) is not np.ndarray and isinstance(x, np.ma.MaskedArray):  # to name numpy.ma is to import it
        raise Error("a plain array expected, got a masked one", node=_where(slot), remedy="x.filled(value)")
    if not x.flags.c_contiguous or not x.flags.aligned or not x.dtype.isnative:
        x = np.array(x, dtype=NUMPY[slot.dtype], order="C", copy=True, subok=False)
    return Buffer(_address(x), x.shape, x.nbytes, x, container)


def _from_number(x: bool | int | float, slot: Slot) -> Buffer:
    check_shape((), slot)  # a number for a tensor of higher rank is the mistake to name
    kind = "bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float"
    fits = {"bool": slot.dtype == DType.bool, "int": slot.dtype != DType.bool, "float": slot.dtype in _FLOATS}[kind]
    if not fits:
        raise _wrong_dtype(x, slot, f"pass a number or a 0-d tensor of {LONG[slot.dtype]}")
    if slot.dtype == DType.bf16:
        bits = np.array(x, np.float32).view(np.uint32)
        rounded = bits if x != x else (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        y = (rounded >> np.uint32(16)).astype(np.uint16)
    else:
        try:
            y = np.array(x, NUMPY[slot.dtype])
        except OverflowError:
            raise Error(f"a number that {LONG[slot.dtype]} can hold expected, got {x}", node=_where(slot)) from None
    return Buffer(y.__array_interface__["data"][0], (), y.nbytes, y, "")


class _Capsule:
    """A bare DLPack capsule as the object that consumers want."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU


def _from_dlpack(x: Any, slot: Slot) -> Buffer:
    if type(x).__name__ == "PyCapsule":
        x = _Capsule(x)
    elif (device := tuple(int(v) for v in x.__dlpack_device__()))[0] not in (1, 3):  # CPU, pinned CPU memory
        raise Error(f"CPU memory expected, got DLPack device {device}", node=_where(slot), remedy="copy it to the CPU")
    if slot.dtype == DType.bf16:
        import torch.utils.dlpack

        torch_module()
        return _from_torch(torch.utils.dlpack.from_dlpack(x), slot)
    try:
        return _from_numpy(np.from_dlpack(x), slot, "numpy")
    except (BufferError, RuntimeError, TypeError, ValueError) as e:
        raise Error(
            f"a DLPack array of {LONG[slot.dtype]} expected; numpy cannot read it: {e}", node=_where(slot)
        ) from None


# ---- outputs --------------------------------------------------------------------------------------------------------------
def allocate(container: str, dtype: DType, shape: tuple[int, ...]) -> Buffer:
    """Fresh memory of the caller's kind."""
    if container == "torch":
        torch = torch_module()
        t = torch.empty(shape, dtype=torch_dtype(dtype))
        return Buffer(t.data_ptr() or EMPTY, shape, t.numel() * ITEMSIZE[dtype], t, "torch")
    a = np.empty(shape, NUMPY[dtype])
    return Buffer(_address(a), shape, a.nbytes, a, "numpy")


def check_outputs(slots: Sequence[Slot], container: str) -> None:
    """Whether the container can hold every output.

    Raises:
        Error: bfloat16 for numpy.
    """
    if container == "numpy":
        for s in slots:
            if s.dtype == DType.bf16:
                raise Error("the output is bfloat16, which numpy has not", node=f"output {s.index} '{s.name}'",
                            remedy="pass the inputs as torch tensors, then the outputs are torch tensors")  # fmt: skip


def accept_out(x: Any, slot: Slot, shape: tuple[int, ...]) -> Buffer:
    """Memory of a caller's out= array, which must fit exactly: it is written in place.

    Raises:
        Error: another dtype, shape, layout; not writable.
    """
    node = f"output {slot.index} '{slot.name}'"
    torch = torch_module()
    is_torch = torch is not None and isinstance(x, torch.Tensor)
    if not is_torch and not isinstance(x, np.ndarray):
        raise Error(f"out= takes a numpy array or a torch tensor, got {type(x).__name__}", node=node)
    code = _torch_codes.get(x.dtype) if is_torch else _FROM_NUMPY.get((x.dtype.kind, x.dtype.itemsize))
    if code != slot.dtype:
        raise Error(f"out=: dtype {LONG[slot.dtype]} expected, got {dtype_name(x)}", node=node)
    if tuple(x.shape) != shape:
        raise Error(f"out=: shape {list(shape)} expected, got {list(x.shape)}", node=node)
    size = x.nbytes
    if is_torch:
        fits = x.device.type == "cpu" and x.layout == torch.strided and x.is_contiguous() and not x.is_neg()
        fits = fits and not (x.requires_grad and torch.is_grad_enabled())
        address = x.data_ptr() if fits else 0
    else:
        fits = x.flags.c_contiguous and x.flags.aligned and x.flags.writeable and x.dtype.isnative
        address = x.__array_interface__["data"][0]
    if not fits or address % ITEMSIZE[slot.dtype]:
        raise Error("out=: dense, row-major, aligned, writable CPU memory without gradient expected", node=node)
    return Buffer(address or EMPTY, shape, size, x, "torch" if is_torch else "numpy")


def check_overlap(inputs: Sequence[Buffer], outs: Sequence[tuple[int, Buffer]]) -> None:
    """Refuses out= arrays (position, memory) that an input or another one also uses: outputs are written while inputs are read.

    Raises:
        Error: naming the pair.
    """
    spans = [(b.address, b.address + b.nbytes, f"input {i}") for i, b in enumerate(inputs) if b.nbytes]
    for i, b in outs:
        if not b.nbytes:
            continue
        for first, last, what in spans:
            if b.address < last and first < b.address + b.nbytes:
                raise Error(f"out=: memory of its own expected, but it overlaps {what}", node=f"output {i}",
                            remedy="pass another array")  # fmt: skip
        spans.append((b.address, b.address + b.nbytes, f"output {i}"))
