"""Calls through the C runtime, on programs written by hand: arrays in and out, errors, state, contexts, life."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import numpy as np
import pytest
from handmade import add, counter, picker

from trivet.error import Error
from trivet.fbs.structs import DType
from trivet.runtime import load

torch = pytest.importorskip("torch")


@pytest.fixture(params=["fresh", "numpy", "torch"])
def net(request):
    """A net that has not been called, or one that takes the short way for calls like the last two."""
    net = load(add())
    for _ in range(2 if request.param != "fresh" else 0):
        net(*(np.zeros((2, 3), np.float32) if request.param == "numpy" else torch.zeros(2, 3) for _ in "ab"))
    assert (net.entry("forward")._repeat is None) == (request.param == "fresh")
    return net


def abc():
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((2, 2, 3)).astype(np.float32)
    return a, b, a + b


# ---- arrays -------------------------------------------------------------------------------------------------------------
def test_numpy_in_numpy_out(net):
    a, b, y = abc()
    got = net(a, b)
    assert isinstance(got, np.ndarray) and np.array_equal(got, y)


def test_torch_in_torch_out(net):
    a, b, y = abc()
    got = net(torch.from_numpy(a), torch.from_numpy(b))
    assert isinstance(got, torch.Tensor) and np.array_equal(got.numpy(), y)
    assert isinstance(net(a, torch.from_numpy(b)), torch.Tensor)


def test_results_outlive_the_next_call(net):
    a, b, y = abc()
    first = net(a, b)
    net(a * 2, b)
    assert np.array_equal(first, y)
    net.close()
    assert np.array_equal(first, y)


def test_inputs_are_not_copied(net, monkeypatch):
    from trivet import arrays

    a, b, _ = abc()
    seen = []
    accept = arrays.accept
    monkeypatch.setattr(arrays, "accept", lambda x, s: seen.append(accept(x, s)) or seen[-1])
    t = torch.from_numpy(b)
    out = np.empty((2, 3), np.float32)
    net(a, t, out=out)
    assert seen[0].address == a.ctypes.data and seen[1].address == t.data_ptr()


@pytest.mark.parametrize("change", [
    lambda a: a[:, ::-1][:, ::-1], lambda a: np.asfortranarray(a), lambda a: np.repeat(a, 2, 1)[:, ::2],
    lambda a: np.flip(np.flip(a, 1).copy(), 1), lambda a: a.astype(">f4"),
    lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(np.float32).reshape(a.shape),
], ids=["twice", "fortran", "stride", "negative", "big-endian", "unaligned"])  # fmt: skip
def test_odd_numpy_layouts(net, change):
    a, b, y = abc()
    assert np.array_equal(net(change(a), b), y)


@pytest.mark.parametrize("change", [
    lambda t: t.t().contiguous().t(), lambda t: t.clone().requires_grad_(), lambda t: torch.nn.Parameter(t),
    lambda t: torch.complex(torch.zeros_like(t), -t).conj().imag, lambda t: t[:1].expand(2, 3) * 0 + t,
    lambda t: torch.frombuffer(bytearray(b"xx" + t.numpy().tobytes()), dtype=torch.uint8)[2:].numpy().view(np.float32)
    .reshape(2, 3),
], ids=["strided", "grad", "parameter", "negative-bit", "fresh", "unaligned"])  # fmt: skip
def test_odd_torch_tensors(net, change):
    a, b, y = abc()
    got = net(change(torch.from_numpy(a)), b)
    assert np.array_equal(np.asarray(got.detach() if hasattr(got, "detach") else got), y)


def test_expanded_and_channels_last():
    net = load(add(rows=(2, 3, 4, 5)))
    a = torch.randn(1, 3, 1, 5).expand(2, 3, 4, 5)
    b = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert torch.equal(net(a, b), a + b)


class Foreign:
    """Another library's array: nothing but DLPack."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.x.__dlpack__()

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_dlpack(net):
    a, b, y = abc()
    got = net(Foreign(a), Foreign(torch.from_numpy(b)))
    assert np.array_equal(np.from_dlpack(got), y)
    assert np.array_equal(net(torch.from_numpy(a).__dlpack__(), b), y)


def test_dlpack_of_another_device(net):
    class Gpu(Foreign):
        def __dlpack_device__(self):
            return (2, 0)

    a, b, _ = abc()
    with pytest.raises(Error, match=r"input 0 'a': CPU memory expected, got DLPack device \(2, 0\)"):
        net(Gpu(a), b)


def test_python_numbers():
    net = load(add(rows=()))
    assert float(net(1.5, 2)) == 3.5
    assert net(np.float32(1.5), np.float32(2)).shape == ()
    ints = load(add(DType.i64, rows=()))
    assert int(ints(3, -5)) == -2
    with pytest.raises(Error, match="dtype int64 expected, got float"):
        ints(3, 1.5)
    with pytest.raises(Error, match="dtype int64 expected, got bool"):
        ints(True, 1)
    with pytest.raises(Error, match="can hold expected, got 9223372036854775808"):
        ints(1, 1 << 63)
    with pytest.raises(Error, match=r"rank 2 expected .* got 0"):
        load(add())(1.0, 2.0)


