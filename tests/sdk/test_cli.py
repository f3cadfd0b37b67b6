"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from handmade import add, counter

from trivet.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "add.trv"
    path.write_bytes(add(low_high=(1, 512)))
    return str(path)


def run(capsys, *words):
    status = main([str(w) for w in words])
    out, err = capsys.readouterr()
    return status, out, err


def test_help_teaches(capsys):
    assert main([]) == 2
    assert "COMMAND --help" in capsys.readouterr().out
    for command in ("export", "run", "inspect", "bench", "profile", "tune", "compare", "check"):
        with pytest.raises(SystemExit) as e:
            main([command, "--help"])
        assert e.value.code == 0
        assert f"trivet {command} " in capsys.readouterr().out.split("examples:")[1]


def test_wrong_words(capsys):
    with pytest.raises(SystemExit) as e:
        main(["run"])
    assert e.value.code == 2
    with pytest.raises(SystemExit):
        main(["bench", "x.trv", "--runs", "0"])


def test_module_runs():
    out = subprocess.run([sys.executable, "-m", "trivet", "--version"], capture_output=True, text=True, check=True,
                         env={**os.environ, "PYTHONPATH": str(ROOT / "sdk")})  # fmt: skip
    assert out.stdout.startswith("trivet ")


def test_run_npy(capsys, file, tmp_path):
    a, b = np.ones((2, 3), np.float32), np.full((2, 3), 2, np.float32)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    status, out, _ = run(capsys, "run", file, tmp_path / "a.npy", f"b={tmp_path / 'b.npy'}")
    assert status == 0 and "float32[2, 3]" in out and "3." in out
    status, _, _ = run(capsys, "run", file, tmp_path / "a.npy", tmp_path / "b.npy", "-o", tmp_path / "y.npz")
    assert status == 0 and np.array_equal(np.load(tmp_path / "y.npz")["y"], a + b)
    run(capsys, "run", file, tmp_path / "a.npy", tmp_path / "b.npy", "-o", tmp_path / "folder")
    assert np.array_equal(np.load(tmp_path / "folder" / "y.npy"), a + b)
    status, out, _ = run(capsys, "run", file, tmp_path / "a.npy", tmp_path / "b.npy", "--json")
    assert json.loads(out)["y"]["values"] == (a + b).tolist()


def test_run_raw_and_npz(capsys, file, tmp_path):
    a, b = np.arange(12, dtype=np.float32).reshape(4, 3), np.ones((4, 3), np.float32)
    (tmp_path / "a.raw").write_bytes(a.tobytes())
    np.savez(tmp_path / "in.npz", b=b, a=a)
    np.save(tmp_path / "b.npy", b)
    status, _, _ = run(capsys, "run", file, tmp_path / "in.npz", "-o", tmp_path / "y.npy")
    assert status == 0 and np.array_equal(np.load(tmp_path / "y.npy"), a + b)
    words = ("run", file, tmp_path / "a.raw", tmp_path / "b.npy", "-o", tmp_path / "z.npy")
    status, _, err = run(capsys, *words)
    assert status == 1 and "does not tell its shape" in err and "--shape a=" in err
    status, _, _ = run(capsys, *words, "--shape", "a=4x3")
    assert status == 0 and np.array_equal(np.load(tmp_path / "z.npy"), a + b)
    status, _, err = run(capsys, *words, "--shape", "a=5x3")
    assert status == 1 and "60 bytes expected (float32[5, 3]), got 48" in err


def test_errors_are_one_message_and_status_1(capsys, file, tmp_path):
    status, out, err = run(capsys, "run", tmp_path / "none.trv")
    assert status == 1 and "no such file" in err and not out
    status, out, _ = run(capsys, "run", tmp_path / "none.trv", "--json")
    assert status == 1 and "no such file" in json.loads(out)["error"]["reason"]
    status, _, err = run(capsys, "run", file, "--entry", "decode")
    assert status == 1 and "no entry 'decode'" in err
    (tmp_path / "bad.trv").write_bytes(b"hello")
    status, _, err = run(capsys, "inspect", tmp_path / "bad.trv")
    assert status == 1 and "error:" in err


