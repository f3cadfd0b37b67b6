"""export, capture, lower, check, compare, and the verbs of the command line that need a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trivet
from trivet.cli import main
from trivet.error import Error

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from trivet.compare import compare, relative_error  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 3)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))

net = Net().eval()

def build():
    return Net().eval(), (torch.ones(2, 4),)

def dynamic():
    return Net().eval(), (torch.ones(2, 4),), None, {"x": {0: torch.export.Dim("n", min=1, max=64)}}

def other():
    model, args = build()
    with torch.no_grad():
        model.b.weight += 1
    return model, args

def two():
    m = Net().eval()
    return {"encode": (m, (torch.ones(2, 4),)), "again": (m, (torch.ones(3, 4),))}

class Bad(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvalsh(x) + torch.linalg.svdvals(x)

def bad():
    return Bad(), (torch.ones(4, 4),)

def broken():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "models_for_cli.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    for name in ("models_for_cli",):
        sys.modules.pop(name, None)
    return "models_for_cli.py"


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.sigmoid(self.second(torch.relu(self.first(x)))))


def words(capsys, *argv):
    status = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


# ---- the package --------------------------------------------------------------------------------------------------------
def test_names_are_the_functions_whatever_was_imported_before():
    code = ("import trivet.cli, trivet.api, trivet.runtime, trivet.program, trivet.compare, trivet\n"
            "assert callable(trivet.check) and callable(trivet.export) and callable(trivet.load)\n"
            "assert sorted(trivet.__all__) == dir(trivet)\n"
            "assert isinstance(trivet.Net, type) and issubclass(trivet.Error, Exception)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "sdk")})


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trivet.nonsense


def test_running_needs_no_torch(tmp_path):
    trivet.export(Small().eval(), (torch.ones(1, 6),)).save(tmp_path / "m.trv")
    code = ("import sys, numpy as np, trivet\n"
            f"net = trivet.load({str(tmp_path / 'm.trv')!r})\n"
            "y = net(np.ones((1, 6), np.float32))\n"
            "assert y.shape == (1, 2) and 'torch' not in sys.modules, sorted(m for m in sys.modules if 'torch' in m)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT / "sdk")})


# ---- stages -------------------------------------------------------------------------------------------------------------
def test_stages_make_what_export_makes():
    model, args = Small().eval(), (torch.ones(1, 6),)
    module = trivet.capture(model, args)
    assert "entry forward" in str(module) and "matmul" in str(module)
    program = trivet.lower(module)
    assert bytes(program) == bytes(trivet.export(model, args))
    assert "entry forward" in str(program) and "arena" in str(program)


def test_program_is_loaded_as_it_is(tmp_path):
    model, x = Small().eval(), torch.randn(1, 6)
    program = trivet.export(model, (x,))
    want = model(x).detach()
    path = tmp_path / "net.trv"
    program.save(path)
    for source in (program, path, str(path), bytes(program), path.read_bytes()):
        assert torch.allclose(trivet.load(source)(x), want, atol=1e-6)
    assert torch.allclose(trivet.load(path, defer_crc=True, threads=1)(x), want, atol=1e-6)


def test_external_weights(tmp_path):
    model, x = Small().eval(), torch.randn(1, 6)
    program = trivet.export(model, (x,))
    program.save(tmp_path / "net.trv", weights=tmp_path / "net.bin")
    want = model(x).detach()
    assert torch.allclose(trivet.load(tmp_path / "net.trv", weights=tmp_path / "net.bin")(x), want, atol=1e-6)
    with pytest.raises(Error):
        trivet.load(tmp_path / "net.trv")
    (tmp_path / "wrong.bin").write_bytes(bytes(64) + (tmp_path / "net.bin").read_bytes()[64:])
    with pytest.raises(Error):
        trivet.load(tmp_path / "net.trv", weights=tmp_path / "wrong.bin")
    with pytest.raises(Error, match="no such file"):
        trivet.load(tmp_path / "net.trv", weights=tmp_path / "none.bin")


def test_exported_program_and_pt2(tmp_path):
    model, x = Small().eval(), torch.randn(1, 6)
    exported = torch.export.export(model, (x,))
    torch.export.save(exported, tmp_path / "m.pt2")
    for source in (exported, tmp_path / "m.pt2", str(tmp_path / "m.pt2")):
        assert torch.allclose(trivet.load(trivet.export(source))(x), model(x), atol=1e-6)


def test_keyword_arguments_and_structure():
    class M(nn.Module):
        def forward(self, pair, *, scale, extra=None):
            a, b = pair
            return {"sum": a + b * scale, "parts": (a, [b])}

    a, b, s = torch.randn(3), torch.randn(3), torch.tensor(2.0)
    net = trivet.load(trivet.export(M(), ((a, b),), {"scale": s}))
    got = net((a, b), scale=s)
    assert torch.allclose(got["sum"], a + b * s) and torch.equal(got["parts"][1][0], b)
    assert isinstance(got["parts"], tuple) and isinstance(got["parts"][1], list)
    got = net((a.numpy(), b.numpy()), scale=2.0)
    assert isinstance(got["sum"], np.ndarray)
    with pytest.raises(Error, match="scale"):
        net((a, b))


def test_wrong_use_of_export():
    model, x = Small().eval(), torch.ones(1, 6)
    with pytest.raises(Error, match="must be a tuple, got Tensor"):
        trivet.export(model, x)
    with pytest.raises(Error, match="each brings its own"):
        trivet.export({"a": (model, (x,))}, (x,))
    with pytest.raises(Error, match="got 4 values"):
        trivet.export({"a": (model, (x,), {}, None)})
    with pytest.raises(Error, match="entry: its dynamic shapes"):
        trivet.export({"a": (model, (x,))}, dynamic_shapes=[None])
    with pytest.raises(Error, match="there is no pass 'nonsense'"):
        trivet.export(model, (x,), dump_after="nonsense")
    with pytest.raises(Error):
        trivet.export(model, (x,), target="toaster")


def test_dump_after(capfd):
    trivet.export(Small().eval(), (torch.ones(1, 6),), dump_after="canonicalize, fuse_elementwise")
    err = capfd.readouterr().err
    assert "# after canonicalize" in err and "# after fuse_elementwise" in err and "matmul" in err


def test_check_lists_everything():
    class M(nn.Module):
        def forward(self, x):
            return torch.linalg.svdvals(x) + torch.linalg.eigvalsh(x)

    found = trivet.check(M(), (torch.ones(4, 4),))
    assert not found and len(found.problems) >= 2
    assert "test_api.py:" in str(found) and len(found.to_json()["problems"]) == len(found.problems)
    good = trivet.check(Small().eval(), (torch.ones(1, 6),))
    assert good and "ok" in str(good)


# ---- compare ------------------------------------------------------------------------------------------------------------
def test_compare_finds_the_layer():
    model, x = Small().eval(), torch.randn(5, 6)
    program = trivet.export(model, (x,))
    same = compare(model, (x,), program=program)
    assert same.ok and same.first is None and max(same.outputs) < 1e-5
    assert all(layer.harmless for layer in same.layers)
    assert any(layer.twin for layer in same.layers)
    for part in ("first", "second", "last"):
        changed = Small().eval()
        with torch.no_grad():
            getattr(changed, part).weight[0, 0] += 0.5
            getattr(changed, part).bias += 0.5
        found = compare(changed, (x,), program=program)
        assert not found.ok and found.first is not None
        assert part in found.first.place.module, (part, str(found))
        assert part in str(found) and "test_api.py:" in str(found)
        assert found.to_json()["first"]["module"] == found.first.place.module


def test_compare_exports_by_itself():
    assert compare(Small(), (torch.randn(2, 6),)).ok
    with pytest.raises(Error, match="got int"):
        compare(3)


def test_compare_with_state():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(3))

        def forward(self, x):
            self.n.add_(x)
            return self.n * 2

    model = Counter()
    assert compare(model, (torch.ones(3),)).ok
    assert torch.equal(model.n, torch.zeros(3))


def test_relative_error():
    inf, nan = float("inf"), float("nan")
    a = np.array([1.0, -4.0, inf, nan])
    assert relative_error(a, a) == 0
    assert relative_error(a, np.array([1.0, -3.0, inf, nan])) == 0.25
    assert relative_error(a, np.array([1.0, -4.0, 5.0, nan])) == inf
    assert relative_error(a, np.array([1.0, -4.0, inf, 0.0])) == inf
    assert relative_error(a, a[:2]) == inf
    assert relative_error(np.zeros(0), np.zeros(0)) == 0
    assert relative_error(np.array([True, False]), np.array([True, True])) == 1


# ---- command line -------------------------------------------------------------------------------------------------------
def test_cli_export_run_compare(capsys, models, tmp_path):
    status, out, _ = words(capsys, "export", f"{models}:build", "-o", "net.trv")
    assert status == 0 and "wrote net.trv" in out and "entry forward" in out
    status, out, _ = words(capsys, "export", f"{models}:net", "--example", "2x4", "-o", "b.trv", "--json")
    assert status == 0 and json.loads(out)["path"] == "b.trv"
    assert Path("net.trv").read_bytes() == Path("b.trv").read_bytes()
    status, out, _ = words(capsys, "compare", f"{models}:build", "net.trv")
    assert status == 0 and ": ok" in out and "largest errors" in out
    status, out, _ = words(capsys, "compare", f"{models}:other", "net.trv", "--all")
    assert status == 1 and "first layer beyond tolerance" in out and "models_for_cli.py:" in out
    status, out, _ = words(capsys, "compare", f"{models}:other", "net.trv", "--json")
    assert status == 1 and json.loads(out)["first"]["module"].startswith("b")
    np.save("x.npy", np.full((2, 4), 2, np.float32))
    status, out, _ = words(capsys, "compare", f"{models}:Net", "net.trv", "--data", "x.npy")
    assert status == 0, out
    status, out, _ = words(capsys, "run", "net.trv", "x.npy")
    assert status == 0 and "float32[2, 3]" in out


def test_cli_dynamic(capsys, models):
    for extra in (("dynamic",), ("build", "--dynamic", "0.0=1..64"), ("build", "--dynamic", "x.0=n:1..64")):
        status, out, _ = words(capsys, "export", f"{models}:{extra[0]}", *extra[1:], "-o", "d.trv")
        assert status == 0 and "1..64" in out
        status, out, _ = words(capsys, "run", "d.trv", "--shape", "x=33x4")
        assert status == 0 and "float32[33, 3]" in out
    status, _, err = words(capsys, "run", "d.trv", "--shape", "x=65x4")
    assert status == 1 and "expected 1..64, got 65" in err
    for bad in ("0=1..4", "y.0=1..4"):
        status, _, err = words(capsys, "export", f"{models}:build", "--dynamic", bad)
        assert status == 1 and "error:" in err


def test_cli_entries(capsys, models):
    status, out, _ = words(capsys, "export", f"{models}:two", "-o", "two.trv")
    assert status == 0 and "entry encode" in out and "entry again" in out
    status, out, _ = words(capsys, "inspect", "two.trv", "--entry", "again")
    assert status == 0 and "entry again" in out and "entry encode" not in out
    status, out, _ = words(capsys, "compare", f"{models}:two", "two.trv", "--entry", "again")
    assert status == 0


def test_cli_strip_and_dump(capsys, models):
    status, _, err = words(
        capsys, "export", f"{models}:build", "-o", "s.trv", "--strip", "--dump-after", "canonicalize"
    )
    assert status == 0 and "# after canonicalize" in err
    status, out, _ = words(capsys, "inspect", "s.trv")
    assert status == 0 and "models_for_cli.py" not in out
    assert b"models_for_cli" not in Path("s.trv").read_bytes()


def test_cli_check(capsys, models):
    status, out, _ = words(capsys, "check", f"{models}:build")
    assert status == 0 and "ok" in out
    status, out, _ = words(capsys, "check", f"{models}:bad")
    assert status == 1 and "models_for_cli.py:" in out and "to do:" in out
    status, out, _ = words(capsys, "check", f"{models}:bad", "--json")
    assert status == 1 and json.loads(out)["ok"] is False


@pytest.mark.parametrize("spec, text", [
    ("nowhere.py:net", "no such file"), ("models_for_cli.py:nothing", "has no 'nothing'"), ("models_for_cli.py", "names no model"),
    ("models_for_cli.py:broken", "no weights here"), ("no_such_module_x:net", "cannot import"), ("none.pt2", "no such file"),
    ("models_for_cli.py:MODELS", "has no"), ("models_for_cli.py:torch", "gives a module"),
])  # fmt: skip
def test_cli_models_that_are_none(capsys, models, spec, text):
    status, _, err = words(capsys, "check", spec)
    assert status == 1 and text in " ".join(err.split())


@pytest.mark.parametrize("example, text", [("1,2", "is no shape"), ("f99:1x2", "is no dtype")])
def test_cli_bad_examples(capsys, models, example, text):
    status, _, err = words(capsys, "export", f"{models}:net", "--example", example)
    assert status == 1 and text in err
