"""Reads GGUF files (the weights of llama.cpp) without going through float.

`load(path)` maps a file and gives its metadata and tensors; blocks of 4 to 8 bits become integers with the scales that the file
holds, exact to the bit of what ggml's reference dequantises. `File.apply` puts them into a torch model in place of its
parameters: the model then computes with the dequantised weights, and export finds the integers.

The container and the block formats are those of ggml's gguf.md and ggml-quants (MIT licence). The reader trusts nothing in a
file: every size is checked against the file's length before it is used.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trivet.error import Error

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trivet.quantize.blocks import BlockTensor

__all__ = ["File", "Tensors", "halves", "load"]

_MAX_AXES, _MOST = 8, 1 << 48  # of a tensor: axes, elements
_NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
          12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
          20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
          29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}  # fmt: skip
# (elements, bytes) of a block
_BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
           "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file. shape: torch's order (rows first). offset: of its bytes in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Tensors(Mapping[str, Any]):
    """Tensors by name, made when they are asked for: a BlockTensor, or a torch tensor of f32, f16 or bf16 that lies in the
    mapped file (writing to it changes this process's copy only).
    """

    def __init__(self, data: Bytes, entries: dict[str, Entry]) -> None:
        self._data, self.entries = data, entries

    def __getitem__(self, name: str) -> BlockTensor | Tensor:
        e = self.entries[name]
        if e.kind not in _BLOCKS:
            raise Error(f"{name} is stored as {e.kind}, which trivet does not read",
                        remedy=f"types that it reads: {', '.join(_BLOCKS)}; convert the file to one of them")  # fmt: skip
        raw = self._data[e.offset : e.offset + e.nbytes]
        return _floats(e, raw) if e.kind in ("F32", "F16", "BF16") else _blocks(e, raw)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


Names = Mapping[str, str] | Callable[[str], str | None]
Order = Callable[[str, tuple[int, ...]], "Tensor | None"]


@dataclass(slots=True)
class File:
    """An open GGUF file.

    Attributes:
        metadata: keys as in the file ("general.architecture", "llama.block_count", ..); arrays are lists.
        tensors: see Tensors; `tensors.entries` has names, types and shapes without reading any data.
        version: of the container.
    """

    metadata: dict[str, Any]
    tensors: Tensors
    version: int
    path: str = ""
    _keep: Any = field(default=None, repr=False)

    def apply(self, model: nn.Module, names: Names, *, order: Order | None = None) -> nn.Module:
        """Puts the file's tensors into a model, in place.

        Args:
            model: with parameters of the shapes that the file has (a Linear's weight is [out, in], as in the file).
            names: {name in the file: parameter of the model, e.g. "layers.0.q.weight"}, or a function from name to
                parameter; None leaves a tensor out.
            order: function of name and shape that gives an index of rows (i64), for weights whose rows lie in another
                order in the file, or None; see halves.

        Returns:
            The model. Quantised parameters have become buffers; parameters that were one tensor (tied weights) still are.

        Raises:
            Error: a name that is not in the model, another shape, a type that trivet does not read, nothing applied.
        """
        import torch

        from trivet.quantize.blocks import BlockTensor, attach

        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for key, p in module._parameters.items():
                if p is not None:
                    owners.setdefault(id(p), []).append((module, key))
        plan: list[tuple[str, str, nn.Parameter]] = []
        for name in self.tensors:
            target = names(name) if callable(names) else names.get(name)
            if target is not None:
                plan.append((name, target, _parameter(model, name, target)))
        if not plan:
            raise Error(f"none of the {len(self.tensors)} tensors of the file has a parameter of the model",
                        remedy="give names={'token_embd.weight': 'tok.weight', ..}")  # fmt: skip
        taken: dict[int, str] = {}
        for name, target, p in plan:
            if (other := taken.setdefault(id(p), name)) != name:
                raise Error(f"{other} and {name} both go to {target}")
            if self.tensors.entries[name].shape != tuple(p.shape):
                raise Error(
                    f"{name} is {list(self.tensors.entries[name].shape)}, the parameter {target} {list(p.shape)}"
                )
        for name, _, p in plan:
            t = self.tensors[name]
            index = order(name, self.tensors.entries[name].shape) if order is not None else None
            if isinstance(t, BlockTensor):
                attach(owners[id(p)], t if index is None else t.rows(index))
            else:
                with torch.no_grad():
                    p.copy_(t if index is None else t[index])
        return model


def load(path: str | os.PathLike[str]) -> File:
    """Opens a GGUF file; nothing but its head is read until tensors are asked for.

    Raises:
        Error: no GGUF file, one that ends too early, or one that contradicts itself.
    """
    where = os.fsdecode(path)
    try:
        with Path(where).open("rb") as f:
            size = os.fstat(f.fileno()).st_size
            view: Any = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    except OSError as e:
        raise Error(f"{where} cannot be read: {e.strerror or e}") from None
    head = _Head(view, where)
    try:
        metadata, entries, version = head.read()
    except (struct.error, UnicodeDecodeError) as e:
        raise Error(f"{where}: damaged at byte {head.at}: {e}") from None
    data: Bytes = np.frombuffer(view, np.uint8)
    return File(metadata, Tensors(data, entries), version, where, view)


def halves(rows: int, heads: int) -> Tensor:
    """Index of rows that undoes what converters of Hugging Face models do to q and k.

    Rotary embeddings turn pairs of rows of a head: neighbours in the file, row i and i + size / 2 in those models.

    Args:
        rows: of the weight.
        heads: of q, or key heads of k; rows is a multiple of 2 * heads.
    """
    import torch

    if heads < 1 or rows % (2 * heads):
        raise Error(f"{rows} rows are no {heads} heads of pairs")
    return torch.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _parameter(model: nn.Module, name: str, target: str) -> nn.Parameter:
    path, _, leaf = target.rpartition(".")
    try:
        p = model.get_submodule(path)._parameters.get(leaf)
    except AttributeError:
        p = None
    if p is None:
        raise Error(f"{name} should go to {target}, which is no parameter of {type(model).__name__}")
    return p


# ---- the container ------------------------------------------------------------------------------------------------------
class _Head:
    """Reads values one after the other; never beyond the end."""

    def __init__(self, view: Any, where: str) -> None:
        self.view, self.where, self.at, self.size = view, where, 0, len(view)

    def fail(self, why: str) -> Error:
        return Error(f"{self.where}: {why}")

    def take(self, n: int) -> bytes:
        if n > self.size - self.at:
            raise self.fail(f"the file ends at byte {self.size}, {n} bytes are expected at {self.at}")
        self.at += n
        return bytes(self.view[self.at - n : self.at])

    def number(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize(form)))[0]

    def text(self, errors: str = "strict") -> str:
        return self.take(self.number("Q")).decode("utf-8", errors)

    def value(self, kind: int, deep: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text("surrogateescape")  # a vocabulary may hold any bytes
        if kind != _ARRAY or deep > 3:
            raise self.fail(f"a value of unknown type {kind} at byte {self.at}")
        inner, count = self.number("I"), self.number("Q")
        form = _SCALARS.get(inner)
        if form is not None:
            size = struct.calcsize(form)
            if count > (self.size - self.at) // size:
                raise self.fail(f"an array of {count} values at byte {self.at}, the file ends before")
            return list(struct.unpack(f"<{count}{form}", self.take(count * size)))
        if count > (self.size - self.at) // 8:  # a string or array takes at least 8 bytes
            raise self.fail(f"an array of {count} values at byte {self.at}, the file ends before")
        return [self.value(inner, deep + 1) for _ in range(count)]

    def read(self) -> tuple[dict[str, Any], dict[str, Entry], int]:
        if self.size < 4 or self.take(4) != b"GGUF":
            raise self.fail("is no GGUF file")
        version = self.number("I")
        if version not in (2, 3):
            raise self.fail(f"is GGUF version {version}, 2 and 3 are known")
        tensors, keys = self.number("Q"), self.number("Q")
        if max(tensors, keys) > self.size // 12:
            raise self.fail(f"{tensors} tensors and {keys} keys do not fit into {self.size} bytes")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text()
            if key in metadata:
                raise self.fail(f"the key {key!r} is there twice")
            metadata[key] = self.value(self.number("I"))
        rows = [self._entry() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 0 < align <= 1 << 20 or align & (align - 1):
            raise self.fail(f"alignment {align!r} is no power of two")
        start = -(-self.at // align) * align
        entries: dict[str, Entry] = {}
        for name, kind, shape, offset in rows:
            if name in entries:
                raise self.fail(f"the tensor {name!r} is there twice")
            entries[name] = self._placed(name, kind, shape, start + offset)
        return metadata, entries, version

    def _entry(self) -> tuple[str, str, tuple[int, ...], int]:
        name, axes = self.text(), self.number("I")
        if axes > _MAX_AXES:
            raise self.fail(f"{name} has {axes} axes, at most {_MAX_AXES} are possible")
        dims = tuple(self.number("Q") for _ in range(axes))
        kind = self.number("I")
        return name, _NAMES.get(kind, f"type {kind}"), dims[::-1], self.number("Q")

    def _placed(self, name: str, kind: str, shape: tuple[int, ...], offset: int) -> Entry:
        row = shape[-1] if shape else 1
        if prod(max(d, 1) for d in shape) > _MOST:
            raise self.fail(f"{name} has the sizes {list(shape)}, which no tensor has")
        block, size = _BLOCKS.get(kind, (1, 0))
        if row % block:
            raise self.fail(f"{name}: rows of {row} elements are no whole blocks of {kind}")
        nbytes = prod(shape) // block * size
        if offset + nbytes > self.size:
            raise self.fail(f"{name} {kind} {list(shape)} ends at byte {offset + nbytes}, the file at {self.size}")
        return Entry(name, kind, shape, offset, nbytes)


# ---- blocks: [rows of blocks, bytes] to integers and scales ----------------------------------------------------------------
def _floats(e: Entry, raw: Bytes) -> Tensor:
    import torch

    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[e.kind]
    if e.offset % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).reshape(e.shape) if raw.size else torch.empty(e.shape, dtype=dtype)


def _blocks(e: Entry, raw: Bytes) -> BlockTensor:
    import torch

    from trivet.quantize.blocks import BlockTensor

    read, group, zero, bits = _READERS[e.kind]
    size = _BLOCKS[e.kind][1]
    q, scale, offset = read(raw.reshape(-1, size))
    if not np.isfinite(scale).all() or (offset is not None and not np.isfinite(offset).all()):
        raise Error(f"{e.name} ({e.kind}) has scales that are no finite numbers: the file is damaged")
    scales = (*e.shape[:-1], e.shape[-1] // group)

    def tensor(x: Array, shape: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).reshape(shape)

    return BlockTensor(e.name, tensor(q, e.shape), tensor(scale, scales), None if offset is None else tensor(offset, scales),
                       zero, len(e.shape) - 1, group, bits, e.kind)  # fmt: skip


def _f16(b: Bytes, at: int) -> Array:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16)


def _nibbles(b: Bytes, run: int) -> Bytes:
    """Halves of bytes, for each run of bytes the low ones first."""
    b = b.reshape(len(b), -1, 1, run)
    both: Bytes = np.concatenate([b & 15, b >> 4], 2)
    return both.reshape(len(b), -1)


def _fifth(b: Bytes) -> Bytes:
    """32 bits, least first, as 0 or 16."""
    bits: Bytes = np.unpackbits(b, axis=1, bitorder="little") * np.uint8(16)
    return bits


Parts = tuple[Array, Array, "Array | None"]


def _q4_0(b: Bytes) -> Parts:
    return _nibbles(b[:, 2:], 16), _f16(b, 0), None


def _q4_1(b: Bytes) -> Parts:
    return _nibbles(b[:, 4:], 16), _f16(b, 0), _f16(b, 2)


def _q5_0(b: Bytes) -> Parts:
    return (_nibbles(b[:, 6:], 16) | _fifth(b[:, 2:6])).view(np.int8) - np.int8(16), _f16(b, 0), None


def _q5_1(b: Bytes) -> Parts:
    return (_nibbles(b[:, 8:], 16) | _fifth(b[:, 4:8])).view(np.int8), _f16(b, 0), _f16(b, 2)


def _q8_0(b: Bytes) -> Parts:
    return b[:, 2:].view(np.int8), _f16(b, 0), None


def _k_scales(b: Bytes) -> tuple[Array, Array]:
    """Scales and offsets [blocks, 8] of Q4_K and Q5_K: 6-bit numbers in 12 bytes, times a scale each. Products of an f16
    and a 6-bit number are exact in f32.
    """
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], 1).astype(np.float32)
    least = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], 1).astype(np.float32)
    return _f16(b, 0).astype(np.float32) * scale, -(_f16(b, 2).astype(np.float32) * least)


def _q4_k(b: Bytes) -> Parts:
    return _nibbles(b[:, 16:], 32), *_k_scales(b)


def _q5_k(b: Bytes) -> Parts:
    high = (b[:, 16:48].reshape(len(b), 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    return (_nibbles(b[:, 48:], 32) | (high << 4).reshape(len(b), -1)).view(np.int8), *_k_scales(b)


def _q6_k(b: Bytes) -> Parts:
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = ((b[:, 128:192].reshape(len(b), 2, 1, 32) >> shift) & 3).reshape(len(b), -1)
    q = (_nibbles(b[:, :128], 64) | high << 4).view(np.int8) - np.int8(32)
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return q, _f16(b, 208).astype(np.float32) * scale, None


# reader, elements that share a scale, stored number that means 0, bits
_READERS: dict[str, tuple[Callable[[Bytes], Parts], int, int, int]] = {
    "Q4_0": (_q4_0, 32, 8, 4), "Q4_1": (_q4_1, 32, 0, 4), "Q5_0": (_q5_0, 32, 0, 8), "Q5_1": (_q5_1, 32, 0, 8),
    "Q8_0": (_q8_0, 32, 0, 8), "Q4_K": (_q4_k, 32, 0, 4), "Q5_K": (_q5_k, 32, 0, 8), "Q6_K": (_q6_k, 16, 0, 8)}  # fmt: skip