def test_run_repeat_keeps_state(capsys, tmp_path):
    path = tmp_path / "c.trv"
    path.write_bytes(counter())
    np.save(tmp_path / "x.npy", np.ones(2, np.float32))
    status, out, _ = run(capsys, "run", path, tmp_path / "x.npy", "--entry", "step", "--repeat", 3, "--json")
    assert status == 0 and json.loads(out)["y"]["values"] == [3, 3]


def test_inspect(capsys, file):
    status, out, _ = run(capsys, "inspect", file)
    assert status == 0
    for text in ("entry forward", "a: f32[1..512, 3]", "memory:", "block.add (net.py:7)", "map", "cpu"):
        assert text in out, text
    status, out, _ = run(capsys, "inspect", file, "--json")
    data = json.loads(out)["entries"][0]
    assert data["commands"][0]["module"] == "block.add" and data["commands"][0]["op"] == "map"
    assert data["inputs"][0] == {"name": "a", "type": "f32[1..512, 3]"}
    status, out, _ = run(capsys, "inspect", file, "--no-steps")
    assert "block.add (net.py:7)\n" not in out


def test_profile_and_tune(capsys, file, tmp_path):
    limits, trace, words = (
        tmp_path / "limits.json",
        tmp_path / "t.json",
        ("--shape", "a=9x3", "--shape", "b=9x3", "--threads", 1),
    )
    limits.write_text("{}")
    status, out, _ = run(capsys, "profile", file, *words, "--runs", 3, "--machine", limits, "--trace", trace)
    assert (
        status == 0
        and "map__" in out
        and "of what this machine allows" in out
        and json.loads(trace.read_text())["traceEvents"]
    )
    assert len(json.loads(limits.read_text())) == 1
    status, out, _ = run(capsys, "profile", file, *words, "--runs", 3, "--machine", limits, "--json")
    assert status == 0 and json.loads(out)["rows"][0]["calls"] == 1
    before = Path(file).read_bytes()
    status, out, _ = run(
        capsys, "tune", file, *words, "--rounds", 1, "--seconds", 0.1, "-o", tmp_path / "o.trv", "--json"
    )
    assert status == 0 and set(json.loads(out)["before"]) == {"forward"} and Path(file).read_bytes() == before
    assert run(capsys, "run", tmp_path / "o.trv", *words[:4])[0] == 0


def test_bench(capsys, file):
    status, out, _ = run(capsys, "bench", file, "--runs", 7, "--shape", "a=9x3", "--shape", "b=9x3")
    assert status == 0 and "p50" in out and "float32[9, 3]" in out
    status, out, _ = run(capsys, "bench", file, "--runs", 7, "--threads", 1, "--json")
    data = json.loads(out)
    assert data["runs"] == 7 and data["threads"] == 1 and 0 < data["p50_ms"] <= data["p99_ms"]
    assert data["load_ms"] > 0 and data["first_ms"] > 0 and data["file_bytes"] > 0 and data["context_bytes"] > 0
    status, _, err = run(capsys, "bench", file, "--runs", 3, "--max-p50", "0")
    assert status == 1 and "at most 0 ms" in err
    status, _, err = run(capsys, "bench", file, "--shape", "c=1")
    assert status == 1 and "no input c" in err


