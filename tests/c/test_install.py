"""What is installed: find_package, add_subdirectory, pkg-config, trv_run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from ctools import HERE, ROOT, generator, sh, tool

EXPECTED = "2 5 8 11"


def build_app(folder: Path, text: str, *options: object) -> Path:
    folder.mkdir()
    (folder / "app.c").write_text((HERE / "app.c").read_text())
    (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.18)\nproject(app LANGUAGES C)\n" + text)
    sh(tool("cmake"), "-S", folder, "-B", folder / "build", "-G", generator(), *options)
    sh("cmake", "--build", folder / "build", "--target", "app", "-j", "2")
    return folder / "build" / "app"


@pytest.mark.parametrize("target", ["trivet::trivet", "trivet::static"])
def test_find_package(target: str, installed: Path, programs: Path, tmp_path: Path) -> None:
    text = f"find_package(trivet REQUIRED)\nadd_executable(app app.c)\ntarget_link_libraries(app PRIVATE {target})\n"
    app = build_app(tmp_path / "app", text, f"-DCMAKE_PREFIX_PATH={installed}")
    assert sh(app, programs / "cpu_static.trv").strip() == EXPECTED


def test_add_subdirectory(programs: Path, tmp_path: Path) -> None:
    text = f'add_subdirectory("{ROOT}" trivet EXCLUDE_FROM_ALL)\nadd_executable(app app.c)\n'
    text += "target_link_libraries(app PRIVATE trivet::static)\n"
    app = build_app(tmp_path / "app", text, "-DCMAKE_BUILD_TYPE=Debug")
    assert sh(app, programs / "cpu_static.trv").strip() == EXPECTED


def test_pkg_config(installed: Path, libdir: Path, programs: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PKG_CONFIG_PATH": str(libdir / "pkgconfig")}
    flags = sh(tool("pkg-config"), "--cflags", "--libs", "trivet", env=env).split()
    sh("gcc", HERE / "app.c", *flags, f"-Wl,-rpath,{libdir}", "-o", tmp_path / "app")
    assert sh(tmp_path / "app", programs / "cpu_static.trv").strip() == EXPECTED


def test_moved_installation(installed: Path, libdir: Path, programs: Path, tmp_path: Path) -> None:
    """Nothing in the installed files names the folder that it was built in or for."""
    for path in libdir.rglob("*"):
        if path.suffix in (".pc", ".cmake"):
            text = path.read_text()
            assert str(ROOT) not in text and str(installed) not in text, path


# ---- trv_run
@pytest.fixture
def trv_run(installed: Path) -> Path:
    return installed / "bin" / "trv_run"


def fails(*args: object) -> str:
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True)
    assert done.returncode in (1, 2), done
    assert done.stderr.startswith("trv_run: ") or "inspect FILE" in done.stderr
    return done.stderr


def test_inspect(trv_run: Path, programs: Path) -> None:
    text = sh(trv_run, "inspect", programs / "static.trv")
    assert "f32   [4]" in text and "net.second" in text
    facts = json.loads(sh(trv_run, "inspect", programs / "unbounded.trv", "--json"))
    assert facts["entries"][0]["inputs"][0]["shape"] == [[1, 1 << 40], 3]
    assert len(json.loads(sh(trv_run, "inspect", programs / "state.trv", "--json"))["entries"]) == 2


def test_run_npy_and_raw(trv_run: Path, programs: Path, tmp_path: Path) -> None:
    x0, x1 = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)
    np.save(tmp_path / "x0.npy", x0)
    x1.tofile(tmp_path / "x1.raw")
    text = sh(trv_run, "run", programs / "cpu_static.trv", tmp_path / "x0.npy", tmp_path / "x1.raw", "-o", tmp_path)
    assert text.startswith("output 0 y0 f32 [4]")
    np.testing.assert_array_equal(np.load(tmp_path / "output_0.npy"), 2 * x0 + 10)

    x, u = np.random.rand(7, 3).astype(np.float32), np.zeros(7, np.float32)
    x.tofile(tmp_path / "x.bin")
    np.save(tmp_path / "u.npy", u)
    sh(trv_run, "run", programs / "cpu_dynamic.trv", f"{tmp_path}/x.bin@7x3", tmp_path / "u.npy", "-o", tmp_path)
    np.testing.assert_array_equal(np.load(tmp_path / "output_0.npy"), x + x + x)
    assert "peek" in sh(trv_run, "inspect", programs / "cpu_state.trv")
    assert "mean 15" in sh(trv_run, "run", programs / "cpu_state.trv", "--entry", "peek")


def test_weights_beyond_4_gib(trv_run: Path, tmp_path: Path) -> None:
    """A sparse file: offsets past 31 and 32 bits."""
    import programs as P

    from trivet import crc, writer

    offset = (1 << 32) + (1 << 20)
    rows = writer.records(
        "Segment", [{"offset": offset, "size": 16, "crc": crc.crc32c(P.WEIGHTS.tobytes()), "align": 64}]
    )
    head = writer._head(P.cpu_static(), rows, -1, None)
    with (tmp_path / "big.trv").open("wb") as f:
        f.write(head)
        f.seek(offset)
        f.write(P.WEIGHTS.tobytes())
    assert "min 0  mean 1.5  max 3" in sh(trv_run, "run", tmp_path / "big.trv")


def test_bench(trv_run: Path, programs: Path) -> None:
    args = [
        trv_run,
        "bench",
        programs / "cpu_dynamic.trv",
        "--size",
        "1000",
        "--runs",
        "20",
        "--warmup",
        "2",
        "--threads",
        "2",
    ]
    figures = json.loads(sh(*args, "--json"))
    assert figures["runs"] == 20 and 0 < figures["p50_ms"] <= figures["p90_ms"] <= figures["p99_ms"]
    assert figures["bytes"] >= 1000 * 3 * 4
    assert "p50" in sh(*args)


def test_errors(trv_run: Path, programs: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "five.npy", np.zeros(5, np.float32))
    np.save(tmp_path / "double.npy", np.zeros(4))
    (tmp_path / "short.raw").write_bytes(b"1234")
    (tmp_path / "foreign.trv").write_bytes(b"PK\x03\x04" * 100)
    (tmp_path / "empty.trv").write_bytes(b"")
    good = programs / "cpu_static.trv"
    assert "expected 4, got 5" in fails(trv_run, "run", good, tmp_path / "five.npy")
    assert "another dtype" in fails(trv_run, "run", good, tmp_path / "double.npy")
    assert "too small" in fails(trv_run, "run", good, tmp_path / "short.raw")
    assert "dynamic sizes" in fails(trv_run, "run", programs / "cpu_dynamic.trv", tmp_path / "short.raw")
    assert "cannot be opened" in fails(trv_run, "run", good, tmp_path / "absent.npy")
    assert "takes 2 inputs, got 3" in fails(trv_run, "run", good, *[tmp_path / "five.npy"] * 3)
    assert 'no entry "nope"' in fails(trv_run, "run", good, "--entry", "nope")
    assert "not a trivet program" in fails(trv_run, "run", tmp_path / "foreign.trv")
    assert "empty" in fails(trv_run, "inspect", tmp_path / "empty.trv")
    assert "cannot be opened" in fails(trv_run, "inspect", tmp_path / "absent.trv")
    assert "no device for this delegate" in fails(trv_run, "run", programs / "static.trv")
    external = programs / "cpu_external.trv"
    assert "not attached" in fails(trv_run, "run", external)
    assert "not the program's weights" in fails(trv_run, "run", external, "--weights", good)
    assert "min 0  mean 1.5  max 3" in sh(trv_run, "run", external, "--weights", programs / "cpu_external.bin")
    assert "not understood" in fails(trv_run, "bench", good, "--runs", "0")
    fails(trv_run, "dance", good)
