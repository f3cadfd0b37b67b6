"""Makes tables of what race.py measured: all peers to stdout, trivet against the best into README.md (--readme).

A round is a fresh process and gives one median. It counts as clean when other processes used little CPU meanwhile. A figure is the
median over the clean rounds; where there was none, with 1 thread the median CPU time of an inference (which waiting for a core does
not lengthen), marked c, with more the lowest 10th percentile of any round, marked ~.
"""

import argparse
import math
import statistics as st
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from race import rows_of  # noqa: E402

CLEAN = {1: 0.35, 2: 0.12}  # CPU seconds per second that others may use, by our threads
EXACT = 1e-4  # a float32 result that is farther off (RMS over deviation) does not count as the best
UNIT = {"fp32": "f32", "bf16": "bf16", "fp16": "f32", "int8": "i8", "int8dyn": "i8"}
BITS = {"fp32": 32, "w8": 8, "w4": 4.5, "w4c": 4}  # of a weight that decoding reads
BEGIN, END = "<!-- begin: made by table.py -->", "<!-- end -->"


@dataclass
class Figure:
    """One peer on one row. Times in ms, memory in MB over the bare process."""

    ms: float
    mark: str
    rounds: int
    clean: int
    spread: float
    load_first: float
    rss: float
    file: float
    error: float

    def __str__(self):
        return f"{self.mark}{short(self.ms)}"


def short(x):
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}" if x >= 1 else f"{x:.3f}"


def figure(items, threads):
    """Of all rounds of a peer: (row of runs.jsonl, its result for the number of threads)."""
    clean = [x for _, x in items if x["others_cpu"] < CLEAN.get(threads, 0.12)]
    if clean:
        mark, ms = "", [x["median"] for x in clean]
        value = st.median(ms)
    elif threads == 1:
        mark, ms = "c", [min(x["median"], x["cpu_median"]) for _, x in items]
        value = st.median(ms)
    else:
        mark, ms = "~", [x["p10"] for _, x in items]
        value = min(ms)
    rows = [r for r, _ in items]
    return Figure(value * 1e3, mark, len(items), len(clean), (max(ms) - min(ms)) / value,
                  min(r["load_s"] + r["first_s"] for r in rows) * 1e3, st.median(r["rss_peak_kb"] - r["rss_import_kb"] for r in rows) / 1024,
                  rows[-1]["bytes"] / 1e6, rows[-1]["rms_rel"])  # fmt: skip


class Data:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.prepared = {(r["workload"], r["precision"], r["peer"]): r for r in rows_of(self.folder / "prepared.jsonl")}
        self.limits = {}
        for m in rows_of(self.folder / "limits.jsonl"):
            best = self.limits.setdefault(m["threads"], {})
            for unit, rate in (*m["ops"].items(), ("memory", m["reads"][-1][1])):
                best[unit] = max(rate, best.get(unit, 0))
        runs, self.failed, self.mapped = {}, {}, {}
        for r in rows_of(self.folder / "runs.jsonl"):
            key = r["workload"], r["precision"], r["peer"]
            if not r["ok"]:
                self.failed[key] = r["error"]
            elif not r["peer"].startswith("torch"):
                self.mapped[r["peer"]] = r.get("mapped", {})
            for x in r.get("results", ()):
                runs.setdefault((*key, x["threads"], bool(r.get("busy"))), []).append((r, x))
        self.figures = {k: figure(v, 1 if k[4] else k[3]) for k, v in runs.items() if not k[4]}
        self.busy = {
            k[:4]: min(st.median([x["median"] for _, x in v]), math.inf) * 1e3 for k, v in runs.items() if k[4]
        }
        self.peers = list(dict.fromkeys(k[2] for k in self.figures))
        self.rows = list(dict.fromkeys(k[:2] for k in self.figures))
        self.threads = sorted({k[3] for k in self.figures})

    def get(self, workload, precision, peer, threads):
        return self.figures.get((workload, precision, peer, threads, False))

    def best(self, workload, precision, threads):
        """(peer, figure) of the fastest of the others that is as exact."""
        found = [
            (p, f)
            for p in self.peers
            if not p.startswith("trivet") and (f := self.get(workload, precision, p, threads))
        ]
        found = [(p, f) for p, f in found if precision != "fp32" or f.error <= EXACT]
        return min(found, key=lambda t: t[1].ms, default=(None, None))

    def limit(self, workload, precision, threads):
        """The least time in ms: multiply-adds of the direct algorithm, or bytes of weights for decoding; None: not known."""
        from workloads import STREAMED

        ref, machine = self.folder / "ref" / f"{workload}.npz", self.limits.get(threads)
        if machine is None or not ref.exists():
            return None
        with np.load(ref) as z:
            macs, weights = int(z["macs"]), int(z["wbytes"])
        if workload in STREAMED:
            return weights * BITS[precision] / 32 / machine["memory"] * 1e3 if precision in BITS else None
        return 2 * macs / machine[UNIT[precision]] * 1e3 if machine.get(UNIT.get(precision)) else None