def test_bfloat16():
    net = load(add(DType.bf16))
    a, b = torch.randn(2, 2, 3).bfloat16()
    assert torch.equal(net(a, b), a + b)
    assert torch.equal(net(Foreign(a), b), a + b)
    with pytest.raises(Error, match="numpy has no bfloat16") as e:
        net(np.zeros((2, 3), np.float32), b)
    assert "torch.bfloat16" in e.value.remedy
    scalar = load(add(DType.bf16, rows=()))
    assert float(scalar(torch.tensor(1.0).bfloat16(), 2.0078125)) == float(torch.tensor(3.0078125).bfloat16())


def test_empty_tensors():
    net = load(add(rows=(0, 3)))
    assert net(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert net(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


# ---- out= ---------------------------------------------------------------------------------------------------------------
def test_out(net):
    a, b, y = abc()
    out = np.zeros((2, 3), np.float32)
    assert net(a, b, out=out) is out and np.array_equal(out, y)
    t = torch.zeros(2, 3)
    assert net(a, b, out=[t]) is t and np.array_equal(t.numpy(), y)


@pytest.mark.parametrize("out, text", [
    (np.zeros((2, 3), np.float64), "dtype float32 expected, got float64"),
    (np.zeros((3, 2), np.float32), r"shape \[2, 3\] expected, got \[3, 2\]"),
    (np.zeros((3, 2), np.float32).T, "row-major"),
    (torch.zeros(2, 3, requires_grad=True), "without gradient"),
    ([np.zeros((2, 3), np.float32)] * 2, "1 arrays expected, got 2"),
    ("text", "got str"),
])  # fmt: skip
def test_out_that_does_not_fit(net, out, text):
    a, b, y = abc()
    with pytest.raises(Error, match=text):
        net(a, b, out=out)
    assert np.array_equal(net(a, b), y)


def test_out_must_not_be_an_input(net):
    a, b, _ = abc()
    with pytest.raises(Error, match="overlaps input 1"):
        net(a, b, out=b)


def test_out_read_only(net):
    a, b, _ = abc()
    out = np.zeros((2, 3), np.float32)
    out.flags.writeable = False
    with pytest.raises(Error, match="writable"):
        net(a, b, out=out)


# ---- errors -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad, text", [
    (np.zeros((2, 3)), "input 0 'a': dtype float32 expected, got float64"),
    (torch.zeros(2, 3, dtype=torch.int64), "input 0 'a': dtype float32 expected, got int64"),
    (np.zeros((2, 3), np.complex64), "got complex64"),
    (np.zeros((2, 3), object), "got object"),
    (np.zeros((2, 3, 1), np.float32), r"rank 2 expected \(\[2, 3\]\), got 3"),
    (np.zeros((2, 4), np.float32), "input 0 'a': axis 1: expected 3, got 4"),
    (torch.zeros(2, 3, device="meta"), "CPU memory expected, got device meta"),
    (torch.zeros(2, 3).to_sparse(), "got layout torch.sparse_coo"),
    (np.ma.masked_array(np.zeros((2, 3), np.float32), False), "masked"),
    ([[1.0]], "got list"), (None, "got NoneType"), ("text", "got str"),
])  # fmt: skip
def test_inputs_that_do_not_fit(net, bad, text):
    a, b, y = abc()
    with pytest.raises(Error, match=text):
        net(bad, b)
    assert np.array_equal(net(a, b), y)


def test_wrong_count(net):
    a, b, _ = abc()
    for args, kwargs in (((a,), {}), ((a, b, a), {}), ((a, b), {"c": a})):
        with pytest.raises(Error):
            net(*args, **kwargs)
    assert np.array_equal(net(a, b=b), a + b)


def test_dynamic_sizes():
    net = load(add(low_high=(1, 512)))
    for n in (3, 512, 512, 512, 1, 3, 1, 1, 1, 3):
        a, b = torch.randn(2, n, 3)
        assert torch.equal(net(a, b), a + b)
        assert torch.equal(net(a, b), a + b)
    with pytest.raises(Error, match=r"input 0 'a': axis 0: expected 1\.\.512, got 600"):
        net(torch.randn(600, 3), torch.randn(600, 3))
    a, b = torch.randn(2, 5, 3)
    assert torch.equal(net(a, b), a + b)
    with pytest.raises(Error):  # a and b differ: the program's own check
        net(torch.randn(4, 3), torch.randn(5, 3))
    assert torch.equal(net(a, b), a + b)


def test_sizes_the_data_decides():
    net = load(picker())
    for x in ([0, 1, 0, 2, 0, 3], [0] * 6, [1] * 6, [0, 1, 0, 2, 0, 3]):
        x = np.array(x, np.float32)
        got = net(x)
        assert np.array_equal(got, np.argwhere(x)), x
    out = np.zeros((3, 1), np.int64)
    assert np.array_equal(net(x, out=out), out) and np.array_equal(out[:, 0], [1, 3, 5])


