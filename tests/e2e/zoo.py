"""Model definitions with seeded weights: {name: () -> (module in eval mode, example arguments, dynamic_shapes or None)}.

Batch norms get the statistics of random data, so that activations keep a sane scale through the depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import Dim

_LIB: list[torch.library.Library] = []


def torchvision_models() -> Any:
    """torchvision's model definitions; its compiled part may not load next to a CPU wheel of torch and is not needed."""
    if not _LIB:
        lib = torch.library.Library("torchvision", "FRAGMENT")
        for op in ("nms", "qnms"):
            try:
                lib.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            except RuntimeError:
                continue  # the real one is there
        _LIB.append(lib)
    import torchvision

    return torchvision.models


def settle(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Runs random batches so that every batch norm knows its input's mean and variance."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.momentum = None  # type: ignore[assignment]
            m.reset_running_stats()
    model.train()
    for m in model.modules():
        if isinstance(m, nn.Dropout) or type(m).__name__ == "StochasticDepth":
            m.eval()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(4, *x.shape[1:]))
    return model.eval()


def _vision(name: str, size: int = 224) -> Callable[[], tuple[nn.Module, tuple[Any, ...], Any]]:
    def make() -> tuple[nn.Module, tuple[Any, ...], Any]:
        x = torch.randn(1, 3, size, size)
        return settle(getattr(torchvision_models(), name)(weights=None), x), (x,), None

    return make


class Attention(nn.Module):
    """Multi-head self-attention by scaled_dot_product_attention."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, d))


class ViT(nn.Module):
    """Vision transformer, 16-pixel patches, norm first."""

    def __init__(self, size: int = 224, d: int = 192, layers: int = 12, heads: int = 3, classes: int = 1000) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, d, 16, 16)
        self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, (size // 16) ** 2 + 1, d) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"n1": nn.LayerNorm(d), "attn": Attention(d, heads), "n2": nn.LayerNorm(d),
                           "mlp": nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))})
            for _ in range(layers))  # fmt: skip
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        for b in self.blocks:
            x = x + b["attn"](b["n1"](x))  # type: ignore[index]
            x = x + b["mlp"](b["n2"](x))  # type: ignore[index]
        return self.head(self.norm(x)[:, 0])


class UNet(nn.Module):
    """Three levels, skip connections by concat, transposed convolutions upwards."""

    @staticmethod
    def double(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(),
                             nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())  # fmt: skip

    def __init__(self, c: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.double(3, c), self.double(c, 2 * c), self.double(2 * c, 4 * c)])
        self.mid = self.double(4 * c, 8 * c)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * k, k, 2, 2) for k in (4 * c, 2 * c, c))
        self.fuse = nn.ModuleList(self.double(2 * k, k) for k in (4 * c, 2 * c, c))
        self.head = nn.Conv2d(c, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for d in self.down:
            x = d(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.mid(x)
        for up, fuse in zip(self.up, self.fuse, strict=True):
            x = fuse(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class Recurrent(nn.Module):
    """Two bidirectional recurrent layers and a head over the last frame: [B, T, 40] -> [B, 12]."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.rnn = kind(40, 64, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(128, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Bert(nn.Module):
    """Small BERT encoder, norm last: ids and mask [B, T] -> pooled [B, 128]."""

    def __init__(self, d: int = 128, layers: int = 2, heads: int = 2, vocab: int = 1000) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(128, d)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pool = nn.Linear(d, d)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        return self.pool(self.encoder(x, src_key_padding_mask=mask == 0)[:, 0]).tanh()


class DSCNN(nn.Module):
    """Keyword spotter of MLPerf-Tiny shape: 49 x 10 MFCC, four depthwise-separable blocks, 12 classes."""

    def __init__(self, c: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(1, c, (10, 4), 2, (5, 1), bias=False), nn.BatchNorm2d(c), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False), nn.BatchNorm2d(c), nn.ReLU(),
                       nn.Conv2d(c, c, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU()]  # fmt: skip
        self.body, self.head = nn.Sequential(*layers), nn.Linear(c, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def _autoencoder() -> nn.Module:
    sizes = [640, 128, 128, 128, 128, 8, 128, 128, 128, 128]
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 640))


def _settled(module: nn.Module, x: torch.Tensor) -> tuple[nn.Module, tuple[Any, ...], Any]:
    return settle(module, x), (x,), None


def _bert() -> tuple[nn.Module, tuple[Any, ...], Any]:
    b, t = Dim("b", min=1, max=8), Dim("t", min=2, max=128)
    args = (torch.randint(0, 1000, (2, 24)), torch.ones(2, 24, dtype=torch.int64))
    args[1][1, 17:] = 0
    return Bert().eval(), args, ({0: b, 1: t}, {0: b, 1: t})


ZOO: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], Any]]] = {
    "resnet18": _vision("resnet18"),
    "mobilenet_v2": _vision("mobilenet_v2"),
    "mobilenet_v3_small": _vision("mobilenet_v3_small"),
    "vit_tiny": lambda: (ViT().eval(), (torch.randn(1, 3, 224, 224),), None),
    "unet": lambda: _settled(UNet(), torch.randn(1, 3, 128, 128)),
    "lstm": lambda: (Recurrent(nn.LSTM).eval(), (torch.randn(2, 50, 40),), ({1: Dim("t", min=1, max=512)},)),
    "gru": lambda: (Recurrent(nn.GRU).eval(), (torch.randn(2, 50, 40),), ({1: Dim("t", min=1, max=512)},)),
    "bert": _bert,
    "dscnn": lambda: _settled(DSCNN(), torch.randn(1, 1, 49, 10)),
    "autoencoder": lambda: _settled(_autoencoder(), torch.randn(1, 640)),
}


def make(name: str) -> tuple[nn.Module, tuple[Any, ...], Any]:
    """Model, example arguments and dynamic shapes; the same on every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ZOO[name]()