def table(head, rows):
    return "\n".join(
        [
            "| " + " | ".join(head) + " |",
            "|" + " --- |" * len(head),
            *("| " + " | ".join(map(str, r)) + " |" for r in rows),
            "",
        ]
    )


def mean(values):
    values = [v for v in values if v]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def ratio(a, b):
    return a.ms / b.ms if a is not None and b is not None else None


def cell(x, digits=2):
    return "-" if x is None or x != x else f"{x:.{digits}f}"


def against_best(data):
    """trivet beside the best of the others, ExecuTorch, and the machine."""
    out = []
    for t in data.threads:
        rows, bests, ets, written = [], [], [], []
        for w, p in data.rows:
            ours = data.get(w, p, "trivet", t)
            if ours is None:
                continue
            name, best = data.best(w, p, t)
            et, et2 = data.get(w, p, "executorch", t), data.get(w, p, "executorch-written", t)
            bests.append(ratio(best, ours))
            ets.append(ratio(et, ours))
            written.append(ratio(et2 or et, ours))
            least = data.limit(w, p, t)
            rows.append([w, p, str(ours), f"{best} {name}" if best else "-", cell(bests[-1]), cell(ets[-1]), cell(ratio(et2, ours)),
                         "-" if least is None else f"{100 * least / ours.ms:.0f} %", f"{ours.error:.1e}",
                         f"{best.error:.1e}" if best else "-", f"{ours.clean}/{ours.rounds}"])  # fmt: skip
        rows.append(["**geometric mean**", "", "", "", f"**{cell(mean(bests))}**", f"**{cell(mean(ets))}**", f"{cell(mean(written))}", "", "",
                     "", ""])  # fmt: skip
        slower = sum(1 for b in bests if b is not None and b < 1)
        out += [f"### {t} thread{'s' if t > 1 else ''}\n",
                table(["workload", "precision", "trivet ms", "best other ms", "best / trivet", "ExecuTorch / trivet",
                       "written out / trivet", "of limit", "error", "its error", "clean rounds"], rows),
                f"{slower} of {sum(b is not None for b in bests)} rows slower than the best of the others.\n"]  # fmt: skip
    return "\n".join(out)


def load_and_memory(data):
    t, rows = data.threads[0], []
    for w, p in data.rows:
        ours = data.get(w, p, "trivet", t)
        others = [(q, f) for q in data.peers if q != "trivet" and (f := data.get(w, p, q, t))]
        if ours is None or not others:
            continue
        fast, small = min(others, key=lambda x: x[1].load_first), min(others, key=lambda x: x[1].rss)
        rows.append([w, p, short(ours.load_first), cell(ours.load_first / ours.ms, 1), f"{short(fast[1].load_first)} {fast[0]}", short(ours.rss),
                     short(ours.file), f"{short(small[1].rss)} {small[0]}"])  # fmt: skip
    head = [
        "workload",
        "precision",
        "load + first ms",
        "in steady runs",
        "least other ms",
        "RSS MB",
        "file MB",
        "least other MB",
    ]
    return "### Load and memory, 1 thread\n\n" + table(head, rows)


def contention(data):
    rows = []
    for w, p in data.rows:
        cells = []
        for q in ("trivet", *(q for q in data.peers if q != "trivet")):
            quiet, loud = data.get(w, p, q, 2), data.busy.get((w, p, q, 2))
            cells.append(f"{loud / quiet.ms:.2f}" if quiet and loud else "-")
        if any(c != "-" for c in cells):
            rows.append([w, p, *cells])
    if not rows:
        return ""
    head = ["workload", "precision", "trivet", *(q for q in data.peers if q != "trivet")]
    return "### A busy process on every core: 2 threads, time over quiet time\n\n" + table(head, rows)


