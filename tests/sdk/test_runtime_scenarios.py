"""What shared cases of kind "runtime" tell: one program on many threads, read-only files, dirty arenas, many times."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import resource
import threading

import numpy as np
import pytest
from handmade import add

import trivet
from trivet import native
from trivet.error import Error
from trivet.fbs.structs import RegionKind
from trivet.reader import FileView

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402


def small_cnn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
                         nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()  # fmt: skip


@pytest.fixture(scope="module")
def cnn():
    return trivet.export(small_cnn(), (torch.randn(1, 3, 8, 8),))


@pytest.mark.parametrize("workers", [1, 2])
def test_one_program_many_threads(cnn, workers):
    net = trivet.load(cnn, threads=workers)
    inputs = np.random.default_rng(0).standard_normal((8, 200, 1, 3, 8, 8)).astype(np.float32)
    want = [[net(x) for x in mine] for mine in inputs]
    wrong = []

    def work(i):
        mine = net.session()
        for x, w in zip(inputs[i], want[i]):
            if not np.array_equal(mine(x), w):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_read_only_program(tmp_path):
    model = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 4)).eval()
    x = torch.randn(1, 512)
    path = tmp_path / "net.trv"
    trivet.export(model, (x,)).save(path)
    before = path.read_bytes()
    with path.open("rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)  # a write would be a SIGSEGV
    for source in (mapped, path):
        net = trivet.load(source)
        first, second = net(x), net(x)
        assert torch.equal(first, second) and torch.allclose(first, model(x), atol=1e-5)
        assert net.nbytes < 512 * 256  # weights are not copied
        del net
    assert path.read_bytes() == before and bytes(mapped) == before


def fill_arenas(net, byte):
    ffi, lib = native.library().ffi, native.library().lib
    for info in net._context.host.entries:
        view = lib.trv_session_view(net._context.session(info.index))
        plan = FileView(ffi.buffer(net._context.host.program.file.data, net._context.host.program.file.size))
        for i, r in enumerate(plan.entries[info.index].regions):
            if r["kind"] == RegionKind.arena and view.regions[i].host != ffi.NULL:
                ffi.memmove(view.regions[i].host, bytes([byte]) * view.regions[i].size, view.regions[i].size)


def test_dirty_arena():
    class M(nn.Module):
        def forward(self, x):
            return (x.amax((2, 3)), F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 2), x.cumsum(-1),
                    torch.zeros(4).index_add(0, torch.tensor([0, 0, 3]), x[0, :3, 0, 0]))  # fmt: skip

    x = torch.randn(1, 8, 4, 4)
    net = trivet.load(trivet.export(M(), (x,)), threads=1)
    want = M()(x)
    for byte in (0xFF, 0x00, 0x7F, 0xFF):
        fill_arenas(net, byte)
        for got, w in zip(net(x), want):
            assert torch.allclose(got, w, atol=1e-5)


def test_many_times_same_bits():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 8)).eval()
    x = torch.randn(200, 64)
    program = trivet.export(model, (x,))
    first = None
    for threads in (1, 2, 8):
        net = trivet.load(program, threads=threads)
        first = net(x) if first is None else first
        for _ in range(1000 if threads == 1 else 200):
            assert torch.equal(net(x), first)
    assert torch.allclose(first, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_many_loads_and_unloads(tmp_path, cnn, threads):
    path = tmp_path / "net.trv"
    cnn.save(path)
    x = np.zeros((1, 3, 8, 8), np.float32)

    def rounds(n):
        for _ in range(n):
            with trivet.load(path, threads=threads) as net:
                net(x)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(os.listdir("/proc/self/fd"))

    rounds(100)
    memory, files = rounds(100)
    more, same = rounds(800)
    assert more - memory < 8 << 10 and same <= files


def test_weights_are_mapped_and_checked(tmp_path):
    model = nn.Linear(2048, 2048)  # 16 MiB
    path = tmp_path / "big.trv"
    trivet.export(model.eval(), (torch.zeros(1, 2048),)).save(path)
    net = trivet.load(path, defer_crc=True)
    assert net.nbytes < 1 << 20

    data = bytearray(path.read_bytes())
    weights = 12 << 20  # in the one large segment, in pieces of different threads
    for at in (len(data) // 2, weights, weights + (1 << 21), len(data) - 70_000):
        data[at] ^= 1
        path.write_bytes(data)
        for threads, defer in ((1, False), (2, False), (3, True)):
            with pytest.raises(Error, match="CRC"):
                trivet.load(path, threads=threads, defer_crc=defer)
        data[at] ^= 1
    path.write_bytes(data)
    trivet.load(path, threads=2)


def _child(net, queue):
    try:
        net(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32))
        queue.put("ran")
    except Error as e:
        queue.put(str(e))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_says_so():
    net = trivet.load(add(), threads=2)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(net, queue))
    child.start()
    said = queue.get()
    child.join(10)
    assert "forked" in said and child.exitcode == 0
    assert net(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32))[0, 0] == 2
