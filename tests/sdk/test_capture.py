"""Capture: models through torch.export into the IR, run by the reference evaluator, compared with eager."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from capture_net import Net, check_like_eager, same
from torch import nn
from torch.export import Dim

from trivet.api import check
from trivet.error import Error
from trivet.frontend import capture

R = torch.randn


class Fn(nn.Module):
    """One function of one tensor."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


class Fn2(Fn):
    def forward(self, x, y):
        return self.f(x, y)


# ---- recurrent nets -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2, "batch_first": True},
                                     {"proj_size": 3, "num_layers": 2, "bias": False}])  # fmt: skip
def test_lstm_with_dynamic_length_is_one_op_per_layer_and_direction(options):
    net = check_like_eager(nn.LSTM(4, 6, **options), (R(5, 2, 4),), (R(1, 1, 4),), (R(9, 3, 4),),
                           shapes=({0: Dim("a", min=1, max=50), 1: Dim("b", min=1, max=50)},))  # fmt: skip
    assert net.ops().count("rnn") == options.get("num_layers", 1) * (1 + options.get("bidirectional", False))


@pytest.mark.parametrize("make", [nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)])
def test_gru_and_rnn(make):
    net = check_like_eager(make(4, 6, 2, batch_first=True, bidirectional=True), (R(2, 5, 4),), (R(2, 9, 4),),
                           shapes=({1: Dim("T", min=1, max=512)},))  # fmt: skip
    assert net.ops().count("rnn") == 4


def test_rnn_states_given_by_the_caller_and_unbatched_input():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.LSTM(4, 6, 2)

        def forward(self, x, h, c):
            return self.r(x, (h, c))

    check_like_eager(M(), (R(5, 3, 4), R(2, 3, 6), R(2, 3, 6)))
    check_like_eager(nn.LSTM(4, 6), (R(5, 4),))


def test_zero_initial_states_need_no_memory():
    net = check_like_eager(nn.GRU(4, 6), (R(5, 3, 4),))
    rnn = next(n for n in net.graph.nodes if n.op == "rnn")
    assert rnn.inputs[5] is None


def test_rnn_cells():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.LSTMCell(4, 6), nn.GRUCell(6, 6)

        def forward(self, x, h, c):
            h, c = self.a(x, (h, c))
            return self.b(h, c), c

    check_like_eager(M(), (R(2, 4), R(2, 6), R(2, 6)))


def test_torch_functions_come_back_after_capture():
    before = torch.lstm, nn.modules.rnn._VF.lstm
    check_like_eager(nn.LSTM(2, 3), (R(4, 1, 2),))
    assert (torch.lstm, nn.modules.rnn._VF.lstm) == before


# ---- dynamic shapes -----------------------------------------------------------------------------------------------------
def test_derived_dimension_is_solved_from_the_input():
    s = Dim("s", min=2, max=9)
    net = check_like_eager(Fn(lambda x: x * 2), (R(8),), (R(12),), shapes=({0: 2 * s},))
    (raw,) = [x for x in net.graph.symbols.values() if x.source]
    assert (raw.min, raw.max, raw.source) == (4, 18, (0, 0))
    with pytest.raises(Error, match="axis 0"):
        net(R(11))


def test_two_inputs_related_by_a_factor():
    s = Dim("s", min=2, max=9)
    net = check_like_eager(Fn2(lambda x, y: x + y.view(-1, 2).sum(1)), (R(4), R(8)), (R(6), R(12)),
                           shapes=({0: s}, {0: 2 * s}))  # fmt: skip
    with pytest.raises(Error):
        net(R(4), R(10))


def test_ranges_are_kept_and_checked():
    net = check_like_eager(Fn(torch.relu), (R(4, 3),), (R(1, 3),), shapes=({0: Dim("n", min=1, max=6)},))
    (s,) = net.graph.symbols.values()
    assert (s.min, s.max, s.hint) == (1, 6, 4)
    with pytest.raises(Error, match=r"1\.\.6, got 7"):
        net(R(7, 3))


