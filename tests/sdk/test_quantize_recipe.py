"""Recipes: presets, rules, validation, text and JSON. No torch is needed for them."""

import subprocess
import sys

import pytest

import trivet
from trivet.quantize.recipe import ROWS, W8, Recipe, Spec, check_rules, matches, recipe

PRESETS = ("w8a8", "w8a8-dynamic", "w8a16", "w8", "w4g32", "w4g64a8", "f16", "bf16")


def test_presets_say_what_their_names_say():
    assert recipe("w8") == Recipe(W8) and W8 == Spec("i8", symmetric=True, granularity="channel")
    assert W8.limits == (-127, 127)
    w8a8 = recipe("w8a8")
    assert w8a8.weight == W8 and w8a8.static and w8a8.calibrated
    assert (w8a8.activation.dtype, w8a8.activation.symmetric, w8a8.activation.limits) == ("i8", False, (-128, 127))
    dynamic = recipe("w8a8-dynamic")
    assert dynamic.activation == ROWS and not dynamic.static and not dynamic.calibrated
    assert ROWS.symmetric and ROWS.dynamic and ROWS.granularity == "row"
    assert recipe("w8a16").activation.limits == (-32767, 32767)
    four = recipe("w4g48")
    assert (four.weight.dtype, four.weight.group, four.weight.limits, four.activation) == ("i4", 48, (-8, 7), None)
    assert recipe("w4g48a8").activation == ROWS
    assert recipe("bf16").half == "bf16" and recipe("bf16").weight is None


@pytest.mark.parametrize("name", PRESETS)
def test_preset_names_round_trip(name):
    r = recipe(name)
    assert r.name == name and str(r) == name and recipe(r) is r
    assert Recipe.from_json(r.to_json()) == r


@pytest.mark.parametrize("name", ["", "w8a4", "w4", "w4g", "w4g7", "w4g0", "w4g12a8", "W8A8", "w4g32a16", 8, None])
def test_unknown_names(name):
    with pytest.raises(trivet.Error) as e:
        recipe(name)
    assert str(e.value)


def test_json_keeps_everything():
    r = Recipe(
        Spec("i4", symmetric=False, granularity="group", group=16, observer="mse"),
        ROWS,
        {"head": None, "op:embedding": "w8", "layers.*.norm": Recipe(W8, Spec("i16"))},
    )
    again = Recipe.from_json(r.to_json())
    assert again == r and hash(again) == hash(r)
    import json

    assert Recipe.from_json(json.dumps(r.to_json())) == r
    text = str(r)
    assert "groups of 16" in text and "head: float" in text and "op:embedding: w8" in text
    assert "percentile 99.9" in str(Recipe(W8, Spec("i8", observer="percentile", percentile=99.9)))