def footprint(data):
    rows = [[p, f"{sum(m.values()) / 1e6:.1f}", ", ".join(f"{n} {s / 1e6:.1f}" for n, s in sorted(m.items(), key=lambda x: -x[1])[:4])]
            for p, m in sorted(data.mapped.items(), key=lambda x: sum(x[1].values()))]  # fmt: skip
    return "### Shared objects mapped to run a model, MB, as installed\n\n" + table(["peer", "total", "largest"], rows)


def native(data):
    found = {}
    for r in rows_of(data.folder / "native.jsonl"):
        found.setdefault((r["workload"], r["precision"], r["threads"]), {}).setdefault(r["peer"], []).append(r)
    rows = []
    for (w, p, t), by in found.items():
        cells = [w, p, t]
        for q in ("trivet", "executorch", "executorch-written"):
            r = by.get(q)
            cells.append("-" if r is None else " / ".join(short(st.median(x[k] for x in r)) for k in ("median_ms", "load_ms", "first_ms"))
                         + f" / {st.median(x['rss_mb'] for x in r):.1f}")  # fmt: skip
        rows.append(cells)
    if not rows:
        return ""
    return ("### From C and C++: median / load / first ms / peak RSS of the process, MB\n\n"
            + table(["workload", "precision", "threads", "trivet", "executorch", "executorch-written"], rows))  # fmt: skip


def all_peers(data):
    """Every peer's times, ratio to the fastest of all in brackets."""
    out = []
    for t in data.threads:
        rows = []
        for w, p in data.rows:
            found = {q: f for q in data.peers if (f := data.get(w, p, q, t))}
            least = min(f.ms for f in found.values())
            rows.append([w, p, *(f"{found[q]} ({found[q].ms / least:.2f})" if q in found else "fail" if (w, p, q) in data.failed else "-"
                                 for q in data.peers)])  # fmt: skip
        out += [
            f"### All, {t} threads: median ms (ratio to the fastest)\n",
            table(["workload", "precision", *data.peers], rows),
        ]
    for title, get in (("Load + first inference, ms", lambda f: short(f.load_first)), ("Peak RSS over the bare process, MB", lambda f: short(f.rss)),
                       ("RMS error / deviation of the reference", lambda f: f"{f.error:.1e}"),
                       ("Spread between rounds", lambda f: f"{100 * f.spread:.0f} %")):  # fmt: skip
        rows = [
            [w, p, *(get(f) if (f := data.get(w, p, q, data.threads[0])) else "-" for q in data.peers)]
            for w, p in data.rows
        ]
        out += [f"### {title}\n", table(["workload", "precision", *data.peers], rows)]
    bad = [[*k, r["error"][:200].replace("\n", " ").replace("|", "/")] for k, r in data.prepared.items() if not r["ok"]]
    bad += [[*k, e[-200:].replace("\n", " ").replace("|", "/")] for k, e in data.failed.items()]
    if bad:
        out += ["### What failed\n", table(["workload", "precision", "peer", "why"], bad)]
    return "\n".join(out)


def limits(data):
    rows = [
        [t, *(f"{m.get(u, 0) * 1e-9:.4g}" for u in ("f32", "bf16", "i8", "memory"))]
        for t, m in sorted(data.limits.items())
    ]
    return "### Limits of the machine\n\n" + table(
        ["threads", "f32 GFLOP/s", "bf16 GFLOP/s", "int8 GOP/s", "memory read GB/s"], rows
    )


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--dir", required=True)
    p.add_argument("--readme", nargs="?", const=str(HERE / "README.md"), help="put the tables against the best there")
    args = p.parse_args(argv)
    data = Data(args.dir)
    mine = "\n".join(
        x
        for x in (
            limits(data),
            against_best(data),
            load_and_memory(data),
            contention(data),
            footprint(data),
            native(data),
        )
        if x
    )
    if args.readme:
        path = Path(args.readme)
        text = path.read_text()
        head, rest = text.split(BEGIN)
        path.write_text(f"{head}{BEGIN}\n\n{mine}\n{END}{rest.split(END, 1)[1]}")
    print(mine)
    print(all_peers(data))


if __name__ == "__main__":
    main()
