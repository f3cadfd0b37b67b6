"""torchao's rewriting of convolutions with batch norm for training, without what cannot match.

It looks for every kind of convolution in every way to quantise it, by patterns that it traces anew each time: 12 of them before
training and 96 afterwards, which takes most of a minute. While `needed()` is active it traces those that the graph has something
for, once per process.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from trivet.quantize.fxgraph import target

_traced: dict[Any, Any] = {}
_PLACES = ("_fuse_conv_bn_qat_helper", "_fold_conv_bn_qat_helper", "_get_aten_graph_module_for_pattern", "itertools")


@contextmanager
def needed() -> Iterator[None]:
    """While active, torchao.quantization.pt2e.qat_utils works as said above. A torchao that is made otherwise is left alone."""
    from torchao.quantization.pt2e import qat_utils

    if not all(hasattr(qat_utils, name) for name in _PLACES):
        yield
        return
    saved = {name: getattr(qat_utils, name) for name in _PLACES}
    fuse, fold, trace, _ = (saved[name] for name in _PLACES)

    def product(per_channel: Any, bias: Any, *more: Any) -> Any:
        """Ways to quantise: a bias never is, and batch norm does not train in a graph that is converted."""
        return itertools.product(per_channel if channels[-1] else [False], bias, *([False] for _ in more))

    channels: list[bool] = []

    def present(rewrite: Any) -> Any:
        def call(m: Any, conv: Any, *args: Any, **kwargs: Any) -> Any:
            names = {target(n) for n in m.graph.nodes}
            if f"aten.{conv.__name__}" not in names:
                return m
            channels.append(any("per_channel" in name for name in names))
            return rewrite(m, conv, *args, **kwargs)

        return call

    def once(pattern: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        f = getattr(pattern, "fn", None)
        if f is None:
            return trace(pattern, inputs, *args, **kwargs)
        inside = tuple(c.cell_contents for c in f.__closure__ or ())
        key = (f.__qualname__, inside, tuple(tuple(t.shape) for t in inputs), tuple(sorted(kwargs)), args)
        if key not in _traced:
            _traced[key] = trace(pattern, inputs, *args, **kwargs)
        return copy.deepcopy(_traced[key])

    new = dict(zip(_PLACES, (present(fuse), present(fold), once, SimpleNamespace(product=product)), strict=True))
    try:
        for name, value in new.items():
            setattr(qat_utils, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(qat_utils, name, value)