def test_sizes_as_results_and_in_arithmetic():
    f = Fn(lambda x: (x.shape[0], x.shape[0] * 2 + 1, x.sum(), x.shape[1], x.shape[0] // 3))
    check_like_eager(f, (R(8, 3),), (R(12, 3),), shapes=({0: Dim.AUTO},))
    check_like_eager(Fn(lambda x: x / (x.shape[0] ** 0.5) + x.shape[0] / 2), (R(8, 3),), (R(11, 3),),
                     shapes=({0: Dim.AUTO},))  # fmt: skip


def test_resize_by_a_scale_of_a_dynamic_size():
    shapes = ({2: Dim("h", min=3, max=64)},)
    check_like_eager(
        Fn(lambda x: F.interpolate(x, scale_factor=1.5)), (R(1, 2, 11, 7),), (R(1, 2, 10, 7),), shapes=shapes
    )
    with pytest.raises(Error, match=r"scale 2\.3"):
        capture({"forward": (Fn(lambda x: F.interpolate(x, scale_factor=2.3)).eval(), (R(1, 2, 11, 7),))},
                {"forward": shapes})  # fmt: skip


def test_numbers_read_from_tensors():
    check_like_eager(Fn2(lambda x, n: x * n.item()), (R(3), torch.tensor(3)), (R(3), torch.tensor(5)))
    check_like_eager(Fn2(lambda x, n: x * n.item()), (R(3), torch.tensor(3.5)), (R(3), torch.tensor(-1.0)))

    def rows(x, n):
        k = n.item()
        torch._check(k >= 0)
        torch._check(k <= x.shape[0])
        return x[:k] + 1

    check_like_eager(Fn2(rows), (R(8, 3), torch.tensor(3)), (R(8, 3), torch.tensor(0)))


def test_data_dependent_size():
    net = check_like_eager(Fn(lambda x: x[x > 0]), (R(8, 3),), (-torch.ones(8, 3),))
    assert any(s.data for s in net.graph.symbols.values())


def test_int_input_that_differs_from_call_to_call():
    class M(nn.Module):
        def forward(self, x, n: int, f=2.5):
            return x * n + f

    check_like_eager(M(), (R(3), 4), (R(3), 7), shapes=({}, Dim.DYNAMIC))


# ---- control flow -------------------------------------------------------------------------------------------------------
def test_cond_on_a_size():
    f = Fn(lambda x: torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x - 1, (x,)))
    net = check_like_eager(f, (R(8, 3),), (R(3, 3),), shapes=({0: Dim("n", min=2, max=100)},))
    assert "if" in net.ops()


def test_nested_cond_with_weights_in_the_branches():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            def inner(x):
                return torch.cond(x.sum() > 3, lambda x: self.a(x), lambda x: self.b(x), (x,))

            return torch.cond(x.sum() > 0, inner, lambda x: x.neg(), (x,)) + 1

    net = check_like_eager(M(), (torch.ones(2, 3),), (torch.full((2, 3), 0.1),), (-torch.ones(2, 3),))
    branch = next(n for n in net.graph.nodes if n.op == "if")
    assert all(v.const is None for v in branch.inputs)  # weights are read where they lie


def test_while_loop():
    from torch._higher_order_ops.while_loop import while_loop

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(R(3, 3) * 0.3)

        def forward(self, x):
            i = torch.zeros((), dtype=torch.int64)
            return while_loop(lambda i, x: (i < 5) & (x.sum() < 100), lambda i, x: (i + 1, x @ self.w + i), (i, x))

    net = check_like_eager(M(), (R(2, 3),), (R(2, 3) + 50,))
    assert "while" in net.ops()


def test_map_and_scans():
    from torch._higher_order_ops.associative_scan import associative_scan
    from torch._higher_order_ops.map import map as torch_map
    from torch._higher_order_ops.scan import scan

    check_like_eager(Fn2(lambda x, y: torch_map(lambda r, s: (r * s).sum(), x, y)), (R(5, 3), R(3)), (R(3, 3), R(3)),
                     shapes=({0: Dim("n", min=2, max=9)}, {}))  # fmt: skip
    check_like_eager(Fn2(lambda x, h: scan(lambda h, x: (torch.tanh(h * 0.9 + x), h * 2), h, x, dim=0)),
                     (R(5, 3), R(3)))  # fmt: skip
    check_like_eager(Fn(lambda x: associative_scan(lambda a, b: a * b + a + b, x, dim=0, combine_mode="generic")),
                     (R(5, 3),))  # fmt: skip


# ---- states and weights -------------------------------------------------------------------------------------------------
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(2))
        self.w = nn.Parameter(R(2, 2))

    def forward(self, x):
        self.n += 1
        return x @ self.w + self.n

    def peek(self):
        return self.n * 1


class Peek(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.owner = owner

    def forward(self, x):
        return self.owner.n @ self.owner.w + x


def test_entries_share_states_and_weights():
    m = Counter()
    net = Net({"forward": (m.eval(), (R(2, 2),)), "peek": (Peek(m).eval(), (R(2),))})
    eager = copy.deepcopy(m)
    x = R(2, 2)
    for _ in range(3):
        same(eager(x).detach(), net(x))
        same((eager.n @ eager.w + 1).detach(), net.call("peek", torch.ones(2)))
    a, b = net.module.entries.values()
    consts = [{v.const for v in g.values() if v.const} for g in (a, b)]
    states = [{v.state for v in g.values() if v.state} for g in (a, b)]
    assert consts[0] == consts[1] and states[0] == states[1] and len(states[0]) == 1
    assert m.n.sum() == 0  # the user's module has not moved


def test_weights_are_not_copied_and_stored_once():
    m = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).eval()
    m[1].weight = m[0].weight
    net = Net({"forward": (m, (R(1, 4),)), "other": (m[0], (R(2, 4),))})
    consts = {v.const for g in net.module.entries.values() for v in g.values() if v.const}
    assert len(consts) == 1
    assert next(iter(consts)).data.data_ptr() == m[0].weight.data_ptr()