def test_percentiles():
    from trivet.bench import percentile

    ms = [float(i) for i in range(1, 101)]
    assert [percentile(ms, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 99) == 7.0


# ---- quantising ---------------------------------------------------------------------------------------------------------
MODELS = """
import torch
from torch import nn

torch.manual_seed(0)
NET = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(144, 3)).eval()
X = torch.randn(4, 1, 2, 8, 8)

def build():
    return NET, (X[0],)

def batches():
    return [(x,) for x in X]

def closeness(net):
    return -float((net(X[0]) - NET(X[0])).abs().max())

def nothing(net):
    return float("nan")
"""


@pytest.fixture
def net_py(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quantised_net.py").write_text(MODELS)
    yield "quantised_net.py"
    sys.modules.pop("quantised_net", None)


def test_quantize_prints_the_report(capsys, net_py):
    np.savez("data.npz", input=np.random.default_rng(0).standard_normal((4, 1, 2, 8, 8)).astype(np.float32))
    status, out, _ = run(capsys, "quantize", f"{net_py}:build", "w8a8", "--calibrate", "data.npz", "-o", "small.trv")
    assert status == 0, out
    for text in ("quantised by w8a8, 4 calibration batches", "in integers: 3 kernels (100 %), 100.0 %", "conv2d + relu at 0",
                 "linear at 4", "wrote small.trv"):  # fmt: skip
        assert text in out, text
    status, out, _ = run(capsys, "quantize", f"{net_py}:build", "--calibrate", f"{net_py}:batches", "--worst", 1)
    assert status == 0 and len([line for line in out.splitlines() if " at " in line]) == 1
    status, out, _ = run(capsys, "quantize", f"{net_py}:build", "w8", "--json")
    data = json.loads(out)
    assert status == 0 and data["recipe"] == "w8" and {x["form"] for x in data["layers"]} == {"weights"}
    status, out, _ = run(capsys, "inspect", "small.trv")
    assert status == 0 and "conv2d + relu at 0" in out and "i8[1, 8, 8, 8] x 0." in out and "const" in out
    status, out, _ = run(capsys, "inspect", "small.trv", "--json")
    data = json.loads(out)
    assert data["quantization"]["recipe"] == "w8a8" and data["entries"][0]["weights"]["i8"] > 0
    status, out, _ = run(capsys, "compare", f"{net_py}:build", "small.trv")
    assert status == 0 and "quantised: 1 results at" in out and "20 dB wanted: ok" in out
    status, out, _ = run(capsys, "compare", f"{net_py}:build", "small.trv", "--min-sqnr", 90)
    assert status == 1 and "first layer beyond tolerance: " in out and " dB against " in " ".join(out.split())


def test_export_quantized(capsys, net_py):
    words = ("export", f"{net_py}:build", "-o", "net.trv", "--quantize", "w8a8", "--calibrate", f"{net_py}:batches")
    status, out, _ = run(capsys, *words, "--metric", f"{net_py}:closeness", "--max-drop", 0.5)
    assert status == 0 and "quantised by w8a8" in out and "metric: -0." in out
    status, out, _ = run(capsys, "export", f"{net_py}:build", "-o", "b.trv", "--quantize", "w8", "--strip", "--json")
    assert status == 0 and json.loads(out)["quantization"] is None


@pytest.mark.parametrize(("words", "text"), [
    (("--quantize", "w9"), "there is no recipe 'w9'"),
    (("--quantize", "w8a8"), "needs calibration data"),
    (("--calibrate", "quantised_net.py:batches"), "calibrate goes with quantize"),
    (("--metric", "quantised_net.py:closeness"), "metric goes with quantize"),
    (("--quantize", "w8a8", "--calibrate", "none.npz"), "cannot read none.npz"),
    (("--quantize", "w8a8", "--calibrate", "quantised_net.py:none"), "has no 'none'"),
    (("--quantize", "w8a8", "--calibrate", "wrong.npz"), "1 arrays expected (input), got a, b"),
    (("--quantize", "w8", "--metric", "quantised_net.py:nothing"), "the metric of the float model is nan"),
    (("--quantize", "w8", "--metric", "quantised_net.py:closeness", "--max-drop", "-1"), "max_drop must be"),
    (("--quantize", "w8", "--metric", "quantised_net.py:X"), "metric is a Tensor"),
])  # fmt: skip
def test_quantize_wrong_words(capsys, net_py, words, text):
    np.savez("wrong.npz", a=np.zeros(3), b=np.zeros(3))
    status, _, err = run(capsys, "export", f"{net_py}:build", *words)
    assert status == 1 and text in " ".join(err.split()), err
