"""The workloads: name -> (model in eval mode, example inputs). Random weights from a fixed seed, activations of a sane scale.

Everything here is plain PyTorch, so that every peer's converter sees the same graph. Transformers are written
out rather than taken from a library: the arithmetic is that of the named models, and no converter trips over
a library's masking utilities.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

_TV = None


def _torchvision():
    """torchvision's compiled part may not load next to a CPU wheel of torch; the model definitions need only this."""
    global _TV
    if _TV is None:
        lib = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            try:
                lib.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            except RuntimeError:
                pass  # the real one is there
        import torchvision

        _TV = (torchvision, lib)
    return _TV[0]


def _settle(model, shape, passes=2):
    """Give BatchNorm layers the statistics of random data, so activations keep a sane scale through the depth."""
    bns = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for m in bns:
        m.momentum = None
        m.reset_running_stats()
    model.train()
    for m in model.modules():
        if isinstance(m, nn.Dropout) or type(m).__name__ == "StochasticDepth":
            m.eval()
    with torch.no_grad():
        for _ in range(passes):
            model(torch.randn(8, *shape[1:]))
    return model.eval()


def _vision(name):
    def make():
        model = getattr(_torchvision().models, name)(weights=None)
        shape = (1, 3, 224, 224)
        return _settle(model, shape), (torch.randn(shape),)

    return make


# ---- MLPerf-Tiny style ----------------------------------------------------------------------------------------------
class DSCNN(nn.Module):
    """Keyword spotter: 49x10 MFCC map, 64 channels, four depthwise-separable blocks, 12 classes."""

    def __init__(self, c=64, classes=12):
        super().__init__()
        layers = [nn.Conv2d(1, c, (10, 4), stride=2, padding=(5, 1), bias=False), nn.BatchNorm2d(c), nn.ReLU()]
        for _ in range(4):
            layers += [
                nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False),
                nn.BatchNorm2d(c),
                nn.ReLU(),
                nn.Conv2d(c, c, 1, bias=False),
                nn.BatchNorm2d(c),
                nn.ReLU(),
            ]
        self.body = nn.Sequential(*layers)
        self.fc = nn.Linear(c, classes)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


def dscnn():
    shape = (1, 1, 49, 10)
    return _settle(DSCNN(), shape), (torch.randn(shape),)


class AutoEncoder(nn.Module):
    """Anomaly detector: 640 -> 128 x4 -> 8 -> 128 x4 -> 640."""

    def __init__(self):
        super().__init__()
        sizes = [640, 128, 128, 128, 128, 8, 128, 128, 128, 128]
        layers = []
        for a, b in zip(sizes, sizes[1:]):
            layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(128, 640))

    def forward(self, x):
        return self.net(x)


def autoencoder():
    return _settle(AutoEncoder(), (1, 640)), (torch.randn(1, 640),)