@pytest.mark.parametrize(
    "data", [{"weights": {}}, {"weight": {"bits": 8}}, "{", "[" * 99999, [], {"rules": [["a"]]}, {"rules": 3}]
)
def test_json_of_something_else(data):
    with pytest.raises(trivet.Error):
        Recipe.from_json(data)


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda: Spec("i3"), "dtype='i3'"),
        (lambda: Spec(granularity="block"), "granularity"),
        (lambda: Spec(granularity="group"), "group=0"),
        (lambda: Spec(group=32), "group=32"),
        (lambda: Spec(granularity="group", group=12), "multiple of 8"),
        (lambda: Spec(observer="entropy"), "observer"),
        (lambda: Spec(observer="percentile", percentile=30), "percentile=30"),
        (lambda: Spec(granularity="channel", observer="histogram"), "per tensor"),
        (lambda: Spec(symmetric=1), "symmetric"),
        (lambda: Spec(group=True, granularity="group"), "group"),
        (lambda: Recipe("i8"), "weight of a Recipe"),
        (lambda: Recipe(Spec("i16")), "8 or 4 bits"),
        (lambda: Recipe(ROWS), "do not change"),
        (lambda: Recipe(Spec("i8", symmetric=False)), "affine weights"),
        (lambda: Recipe(W8, Spec("i4")), "not 4"),
        (lambda: Recipe(W8, Spec("i16", symmetric=False)), "16-bit activations are symmetric"),
        (lambda: Recipe(W8, Spec(granularity="channel")), "scale per tensor"),
        (lambda: Recipe(W8, Spec(dynamic=True)), "scale per row"),
        (lambda: Recipe(None, Spec()), "needs weight"),
        (lambda: Recipe(Spec("i4", granularity="group", group=32), Spec()), "static activations"),
        (lambda: Recipe(W8, bias_correction=True), "bias_correction"),
        (lambda: Recipe(W8, equalize=True), "equalize"),
        (lambda: Recipe(W8, Spec(), equalize_relu6=True), "equalize_relu6"),
        (lambda: Recipe(W8, half="f16"), "half"),
        (lambda: Recipe(half="f8"), "half"),
        (lambda: Recipe(W8, rules={"op:": None}), "pattern"),
        (lambda: Recipe(W8, rules={"node:": None}), "pattern"),
        (lambda: Recipe(W8, rules={3: None}), "pattern"),
        (lambda: recipe("w4g0"), "w4g0: a group"),
        (lambda: Recipe(W8, rules=5), "rules"),
        (lambda: Recipe(W8, rules={"a": Recipe(W8, rules={"b": None})}), "rules of its own"),
        (lambda: Recipe(W8, rules={"a": "f16"}), "half"),
    ],
)
def test_what_no_recipe_can_say(make, what):
    with pytest.raises(trivet.Error, match=what.replace("(", r"\(")):
        make()


def test_rules_by_path_and_kind():
    assert matches("head", "head", "linear") and matches("head", "head.fc.0", "linear")
    assert not matches("head", "header", "linear") and not matches("fc", "head.fc", "linear")
    assert (
        matches("layers.*.norm", "layers.3.norm.inner", "norm") and matches("*", "", "conv") and matches("", "a.b", "x")
    )
    assert matches("op:soft*", "anywhere", "softmax") and not matches("op:softmax", "softmax", "linear")


def test_the_last_rule_that_fits_wins():
    r = Recipe(W8, Spec(), {"enc": None, "enc.first": "w8a16", "op:softmax": None, "enc.first.x": "float"})
    assert r.at("dec", "linear") is r
    assert r.at("enc.second", "linear") is None
    assert r.at("enc.first", "conv") == recipe("w8a16")
    assert r.at("enc.first", "softmax") is None and r.at("enc.first.x", "conv") is None
    more = r.keep({"enc": "w8"})
    assert more.at("enc.first", "conv") == recipe("w8") and r.at("enc.first", "conv") != recipe("w8")
    assert r.keep(["dec.out"]).at("dec.out.0", "conv") is None
    assert Recipe(W8, rules={"a": "w8a8"}).calibrated and not Recipe(W8, rules={"a": None}).calibrated


def test_rules_by_node():
    r = Recipe(W8, rules={"a": None, "node:linear_?": "w8a8"})
    assert r.at("a.b", "linear", "linear_3") == recipe("w8a8") and r.at("a.b", "linear", "linear") is None
    assert r.at("b", "linear", "mul") is r


@pytest.mark.parametrize(("pattern", "why"), [
    ("encodr.0", "means no module of this model"), ("*.norm", "means no module"), ("op:linera", "means no kind of operator"),
    ("node:linear_7", "means no operator of this model")])  # fmt: skip
def test_rules_that_mean_nothing(pattern, why):
    def check(p):
        check_rules(Recipe(W8, rules={p: None}), {"encoder.0", ""}, {"linear", "softmax"}, {"linear_1"})

    for good in ("encoder", "encoder.?", "*", "op:soft*", "node:linear_1"):
        check(good)
    with pytest.raises(trivet.Error, match=why) as e:
        check(pattern)
    assert "near it: " in e.value.remedy or "print the report" in e.value.remedy


def test_importing_costs_nothing():
    code = (
        "import sys, trivet; trivet.Recipe; trivet.quantize.Spec(); assert not {'torch', 'torchao'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
