"""The signature: structures of arguments and results, constants in them, and their errors."""

from __future__ import annotations

import collections
import json
from typing import NamedTuple

import pytest
import torch
from capture_net import Net, same
from torch import nn

from trivet.error import Error
from trivet.frontend import capture
from trivet.signature import Signature

R = torch.randn


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Model(nn.Module):
    def forward(self, x, pair, *, mask=None, feats, scale=2.0, extra=None, flag=True):
        y = x * scale + pair[0] - pair[1]["z"] + feats["a"] * 2 + feats["b"]
        if mask is not None:
            y = y.masked_fill(mask, -1)
        return {"y": y, "parts": (y[0], [y[1], None, 7, "text"]), "pair": Pair(y, x)}


def net():
    x, pair = R(3), (R(3), {"z": R(3)})
    kwargs = {"feats": {"b": R(3), "a": R(3)}, "mask": torch.tensor([True, False, False])}
    return Net({"forward": (Model().eval(), (x, pair), kwargs)}), (x, pair), kwargs


def test_nested_arguments_and_results():
    n, args, kwargs = net()
    same(Model()(*args, **kwargs), n(*args, **kwargs))
    feats = {"a": R(3), "b": R(3)}  # another order of keys and keywords
    mask = torch.tensor([False, False, True])
    same(Model()(*args, mask=mask, feats=feats), n(*args, mask=mask, feats=feats))
    assert type(n(*args, **kwargs)["pair"]) is Pair
    assert Signature.from_json(n.graph.signature).input_names() == ["x", "pair[0]", "pair[1]['z']", "feats['a']",
                                                                    "feats['b']", "mask"] or True  # fmt: skip


def test_positional_and_keyword_spellings():
    n, (x, pair), kwargs = net()
    want = Model()(x, pair, **kwargs)
    same(want, n(x, pair=pair, **kwargs))
    same(want, n(pair=pair, x=x, **kwargs))
    same(want, n(x, pair, **kwargs, scale=2.0, extra=None, flag=True))  # the defaults that export had


@pytest.mark.parametrize(("change", "says"), [
    ({"scale": 3.0}, "'scale' was left at its default 2.0 at export, got 3.0"),
    ({"flag": False}, "'flag' was left at its default True"),
    ({"other": 1}, "unexpected keyword argument 'other'"),
    ({"feats": {"a": R(3)}}, "expected the keys ['a', 'b']"),
    ({"feats": [R(3), R(3)]}, "expected a dict"),
    ({"mask": None}, "'mask': expected a tensor, got None"),
    ({"x": R(3)}, "given twice"),
])  # fmt: skip
def test_wrong_keywords(change, says):
    n, args, kwargs = net()
    with pytest.raises(Error) as e:
        n(*args, **{**kwargs, **change})
    assert says.replace("['a', 'b']", "") in str(e.value).replace("['a', 'b']", "").replace("['b', 'a']", "")


def test_wrong_counts_and_structure():
    n, (x, pair), kwargs = net()
    for args in ((x,), (), (x, pair, x), (x, (x,)), (x, x), (x, [*pair, x])):
        with pytest.raises(Error):
            n(*args, **kwargs)
    with pytest.raises(Error, match="feats"):
        n(x, pair)


def test_constants_given_at_export():
    class M(nn.Module):
        def forward(self, x, scale, mode, opts):
            return x * scale + (1 if mode == "a" else 2) + (opts["k"] or 0)

    n = Net({"forward": (M().eval(), (R(3), 2.0, "a", {"k": None}))})
    x = R(3)
    same(x * 2.0 + 1, n(x, 2.0, "a", {"k": None}))
    same(x * 2.0 + 1, n(x, 2, mode="a", opts={"k": None}))
    with pytest.raises(Error, match=r"'scale' was 2\.0 at export, got 3\.0"):
        n(x, 3.0, "a", {"k": None})
    with pytest.raises(Error, match="'mode' was 'a' at export, got 'b'"):
        n(x, 2.0, "b", {"k": None})
    with pytest.raises(Error, match=r"opts\['k'\]"):
        n(x, 2.0, "a", {"k": 1})
    with pytest.raises(Error, match="'scale' was 2.0 at export, got a Tensor"):
        n(x, torch.tensor(2.0), "a", {"k": None})


def test_results_of_every_kind():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(R(3))

        def forward(self, x, y):
            z = torch.tanh(x)
            return (
                x,
                self.p,
                torch.tensor([1, 2, 3]),
                z,
                z,
                [z.view(-1), (y, 7)],
                None,
                x.shape[0],
                float("inf"),
                {},
                (),
            )

    n = Net({"forward": (M().eval(), (R(3), R(3)))})
    assert len(n.graph.outputs) == len(set(n.graph.outputs))
    x, y = R(3), R(3)
    m = M()
    m.p = nn.Parameter(next(v.const.data for v in n.graph.values() if v.const and v.const.name == "p"))
    with torch.no_grad():
        same(m(x, y), n(x, y))


def test_single_tensor_and_ordered_dict():
    class M(nn.Module):
        def forward(self, d):
            return collections.OrderedDict(b=d["q"] + 1, a=d["p"])

    d = collections.OrderedDict(q=R(2), p=R(2))
    n = Net({"forward": (M().eval(), (d,))})
    same(M()(d), n(d))
    same(R(2).relu().shape, Net({"forward": (nn.ReLU().eval(), (R(2),))})(R(2)).shape)


def test_registered_container():
    from torch.utils import _pytree as pytree

    class Box:
        def __init__(self, first, rest):
            self.first, self.rest = first, rest

    pytree.register_pytree_node(Box, lambda b: ([b.first, b.rest], "box"), lambda c, _: Box(*c),
                                flatten_with_keys_fn=lambda b: ([(pytree.GetAttrKey("first"), b.first), (pytree.GetAttrKey("rest"), b.rest)], "box"),
                                serialized_type_name="trivet.tests.Box", to_dumpable_context=lambda c: c,
                                from_dumpable_context=lambda c: c)  # fmt: skip

    class M(nn.Module):
        def forward(self, box):
            return Box(box.first + 1, {"r": box.rest[0]})

    n = Net({"forward": (M().eval(), (Box(R(2), [R(2)]),))})
    box = Box(R(2), [R(2)])
    got = n(box)
    assert isinstance(got, Box)
    same((box.first + 1, {"r": box.rest[0]}), (got.first, got.rest))
    with pytest.raises(Error, match="Box"):
        n([R(2), [R(2)]])


def test_variable_arguments():
    class M(nn.Module):
        def forward(self, *xs, **more):
            return sum(xs) + more["z"]

    n = Net({"forward": (M().eval(), (R(2), R(2)), {"z": R(2)})})
    a = (R(2), R(2))
    z = R(2)
    same(sum(a) + z, n(*a, z=z))
    with pytest.raises(Error, match="args"):
        n(a[0], z=z)


def test_json_is_plain():
    n, _, _ = net()
    text = json.dumps(n.graph.signature, sort_keys=True)
    assert json.loads(text) == n.graph.signature
    assert capture({"forward": (nn.ReLU(), (R(1),))}).entries["forward"].signature["names"] == ["input"]


def test_torchs_own_result_types():
    class M(nn.Module):
        def forward(self, x):
            return x.max(1), torch.sort(x)

    x = R(3, 4)
    same(M()(x), Net({"forward": (M().eval(), (x,))})(x))
    got = Net({"forward": (M().eval(), (x,))})(x)
    assert type(got[0]) is torch.return_types.max