@pytest.mark.parametrize("data", [b"", b"short", bytes(4096), b"\x89PNG" + bytes(100)])
def test_foreign_bytes(data):
    with pytest.raises(Error):
        load(data)


def test_damaged_file(tmp_path):
    good = add()
    for at in range(0, len(good), max(1, len(good) // 40)):
        bad = bytearray(good)
        bad[at] ^= 0xFF
        try:
            net = load(bytes(bad))
        except Error as e:
            assert len(str(e)) > 10
        else:
            net.close()
    for cut in (1, 4, 64, len(good) - 1):
        with pytest.raises(Error):
            load(good[:cut])


def test_missing_file(tmp_path):
    with pytest.raises(Error, match="no such file: .*none.trv"):
        load(tmp_path / "none.trv")
    with pytest.raises(Error, match="got a directory"):
        load(tmp_path)
    with pytest.raises(Error, match="got int"):
        load(3)
    with pytest.raises(Error, match="threads"):
        load(add(), threads=-1)


# ---- entries, state, contexts ---------------------------------------------------------------------------------------------
def test_state_and_sessions():
    net = load(counter())
    one = np.ones(2, np.float32)
    assert net.step(one).tolist() == [1, 1]
    assert net.entry("step")(one).tolist() == [2, 2]
    assert net.peek().tolist() == [2, 2]
    other = net.session()
    assert other.peek().tolist() == [0, 0] and net.peek().tolist() == [2, 2]
    fork = net.fork()
    assert fork.step(one).tolist() == [3, 3] and net.peek().tolist() == [2, 2]
    kept = net.snapshot()
    net.step(one)
    net.restore(kept)
    assert net.peek().tolist() == [2, 2] and kept.nbytes >= 8
    net.reset()
    assert net.peek().tolist() == [0, 0] and fork.peek().tolist() == [3, 3]
    with pytest.raises(Error, match="another program"):
        load(add()).restore(kept)


def test_which_entry():
    net = load(counter())
    with pytest.raises(Error, match="the program has the entries step, peek"):
        net(np.ones(2, np.float32))
    with pytest.raises(Error, match="no entry 'run'"):
        net.entry("run")
    with pytest.raises(AttributeError, match="entries: step, peek"):
        _ = net.run
    assert list(net.entries) == ["step", "peek"] and "step(x: float32[2])" in repr(net)


def test_threads_with_sessions_of_their_own():
    net = load(add(rows=(64, 64)), threads=1)
    wrong = []

    def work(seed):
        mine, rng = net.session(), np.random.default_rng(seed)
        for _ in range(100):
            a, b = rng.standard_normal((2, 64, 64)).astype(np.float32)
            if not np.array_equal(mine(a, b), a + b):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_threads_on_one_net_take_turns():
    net = load(add(rows=(64, 64)), threads=2)
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(100):
            a, b = rng.standard_normal((2, 64, 64)).astype(np.float32)
            if not np.array_equal(net(a, b), a + b):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


# ---- life ---------------------------------------------------------------------------------------------------------------
def test_close(tmp_path):
    path = tmp_path / "add.trv"
    path.write_bytes(add())
    a, b, y = abc()
    with load(path) as net:
        other = net.session()
        assert np.array_equal(net(a, b), y)
        assert net.nbytes > 0
    for use in (lambda: net(a, b), net.reset, net.session, net.snapshot, lambda: net.nbytes):
        with pytest.raises(Error, match="closed"):
            use()
    net.close()
    assert "closed" in repr(net)
    assert np.array_equal(other(a, b), y)


def test_no_pickle(net):
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(Error, match="cannot be pickled"):
            use(net)


def test_mutable_bytes_are_copied():
    data = bytearray(add())
    net = load(data)
    data[:] = bytes(len(data))
    a, b, y = abc()
    assert np.array_equal(net(a, b), y)


def test_threads_and_affinity():
    a, b, y = abc()
    nets = [load(add(), threads=3, affinity=[0]), load(add(), threads=2)]
    nets += [nets[0].session(), nets[1].session(threads=1), nets[1].session(threads=2, affinity=[0])]
    for net in nets:
        for _ in range(4):
            assert np.array_equal(net(a, b), y)
    for bad, text in [
        ([1 << 20], "no such processor"),
        ([-1], "numbers of processors"),
        (["x"], "numbers of processors"),
    ]:
        with pytest.raises(Error, match=text):
            load(add(), threads=2, affinity=bad)
    with pytest.raises(Error, match="threads"):
        nets[0].session(threads=-1)


def test_many_loads_do_not_grow():
    import resource

    data = add()
    a, b, _ = abc()

    def rounds(n):
        for _ in range(n):
            load(data, threads=1)(a, b)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds(100)
    assert rounds(1000) - before < 8 << 10  # KiB


def test_nets_die_without_the_collector():
    import weakref

    gc.disable()
    try:
        net = load(add())
        ref = weakref.ref(net)
        del net
        assert ref() is None
    finally:
        gc.enable()
