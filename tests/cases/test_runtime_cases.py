"""Cases of kind runtime (cases.py): each scenario as a test. rt_big_endian is in tests/c, with the cross builds."""

from __future__ import annotations

import copy
import gc
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import cases as C  # noqa: E402

import trivet  # noqa: E402
from trivet import native  # noqa: E402
from trivet.fbs.structs import RegionKind  # noqa: E402

torch.set_grad_enabled(False)


def program(id: str, tmp_path: Path) -> tuple[Any, tuple[Any, ...], Any, Path]:
    module, args, kwargs, dyn, tol = C.build(id)
    path = tmp_path / f"{id}.trv"
    trivet.export(copy.deepcopy(module), copy.deepcopy(args), kwargs=kwargs or None, dynamic_shapes=dyn).save(path)
    return module, args, tol, path


def fill_arenas(net: Any, value: int) -> None:
    """Every byte of every scratch region of a net."""
    n = native.library()
    view = n.lib.trv_session_view(net._context.session(0))
    filled = 0
    for i in range(view.region_count):
        if view.region_table[i].kind == RegionKind.arena and view.regions[i].size:
            n.ffi.memmove(view.regions[i].host, bytes([value]) * view.regions[i].size, view.regions[i].size)
            filled += view.regions[i].size
    assert filled


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_one_program_many_threads(tmp_path: Path) -> None:
    module, args, tol, path = program("rt_one_program_many_threads", tmp_path)
    net = trivet.load(path, threads=1)
    inputs = [torch.randn(args[0].shape, generator=torch.Generator().manual_seed(i)) for i in range(200)]
    want = [net(x) for x in inputs]
    C.check(module(inputs[0]), want[0], tol)
    wrong: list[int] = []

    def work(seed: int) -> None:
        session = net.session()
        for i in np.random.default_rng(seed).permutation(len(inputs)):
            if not torch.equal(session(inputs[i]), want[i]):
                wrong.append(int(i))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_read_only_program(tmp_path: Path) -> None:
    module, args, tol, path = program("rt_read_only_program", tmp_path)
    before = path.read_bytes()
    path.chmod(0o444)
    with open(path, "rb") as f:
        view = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    net = trivet.load(memoryview(view))
    for _ in range(2):
        C.check(module(*args), net(*args), tol)
    weights = sum(p.numel() * 4 for p in module.parameters())
    assert net.nbytes < weights / 4  # arena, state and sessions: no copy of the weights
    assert path.read_bytes() == before


@pytest.mark.parametrize("gib", [2.2, 4.3])
def test_over_two_gib(gib: float, tmp_path: Path) -> None:
    rows = int(gib * 2**30) // 256

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.zeros(rows, 64)
            weight[:, 0] = torch.arange(rows)
            self.e = torch.nn.Embedding.from_pretrained(weight)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.e(ids)

    model = Table().eval()
    ids = torch.tensor([0, rows // 2, rows - 1])
    path = tmp_path / "big.trv"
    trivet.export(model, (ids,)).save(path)
    assert path.stat().st_size > gib * 2**30 * 0.99
    net = trivet.load(path, defer_crc=True)
    assert torch.equal(net(ids), model(ids))
    del net
    path.unlink()


def test_dirty_arena(tmp_path: Path) -> None:
    module, args, tol, path = program("rt_dirty_arena", tmp_path)
    net = trivet.load(path)
    want = module(*args)
    for fill in (0xFF, 0x00, 0x7F):
        fill_arenas(net, fill)
        for w, g in zip(want, net(*args), strict=True):
            C.check(w, g, tol)


def test_many_times(tmp_path: Path) -> None:
    module, args, tol, path = program("rt_many_times", tmp_path)
    first = trivet.load(path, threads=1)(*args)
    C.check(module(*args), first, tol)
    for threads in (1, 2, 8):
        net = trivet.load(path, threads=threads)
        for _ in range(300):
            assert torch.equal(net(*args), first)
    for _ in range(50):
        trivet.load(path, threads=1)(*args)
    gc.collect()
    before = resident_bytes()
    for _ in range(1000):
        trivet.load(path, threads=1)(*args)
    gc.collect()
    assert resident_bytes() - before < 4 << 20