class _Res(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.a = nn.Sequential(
            nn.Conv2d(cin, cout, 3, stride, 1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(),
            nn.Conv2d(cout, cout, 3, 1, 1, bias=False),
            nn.BatchNorm2d(cout),
        )
        self.b = nn.Conv2d(cin, cout, 1, stride) if (stride != 1 or cin != cout) else nn.Identity()

    def forward(self, x):
        return F.relu(self.a(x) + self.b(x))


class ResNet8(nn.Module):
    """MLPerf-Tiny image classifier on 32x32."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            _Res(16, 16, 1),
            _Res(16, 32, 2),
            _Res(32, 64, 2),
        )
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


def resnet8():
    shape = (1, 3, 32, 32)
    return _settle(ResNet8(), shape), (torch.randn(shape),)


# ---- transformers ---------------------------------------------------------------------------------------------------
class _Attn(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, self.h, d // self.h).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, s, d))


class _Block(nn.Module):
    def __init__(self, d, heads, hidden, pre_norm):
        super().__init__()
        self.attn, self.pre = _Attn(d, heads), pre_norm
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        if self.pre:
            x = x + self.attn(self.n1(x))
            return x + self.down(F.gelu(self.up(self.n2(x))))
        x = self.n1(x + self.attn(x))
        return self.n2(x + self.down(F.gelu(self.up(x))))


class ViT(nn.Module):
    """DeiT-tiny: patch 16, 192 wide, 12 layers, 3 heads."""

    def __init__(self, d=192, layers=12, heads=3, classes=1000):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 16, 16)
        self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, 197, d) * 0.02)
        self.blocks = nn.Sequential(*[_Block(d, heads, 4 * d, True) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])


class MiniLM(nn.Module):
    """all-MiniLM-L6 shape: BERT encoder, 6 layers, 384 wide, 12 heads, 1536 hidden; mean pooled, normalised."""

    def __init__(self, d=384, layers=6, heads=12, hidden=1536, vocab=30522, max_len=512):
        super().__init__()
        self.tok, self.pos, self.typ = nn.Embedding(vocab, d), nn.Embedding(max_len, d), nn.Embedding(2, d)
        self.norm = nn.LayerNorm(d)
        self.blocks = nn.Sequential(*[_Block(d, heads, hidden, False) for _ in range(layers)])

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]] + self.typ.weight[0]
        x = self.blocks(self.norm(x)).mean(1)
        return x / x.pow(2).sum(-1, keepdim=True).sqrt()


def _init(model, std=0.05):
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=std)
            if getattr(m, "bias", None) is not None:
                nn.init.normal_(m.bias, std=0.01)
    return model.eval()


def vit_tiny():
    return _init(ViT()), (torch.randn(1, 3, 224, 224),)


def minilm():
    return _init(MiniLM()), (torch.randint(0, 30522, (1, 128)),)


class _LlamaLayer(nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.h = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(d, hidden, bias=False), nn.Linear(d, hidden, bias=False)
        self.down = nn.Linear(hidden, d, bias=False)
        self.n1, self.n2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))


def _rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def _rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Llama(nn.Module):
    """Llama-2 style decoder (RMSNorm, RoPE, SwiGLU, no biases); the shapes of stories15M and stories110M.

    prefill: ids[1,S] -> logits of the last position, K and V of every layer.
    decode:  id[1,1], position as float cos/sin row is gathered inside, past K/V [L,H,T,D], additive mask [1,T+1]
             -> logits, this token's K and V ([L,H,1,D]); the host writes them into its cache. All shapes static.
    """

    def __init__(self, d, layers, heads, hidden, vocab=32000, ctx=512, mode="prefill"):
        super().__init__()
        self.heads, self.dh, self.mode = heads, d // heads, mode
        self.tok = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(_LlamaLayer(d, heads, hidden) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(d))
        self.head = nn.Linear(d, vocab, bias=False)
        f = 1.0 / (10000 ** (torch.arange(0, self.dh, 2).float() / self.dh))
        a = torch.outer(torch.arange(ctx).float(), f)
        self.register_buffer("cos", a.cos())
        self.register_buffer("sin", a.sin())

    def _mlp(self, layer, x):
        y = _rms(x, layer.n2)
        return x + layer.down(F.silu(layer.gate(y)) * layer.up(y))

    def forward(self, ids, *rest):
        return self._prefill(ids) if self.mode == "prefill" else self._decode(ids, *rest)

    def _prefill(self, ids):
        s = ids.shape[1]
        x = self.tok(ids)
        cos, sin = self.cos[:s], self.sin[:s]
        ks, vs = [], []
        for layer in self.layers:
            y = _rms(x, layer.n1)
            q, k, v = (f(y).view(1, s, self.heads, self.dh).transpose(1, 2) for f in (layer.q, layer.k, layer.v))
            q, k = _rope(q, cos, sin), _rope(k, cos, sin)
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.o(o.transpose(1, 2).reshape(1, s, -1))
            x = self._mlp(layer, x)
            ks.append(k[0])
            vs.append(v[0])
        x = _rms(x[:, -1], self.norm)
        return self.head(x), torch.stack(ks), torch.stack(vs)

    def _decode(self, ids, pos, past_k, past_v, mask):
        x = self.tok(ids)
        cos, sin = F.embedding(pos, self.cos), F.embedding(pos, self.sin)
        ks, vs = [], []
        for i, layer in enumerate(self.layers):
            y = _rms(x, layer.n1)
            q, k, v = (f(y).view(1, 1, self.heads, self.dh).transpose(1, 2) for f in (layer.q, layer.k, layer.v))
            q, k = _rope(q, cos, sin), _rope(k, cos, sin)
            kk = torch.cat([past_k[i : i + 1], k], 2)
            vv = torch.cat([past_v[i : i + 1], v], 2)
            w = torch.softmax(q @ kk.transpose(2, 3) * (1.0 / math.sqrt(self.dh)) + mask, -1)
            o = w @ vv
            x = x + layer.o(o.transpose(1, 2).reshape(1, 1, -1))
            x = self._mlp(layer, x)
            ks.append(k[0])
            vs.append(v[0])
        x = _rms(x[:, -1], self.norm)
        return self.head(x), torch.stack(ks), torch.stack(vs)


_LLAMA = {"15m": dict(d=288, layers=6, heads=6, hidden=768), "110m": dict(d=768, layers=12, heads=12, hidden=2048)}
PAST = 128  # cache length at the decode step that is timed


def _llama(size, mode):
    def make():
        c = _LLAMA[size]
        model = _init(Llama(mode=mode, **c))
        if mode == "prefill":
            return model, (torch.randint(0, 32000, (1, 128)),)
        shape = c["layers"], c["heads"], PAST, c["d"] // c["heads"]
        past = torch.randn(shape), torch.randn(shape)
        return model, (torch.tensor([[42]]), torch.tensor([PAST]), *past, torch.zeros(1, PAST + 1))

    return make


# ---- others ---------------------------------------------------------------------------------------------------------
class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(40, 128, 2, batch_first=True)
        self.fc = nn.Linear(128, 29)

    def forward(self, x):
        return self.fc(self.rnn(x)[0])


def lstm():
    return LSTM().eval(), (torch.randn(1, 100, 40),)


def _dbl(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(),
        nn.Conv2d(o, o, 3, padding=1, bias=False),
        nn.BatchNorm2d(o),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """Four levels, 16..128 channels, transposed convolutions on the way up."""

    def __init__(self, c=(16, 32, 64, 128), classes=2):
        super().__init__()
        ins = (3,) + c[:-1]
        self.down = nn.ModuleList(_dbl(i, o) for i, o in zip(ins, c))
        self.up = nn.ModuleList(nn.ConvTranspose2d(c[i], c[i - 1], 2, 2) for i in range(len(c) - 1, 0, -1))
        self.dec = nn.ModuleList(_dbl(2 * c[i - 1], c[i - 1]) for i in range(len(c) - 1, 0, -1))
        self.out = nn.Conv2d(c[0], classes, 1)

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.down):
            x = d(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        for u, d, s in zip(self.up, self.dec, reversed(skips[:-1])):
            x = d(torch.cat([u(x), s], 1))
        return self.out(x)


def unet():
    shape = (1, 3, 256, 256)
    return _settle(UNet(), shape, passes=1), (torch.randn(shape),)


ZOO = {
    "mobilenet_v2": _vision("mobilenet_v2"),
    "mobilenet_v3_small": _vision("mobilenet_v3_small"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "resnet18": _vision("resnet18"),
    "resnet50": _vision("resnet50"),
    "dscnn_kws": dscnn,
    "autoencoder": autoencoder,
    "resnet8": resnet8,
    "vit_tiny": vit_tiny,
    "minilm_s128": minilm,
    "llama15m_prefill128": _llama("15m", "prefill"),
    "llama15m_decode": _llama("15m", "decode"),
    "llama110m_prefill128": _llama("110m", "prefill"),
    "llama110m_decode": _llama("110m", "decode"),
    "lstm": lstm,
    "unet_256": unet,
}

PRECISIONS = {  # other than fp32, which all have
    "mobilenet_v2": ("fp16", "bf16", "int8"),
    "resnet50": ("fp16", "bf16", "int8"),
    "dscnn_kws": ("fp16", "bf16", "int8"),
    "minilm_s128": ("fp16", "bf16", "int8", "int8dyn"),
    "llama15m_decode": ("w8", "w4", "w4c"),
    "llama110m_decode": ("w8", "w4", "w4c"),
}
ATTENTION = ("vit_tiny", "minilm_s128", "llama15m_prefill128", "llama110m_prefill128")  # call the fused operator
STREAMED = ("llama15m_decode", "llama110m_decode")  # bound by reading weights


@dataclass
class Work:
    """One workload as adapters see it. calib: tuples of inputs for static quantisation."""

    name: str
    model: nn.Module
    inputs: tuple
    calib: list


def work(name):
    model, inputs = make(name)
    return Work(name, model, inputs, calibration(name, inputs))


def make(name, seed=0):
    torch.manual_seed(seed)
    model, inputs = ZOO[name]()
    for p in model.parameters():
        p.requires_grad_(False)
    return model, inputs


def calibration(name, inputs, n=4, seed=1):
    """Random inputs of the same distribution, for static quantisation."""
    g = torch.Generator().manual_seed(seed)
    out = [inputs]
    for _ in range(n - 1):
        row = []
        for x in inputs:
            if x.dtype.is_floating_point:
                row.append(torch.randn(x.shape, generator=g))
            else:
                row.append(torch.randint(0, int(x.max()) + 1, x.shape, generator=g))
        out.append(tuple(row))
    return out


def cost(model, inputs):
    """(MACs, bytes of weights read in one pass) for one inference."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as f, written_out():
        model(*inputs)
    macs = f.get_total_flops() // 2
    for m in model.modules():
        if isinstance(m, nn.LSTM):  # torch counts the layers behind it only
            macs += sum(p.numel() for n, p in m.named_parameters() if "weight" in n) * inputs[0].shape[1]
    tables = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))
    return int(macs), 4 * (sum(p.numel() for p in model.parameters()) - tables)


@contextmanager
def written_out():
    """scaled_dot_product_attention as products and a softmax."""
    fused = F.scaled_dot_product_attention

    def attention(q, k, v, is_causal=False):
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]))
        if is_causal:
            scores = scores + torch.full(scores.shape[-2:], -1e9).triu(1)
        return torch.softmax(scores, -1) @ v

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = fused