def test_a_view_of_a_state_is_refused():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", self.a[:2])

        def forward(self, x):
            self.a += x
            return self.b + 1

    with pytest.raises(Error, match="view"):
        capture({"forward": (M().eval(), (R(4),))})


def test_modes_of_the_module_come_back():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    m.train()
    m[0].eval()
    with pytest.warns(UserWarning, match="training mode"):
        net = Net({"forward": (m, (R(2, 3),))})
    assert [x.training for x in m] == [False, True, True]
    x = R(2, 3)
    same(m.eval()(x).detach(), net(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture({"forward": (nn.Linear(3, 3), (R(2, 3),))})  # nothing in it depends on the mode


# ---- other sources ------------------------------------------------------------------------------------------------------
def test_exported_program_and_pt2_file(tmp_path):
    m = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
    program = torch.export.export(m, (R(2, 3),), dynamic_shapes=({0: Dim("n", min=1, max=8)},), strict=False)
    path = tmp_path / "net.pt2"
    torch.export.save(program, path)
    x = R(5, 3)
    for source in (program, path, str(path)):
        same(m(x).detach(), Net({"forward": (source,)})(x))


def test_lstm_inside_an_exported_program(tmp_path):
    m = nn.LSTM(3, 4, 2, bidirectional=True).eval()
    program = torch.export.export(m, (R(5, 2, 3),), strict=False)
    before = str(program.graph)
    net = Net({"forward": (program,)})
    assert net.ops().count("rnn") == 4
    assert str(program.graph) == before
    x = R(5, 2, 3)
    with torch.no_grad():
        same(m(x), net(x))


def test_file_errors(tmp_path):
    with pytest.raises(Error, match="no such file"):
        capture({"forward": (tmp_path / "none.pt2",)})
    (tmp_path / "bad.pt2").write_bytes(b"nothing")
    with pytest.raises(Error, match=r"no readable \.pt2"):
        capture({"forward": (tmp_path / "bad.pt2",)})


# ---- places and errors --------------------------------------------------------------------------------------------------
class Inner(nn.Module):
    def forward(self, x):
        return torch.linalg.svd(x)[1]


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.tail = Inner(), nn.Linear(3, 3)

    def forward(self, x):
        x = x + torch.rand(3, 3)
        return self.tail(self.head(x).diag())


def test_check_lists_everything_with_place_and_remedy():
    report = check(Outer().eval(), (R(3, 3),))
    assert not report.ok and len(report.problems) >= 2
    by_module = {p.module: p for p in report.problems}
    assert "svd" in by_module["head"].op and by_module["head"].source.startswith(
        ("tests/sdk/test_capture.py:", "test_cap")
    )
    assert any("random" in p.reason for p in report.problems)
    text = str(report)
    assert "head" in text and "to do" in text
    with pytest.raises(Error) as e:
        capture({"forward": (Outer().eval(), (R(3, 3),))})
    assert "svd" in str(e.value) and "random" in str(e.value)
    assert check(nn.Linear(3, 3), (R(2, 3),)).ok


def test_places_of_nodes():
    net = Net({"forward": (nn.Sequential(nn.Linear(3, 3), Fn(torch.tanh)).eval(), (R(2, 3),))})
    loc = next(n.loc for n in net.graph.nodes if n.op == "map" and "tanh" in n.loc.origin)
    assert loc.module == "1" and "test_capture.py:" in loc.source


def test_export_failures_are_short_and_name_the_line():
    def branchy(x):
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(Error) as e:
        capture({"forward": (Fn(branchy).eval(), (R(3),))})
    assert "test_capture.py:" in e.value.node and "torch.cond" in e.value.remedy
    assert len(str(e.value)) < 800 and e.value.__cause__ is not None
    for bad in ({"forward": (Fn2(torch.add).eval(), (R(3),))}, {"forward": (len, (R(3),))}, {"forward": (3,)},
                {"forward": Fn(torch.relu)}, {}, {"a b": (Fn(torch.relu), (R(3),))}):  # fmt: skip
        with pytest.raises(Error):
            capture(bad)


def test_kinds_of_tensors_that_are_refused():
    with pytest.raises(Error, match="complex64"):
        capture({"forward": (Fn(torch.abs).eval(), (torch.randn(3, dtype=torch.complex64),))})


def test_capture_prints_nothing(capfd):
    with pytest.raises(Error):
        capture({"forward": (Fn(lambda x: x if x.sum() > 0 else -x).eval(), (R(3),))})
    capture({"forward": (nn.LSTM(3, 3).eval(), (R(2, 2, 3),))})
    out = capfd.readouterr()
    assert not out.out and not out.err


def test_program_from_memory_buffer():
    m = nn.Linear(3, 3).eval()
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(m, (R(1, 3),), strict=False), buffer)
    buffer.seek(0)
    x = R(1, 3)
    same(m(x).detach(), Net({"forward": (torch.export.load(buffer),)})(x))


# ---- conditions on sizes ------------------------------------------------------------------------------------------------
def test_conditions_that_only_choose_strides_are_dropped():
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, 2, ceil_mode=True), nn.Conv2d(4, 5, 3), nn.Conv2d(5, 6, 3))
    shapes = ({2: Dim.AUTO, 3: Dim.AUTO},)
    check_like_eager(m, (R(1, 3, 97, 120),), (R(1, 3, 12, 12),), (R(1, 3, 60, 33),), shapes=shapes)


