"""Writes the fuzzer's seeds: small programs that between them use every operator, control flow, states and dynamic shapes.

python tests/fuzz/make_seeds.py        (after a change of the file format; the seeds are kept in the repository)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "c"), str(HERE.parent.parent / "sdk")]

LIMIT = 6144  # bytes of a seed


class Fn(nn.Module):
    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *args: torch.Tensor) -> Any:
        return self.f(*args)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x)
        return self.seen * 2


def loop(x: torch.Tensor) -> torch.Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]


def choice(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def models() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...], Any]]:
    """Name to module, arguments, dynamic shapes."""
    r = torch.randn
    n = torch.export.Dim("n", min=2, max=64)
    i = torch.tensor([1, 0, 2])
    return {
        "map": (Fn(lambda x: F.gelu(x) * torch.sigmoid(x) + x.round()), (r(3, 4),), None),
        "matmul": (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (r(2, 4),), None),
        "matmul_dynamic": (Fn(lambda x, y: (x @ y).softmax(-1)), (r(5, 4), r(4, 3)), ({0: n}, None)),
        "conv": (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU6(), nn.MaxPool2d(2)), (r(1, 2, 4, 4),), None),
        "conv_transposed": (nn.ConvTranspose1d(2, 2, 3, stride=2), (r(1, 2, 4),), None),
        "depthwise": (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.AdaptiveAvgPool2d(1)), (r(1, 4, 5, 5),), None),
        "norm": (nn.Sequential(nn.LayerNorm(6), nn.Softmax(-1)), (r(3, 6),), None),
        "group_norm": (nn.GroupNorm(2, 4), (r(1, 4, 3),), None),
        "attention": (Fn(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True)), (r(1, 2, 3, 4),) * 2, None),
        "reduce": (Fn(lambda x: (x.sum(0), x.amax(1), x.var(1), x.argmin(1))), (r(3, 4),), None),
        "scan": (Fn(lambda x: x.cumsum(1)), (r(2, 5),), None),
        "index": (Fn(lambda x: (x[:, i], x.gather(1, i.expand(2, 3)))), (r(2, 3),), None),
        "scatter": (Fn(lambda x: x.index_add(0, i, x * 2)), (r(3, 2),), None),
        "pad": (Fn(lambda x: F.pad(x, (1, 2), mode="reflect")), (r(1, 2, 4),), None),
        "sort": (Fn(lambda x: (*x.sort(-1), *x.topk(2))), (r(2, 4),), None),
        "lstm": (nn.LSTM(3, 2, batch_first=True), (r(1, 3, 3),), None),
        "gru": (nn.GRU(3, 2), (r(2, 1, 3),), None),
        "resize": (Fn(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")), (r(1, 2, 3, 3),), None),
        "grid_sample": (Fn(lambda x, g: F.grid_sample(x, g, align_corners=False)), (r(1, 1, 3, 3), r(1, 2, 2, 2)), None),
        "nonzero": (Fn(lambda x: x.nonzero()), (torch.tensor([1.0, 0.0, 2.0]),), None),
        "state": (Counter(), (r(2),), None),
        "loop": (Fn(loop), (r(2),), None),
        "choice": (Fn(choice), (r(2),), None),
        "half": (Fn(lambda x: (x.to(torch.bfloat16) + 1).to(torch.float16)), (r(3),), None),
        "views": (Fn(lambda x: torch.cat([x.flip(0).T, x.T[:, 1:]], 1).reshape(-1)), (r(3, 2),), None),
    }  # fmt: skip


def main() -> None:
    import programs

    import trivet
    from trivet.writer import write_file

    torch.manual_seed(0)
    out = HERE / "seeds"
    out.mkdir(exist_ok=True)
    for old in out.glob("*.trv"):
        old.unlink()
    for name in ("cpu_static", "cpu_dynamic", "cpu_state", "loop", "data", "alternatives"):
        write_file(programs.ALL[name](), out / f"{name}.trv")
    for name, (model, args, dynamic) in models().items():
        path = out / f"{name}.trv"
        try:
            trivet.export(
                model.eval(), args, dynamic_shapes=(dynamic,) if dynamic and isinstance(model, Fn) else dynamic
            ).save(path)
        except trivet.Error as e:
            print(f"{name}: not exported: {e}")
            continue
        if path.stat().st_size > LIMIT:
            print(f"{name}: {path.stat().st_size} bytes, left out")
            path.unlink()
    files = sorted(out.glob("*.trv"))
    print(f"{len(files)} seeds, {sum(f.stat().st_size for f in files)} bytes")


if __name__ == "__main__":
    main()
