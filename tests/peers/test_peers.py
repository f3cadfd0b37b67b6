"""The harness itself, on one small workload with trivet and torch; the real races take hours (README.md)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import race  # noqa: E402
import table  # noqa: E402
import workloads  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two precisions prepared and measured in this process; two rounds of runs.jsonl."""
    path = tmp_path_factory.mktemp("race")
    race.main(
        [
            "prepare",
            "--dir",
            str(path),
            "--peers",
            "trivet",
            "torch-eager",
            "--workloads",
            "autoencoder",
            "--precisions",
            "fp32",
        ]
    )
    prepared = race.rows_of(path / "prepared.jsonl")
    assert [(r["peer"], r["ok"]) for r in prepared] == [("trivet", True), ("torch-eager", True)]

    class Args:
        dir, workload, threads, warm, seconds = str(path), "autoencoder", [1, 2], 0.0, 0.01

    for turn in range(2):
        for r in prepared:
            Args.peer, Args.paths = r["peer"], r["paths"]
            got = race.measure(Args)
            assert got["rms_rel"] < 1e-5 and [x["threads"] for x in got["results"]] == [1, 2]
            for busy in (False, True):
                race.append(path / "runs.jsonl", {"workload": "autoencoder", "precision": "fp32", "peer": r["peer"], "round": turn, "ok": True,
                                                  "bytes": r["bytes"], "busy": busy, **got})  # fmt: skip
    machine = {"name": "x", "threads": 1, "ops": {"f32": 1e11, "i8": 4e11, "bf16": 0.0}, "reads": [[1, 2e10]]}
    race.append(path / "limits.jsonl", machine)
    race.append(path / "native.jsonl", {"workload": "autoencoder", "precision": "fp32", "peer": "trivet", "threads": 1, "round": 0,
                                        "load_ms": 1.0, "first_ms": 0.5, "median_ms": 0.01, "rss_mb": 2.0})  # fmt: skip
    return path


def test_tables(folder, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.main(["--dir", str(folder), "--readme", str(readme)])
    text = readme.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    for wanted in (
        "| autoencoder | fp32 |",
        "torch-eager",
        "geometric mean",
        "A busy process on every core",
        "0.010 / 1.00 / 0.500 / 2.0",
    ):
        assert wanted in text
    assert "All, 2 threads" in capsys.readouterr().out
    data = table.Data(folder)
    assert data.best("autoencoder", "fp32", 1)[0] == "torch-eager"
    assert data.limit("autoencoder", "fp32", 1) == pytest.approx(2 * 264192 / 1e11 * 1e3)


def test_figures_take_clean_rounds():
    def item(median, others, cpu=1.0, p10=1.0):
        row = {"load_s": 0.1, "first_s": 0.1, "rss_peak_kb": 2048, "rss_import_kb": 1024, "bytes": 5e6, "rms_rel": 0.0}
        return row, {"median": median, "cpu_median": cpu, "p10": p10, "others_cpu": others}

    f = table.figure([item(3.0, 0.0), item(9.0, 0.9), item(4.0, 0.1)], 1)
    assert (f.ms, f.mark, f.clean, f.rounds, f.rss) == (3500.0, "", 2, 3, 1.0)
    f = table.figure([item(3.0, 0.9, cpu=2.0), item(9.0, 0.9, cpu=2.5)], 1)
    assert (f.ms, f.mark) == (2250.0, "c")
    assert table.figure([item(3.0, 0.9, p10=0.5), item(3.0, 0.9, p10=0.7)], 2).mark == "~"


def test_workloads_are_the_same_each_time():
    model, inputs = workloads.make("dscnn_kws")
    again, same = workloads.make("dscnn_kws")
    assert (inputs[0] == same[0]).all()
    assert all((a == b).all() for a, b in zip(model.parameters(), again.parameters()))
    macs, weights = workloads.cost(model, inputs)
    assert macs == 2656768 and weights == 4 * sum(p.numel() for p in model.parameters())
