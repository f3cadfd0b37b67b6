"""Weights kept as stored integers inside a torch model: the operator that makes them real, and how a module holds them.

A parameter becomes buffers (`weight_q`, `weight_scale`, `weight_offset`) and a property of the old name that dequantises them
through `trivet::dequantize`. Eager execution then is the dequantised model, and export finds the integers in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trivet.error import Error

if TYPE_CHECKING:
    from torch import Tensor, nn


@torch.library.custom_op(
    "trivet::dequantize",
    mutates_args=(),
    schema="(Tensor q, Tensor scale, Tensor? offset, int zero, int axis, int group, int bits) -> Tensor",
)
def dequantize(q: Tensor, scale: Tensor, offset: Tensor | None, zero: int, axis: int, group: int, bits: int) -> Tensor:
    """Real values of stored integers: scale * (q - zero) + offset, each operation rounded to float32.

    Args:
        q: integers of any shape.
        scale: f32 or f16. group > 0: q's shape with axis divided by group, rounded up. group 0: [size of axis], or one
            element for all.
        offset: of scale's shape, or None for 0.
        zero: stored number that stands for 0 (before offset).
        axis: the axis that groups or channels lie along.
        group: elements along axis that share a scale.
        bits: width that the stored numbers need (4: they lie in 0..15); for export, not needed here.

    Returns:
        float32 of q's shape.
    """
    if q.is_floating_point() or (scale.numel() != 1 and tuple(scale.shape) != _scales(q, axis, group)):
        raise ValueError(
            f"scale {list(scale.shape)} does not fit {q.dtype} {list(q.shape)}, axis {axis}, group {group}"
        )
    if offset is not None and offset.shape != scale.shape:
        raise ValueError(f"offset {list(offset.shape)} is not like scale {list(scale.shape)}")
    y = q.to(torch.float32, memory_format=torch.contiguous_format)  # of our own: what follows works in place
    y -= zero
    if q.numel() == 0:
        return y
    if not group or scale.numel() == 1:
        y *= _along(scale, q, axis)
        return y if offset is None else y.add_(_along(offset, q, axis))
    axis %= q.dim()
    whole, rest = divmod(int(q.shape[axis]), group)
    for first, groups, size in ((0, whole, group), (whole, 1, rest)):  # the last group may be shorter
        if groups and size:
            part = y.narrow(axis, first * group, groups * size)
            part = part.view(*q.shape[:axis], groups, size, *q.shape[axis + 1 :])
            part *= _part(scale, axis, first, groups)
            if offset is not None:
                part += _part(offset, axis, first, groups)
    return y


@dequantize.register_fake
def _(q: Tensor, scale: Tensor, offset: Tensor | None, zero: int, axis: int, group: int, bits: int) -> Tensor:
    return torch.empty(q.shape, dtype=torch.float32, device=q.device)


def _scales(q: Tensor, axis: int, group: int) -> tuple[int, ...]:
    n = int(q.shape[axis])
    return (*q.shape[:axis], -(-n // group), *q.shape[axis % q.dim() + 1 :]) if group else (n,)


def _part(scale: Tensor, axis: int, first: int, groups: int) -> Tensor:
    """Some groups' scales, as f32 that broadcasts to [.., groups, values of a group, ..]."""
    return scale.narrow(axis, first, groups).float().unsqueeze(axis + 1)


def _along(scale: Tensor, q: Tensor, axis: int) -> Tensor:
    """Scales per channel, or one, as f32 that broadcasts to q."""
    s = scale.float()
    return s.reshape(()) if s.numel() == 1 else s.reshape([-1 if i == axis % q.dim() else 1 for i in range(q.dim())])


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A weight as stored integers with their scales; what dequantize takes, with the same meaning.

    Attributes:
        name: for messages.
        q: i8, or u8 with values 0..15 (bits 4).
        scale: f32 or f16.
        offset: of scale's shape and dtype, or None.
        zero, axis, group, bits: see dequantize.
        kind: name of the format it was read from ("Q4_1").
    """

    name: str
    q: Tensor
    scale: Tensor
    offset: Tensor | None = None
    zero: int = 0
    axis: int = -1
    group: int = 0
    bits: int = 8
    kind: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return tuple(int(d) for d in self.q.shape)

    def dequantize(self) -> Tensor:
        """The real values, float32."""
        result: Tensor = dequantize(
            self.q, self.scale, self.offset, self.zero, self.axis % self.q.dim(), self.group, self.bits
        )
        return result

    def rows(self, index: Tensor) -> BlockTensor:
        """The same weight with its rows (axis 0) in another order. Groups must lie along another axis."""
        if self.group == 0 or self.axis % self.q.dim() == 0:
            raise Error(f"{self.name}: rows cannot change places where groups lie along them")
        offset = None if self.offset is None else self.offset[index]
        return BlockTensor(self.name, self.q[index], self.scale[index], offset, self.zero, self.axis, self.group, self.bits,
                           self.kind)  # fmt: skip


def attach(modules: Iterable[tuple[nn.Module, str]], block: BlockTensor) -> None:
    """Puts a quantised weight in place of a parameter.

    Args:
        modules: (module, name of its parameter); several share the buffers (tied weights).
        block: the weight, of the parameter's shape. Its tensors are not copied.

    Raises:
        Error: no such parameter, or another shape.
    """
    for module, name in modules:
        old = module._parameters.get(name)
        if old is None:
            raise Error(f"{type(module).__name__} has no parameter {name!r} to put {block.name} in")
        if tuple(old.shape) != block.shape:
            raise Error(f"{block.name} is {list(block.shape)}, the parameter {name!r} {list(old.shape)}")
        del module._parameters[name]
        parts = {"q": block.q, "scale": block.scale, "offset": block.offset}
        for part, t in parts.items():
            module.register_buffer(f"{name}_{part}", t)
        module.__class__ = _dequantising(type(module), name, block)


def _dequantising(base: type, name: str, block: BlockTensor) -> type:
    """base with a property in the parameter's place."""
    zero, axis, group, bits = block.zero, block.axis % block.q.dim(), block.group, block.bits

    def real(module: Any) -> Tensor:
        part = module._buffers
        result: Tensor = torch.ops.trivet.dequantize(
            part[f"{name}_q"], part[f"{name}_scale"], part[f"{name}_offset"], zero, axis, group, bits
        )
        return result

    return type(base.__name__, (base,), {name: property(real), "__module__": base.__module__})