def test_divisibility_found_by_export_is_checked():
    net = check_like_eager(Fn(lambda x: x.view(-1, 2) + 1), (R(8),), (R(12),), shapes=({0: Dim.AUTO},))
    with pytest.raises(Error):
        net(R(7))


def test_conditions_on_nested_and_starred_arguments():
    class M(nn.Module):
        def forward(self, x, *ys, k, q):
            return x.view(-1, 2) + 1, ys[1].view(-1, 3), k[0].view(-1, 2), q["r"][: x.shape[0]]

    auto = {0: Dim.AUTO}
    args, kwargs = (R(8), R(6), R(6)), {"k": [R(4)], "q": {"r": R(12)}}
    shapes = {"x": auto, "ys": (auto, auto), "k": [auto], "q": {"r": auto}}
    net = Net({"forward": (M().eval(), args, kwargs)}, {"forward": shapes})
    same(M()(*args, **kwargs), net(*args, **kwargs))
    for bad in ((R(7), R(6), R(6)), (R(8), R(6), R(7))):
        with pytest.raises(Error):
            net(*bad, **kwargs)
    with pytest.raises(Error):
        net(*args, **{**kwargs, "k": [R(5)]})
    program = torch.export.export(M().eval(), args, kwargs, dynamic_shapes=shapes, strict=False)
    net = Net({"forward": (program,)})
    with pytest.raises(Error):
        net(R(8), R(6), R(7), **kwargs)


def test_branch_on_a_size_holds_only_on_its_side():
    net = check_like_eager(
        Fn(lambda x: x[:5].sum() if x.shape[0] > 6 else x), (R(9),), (R(7),), shapes=({0: Dim.AUTO},)
    )
    with pytest.raises(Error):
        net(R(6))


def test_guard_texts():
    from trivet.guards import add_guards
    from trivet.ir.dim import Dim as Size
    from trivet.ir.dim import evaluate
    from trivet.ir.graph import Graph, Sym

    n, m = Size.symbol("n"), Size.symbol("m")

    def holds(text, **sizes):
        g = Graph("g", symbols={"n": Sym("n", 0, 100, source=(0, 0)), "m": Sym("m", 0, 100, source=(1, 0))})
        add_guards(g, [text], {"L['x']": (n, 3), "L['y']['z']": (m,), "L['k']": n})
        if any(not g.symbols[k].min <= v <= g.symbols[k].max for k, v in sizes.items()):
            return False
        checks = [s for s in g.symbols.values() if s.solved is not None]
        return all(s.min <= evaluate(s.solved, sizes) <= s.max for s in checks)

    texts = {"(L['x'].size()[0] % 3) == 0": lambda n, m: n % 3 == 0,
             "L['x'].size()[0] != L['y']['z'].size()[0]": lambda n, m: n != m,
             "not (L['x'].size()[0] < 5)": lambda n, m: n >= 5,
             "L['x'].size()[0] < 5 or L['y']['z'].size()[0]*2 >= 8": lambda n, m: n < 5 or m * 2 >= 8,
             "not (L['k'] == 4 or max(1, L['y']['z'].size()[0] // 2) > 2)": lambda n, m: not (n == 4 or max(1, m // 2) > 2),
             "2 <= L['x'].size()[0] and L['x'].size()[0] <= L['x'].size()[1] ** 2": lambda n, m: 2 <= n <= 9,
             "math.ceil(L['k'] / 2) == 3": lambda n, m: -(-n // 2) == 3}  # fmt: skip
    for text, truth in texts.items():
        for p in range(12):
            for q in range(8):
                assert holds(text, n=p, m=q) == truth(p, q), (text, p, q)
    with pytest.warns(UserWarning, match="not checked"):
        holds("L['x'].stride()[0] == 1")
