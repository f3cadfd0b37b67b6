"""Runs trivet and its peers side by side. See README.md.

prepare   converts workloads for peers of this interpreter (DIR/files, DIR/ref, DIR/prepared.jsonl)
limits    measures what the machine can do (DIR/limits.jsonl)
one       loads and runs one prepared model in this, fresh, process; prints a JSON line
suite     runs everything prepared, interleaved in rounds, a fresh process each (DIR/runs.jsonl)
native    runs trivet and ExecuTorch without Python (DIR/native.jsonl)
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def append(path, row):
    with open(path, "a") as f:
        f.write(json.dumps(row) + "\n")


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


def status_kb(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0


def busy_seconds():
    """CPU time that all processes have used."""
    v = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (v[0] + v[1] + v[2] + v[5] + v[6] + v[7]) / os.sysconf("SC_CLK_TCK")


# ---- prepare ------------------------------------------------------------------------------------------------------------
def prepare(args):
    import torch
    import workloads
    from adapter import adapters

    known, folder = adapters(), Path(args.dir)
    (folder / "ref").mkdir(parents=True, exist_ok=True)
    for name in args.workloads or workloads.ZOO:
        for precision in ("fp32", *workloads.PRECISIONS.get(name, ("fp16",))):
            for peer in args.peers:
                a = known[peer]()
                if (
                    precision not in a.precisions
                    or not a.takes(name)
                    or (args.precisions and precision not in args.precisions)
                ):
                    continue
                row = {
                    "workload": name,
                    "peer": peer,
                    "precision": precision,
                    "threads": 0,
                    "python": os.path.abspath(sys.executable),
                }
                start = time.time()
                try:
                    work = workloads.work(name)
                    reference(work, folder / "ref" / f"{name}.npz")
                    with torch.no_grad():
                        paths = a.prepare(work, precision, str(folder / "files" / peer))
                    row.update(ok=True, paths=[os.path.relpath(p, folder) for p in paths],
                               bytes=sum(os.path.getsize(p) for p in paths), note=a.note)  # fmt: skip
                except Exception as e:
                    traceback.print_exc()
                    row.update(ok=False, error=f"{type(e).__name__}: {str(e)[:400]}")
                row["seconds"] = round(time.time() - start, 2)
                append(folder / "prepared.jsonl", row)
                print(name, peer, precision, "ok" if row["ok"] else row["error"][:200], row["seconds"], flush=True)


def reference(work, path):
    """Inputs, eager results and what one inference costs, once per workload."""
    import torch
    import workloads

    if path.exists():
        return
    with torch.no_grad():
        y = work.model(*work.inputs)
    macs, weights = workloads.cost(work.model, work.inputs)
    np.savez(path, macs=macs, wbytes=weights, **{f"in{i}": x.numpy() for i, x in enumerate(work.inputs)},
             **{f"out{i}": t.numpy() for i, t in enumerate(y if isinstance(y, tuple) else (y,))})  # fmt: skip


# ---- one ----------------------------------------------------------------------------------------------------------------
def one(args):
    print("RESULT " + json.dumps(measure(args)), flush=True)
    os._exit(0)  # some runtimes crash in their destructors; the measurement is done


def measure(args):
    """A process' figures: import, load, first inference, memory, error, then times for each number of threads."""
    from adapter import adapters

    folder = Path(args.dir)
    ref = np.load(folder / "ref" / f"{args.workload}.npz")
    inputs = [ref[k] for k in sorted(k for k in ref.files if k.startswith("in"))]
    a = adapters()[args.peer]()
    before = mapped()
    start = time.perf_counter()
    a.runtime_import()
    row = {"import_s": time.perf_counter() - start, "rss_import_kb": status_kb("VmRSS"), "results": []}
    for threads in args.threads:
        t0 = time.perf_counter()
        run = a.load([str(folder / p) for p in args.paths], threads)
        t1 = time.perf_counter()
        outs = run(inputs)
        t2 = time.perf_counter()
        if not row["results"]:
            row.update(load_s=t1 - t0, first_s=t2 - t1, rss_peak_kb=status_kb("VmHWM"), **errors(outs, ref["out0"]))
        row["results"].append({"threads": threads, **timed(run, inputs, args.warm, args.seconds)})
        del run
    row["mapped"] = {os.path.basename(f): os.path.getsize(f) for f in mapped() - before}
    return row


def mapped():
    """Shared objects of this process, those of Python, numpy and the system aside."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {x.split()[-1] for x in lines if ".so" in x}
    return {
        f
        for f in files
        if os.path.exists(f)
        and "/lib-dynload/" not in f
        and "/numpy" not in f
        and not f.startswith(("/lib/", "/usr/lib/"))
    }


def errors(outs, wanted):
    """Of the main output against eager float32: the first of the right size (others follow it)."""
    got = next((np.array(y) for y in outs if np.size(y) == wanted.size), None)
    if got is None:
        return {
            "error": f"no output of the right size: {[np.shape(y) for y in outs]}",
            "max_abs": float("nan"),
            "rms_rel": float("nan"),
        }
    d = got.reshape(wanted.shape).astype(np.float64) - wanted
    return {"max_abs": float(np.abs(d).max()), "rms_rel": float(np.sqrt((d**2).mean()) / (wanted.std() + 1e-30))}


def timed(run, inputs, warm, seconds):
    """Latencies in seconds; cpu: CPU time of an inference; others_cpu: CPU seconds per second that other processes used."""
    end = time.perf_counter() + warm
    while time.perf_counter() < end:
        run(inputs)
    wall, cpu = [], []
    before = busy_seconds() - time.process_time()
    switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    start = now = time.perf_counter()
    while now - start < seconds or len(wall) < 5:
        c, t = time.process_time(), time.perf_counter()
        run(inputs)
        now = time.perf_counter()
        cpu.append(time.process_time() - c)
        wall.append(now - t)
    others = (busy_seconds() - time.process_time() - before) / (now - start)
    return {"n": len(wall), "median": float(np.median(wall)), "cpu_median": float(np.median(cpu)), "p95": float(np.percentile(wall, 95)),
            "min": float(min(wall)), "p10": float(np.percentile(wall, 10)), "others_cpu": round(others, 3),
            "preempted": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches}  # fmt: skip


# ---- suite --------------------------------------------------------------------------------------------------------------
def suite(args):
    folder = Path(args.dir)
    latest = {(r["workload"], r["precision"], r["peer"]): r for r in rows_of(folder / "prepared.jsonl")}
    groups = {}
    for (workload, precision, peer), r in latest.items():
        chosen = ((args.peers, peer), (args.workloads, workload), (args.precisions, precision))
        if r["ok"] and all(not only or x in only for only, x in chosen):
            groups.setdefault((workload, precision), []).append(r)
    start, failed = time.time(), set()
    with contention(args.busy):
        for turn in range(args.first_round, args.first_round + args.rounds):
            for (
                workload,
                precision,
            ), group in groups.items():  # peers that are compared run within seconds of each other
                k = turn % len(group)
                for r in group[k:] + group[:k]:
                    key = workload, precision, r["peer"]
                    if key in failed or (args.budget and time.time() - start > args.budget):
                        continue
                    row = {"workload": workload, "precision": precision, "peer": r["peer"], "round": turn, "bytes": r["bytes"],
                           "busy": args.busy, "at": round(time.time())}  # fmt: skip
                    row.update(spawn(args, r))
                    if not row["ok"]:
                        failed.add(key)
                    append(folder / "runs.jsonl", row)
                    print(turn, *key, line_of(row), flush=True)


def spawn(args, r):
    cmd = [r["python"], str(HERE / "race.py"), "one", "--dir", args.dir, "--workload", r["workload"], "--peer", r["peer"],
           "--seconds", str(args.seconds), "--warm", str(args.warm), "--threads", *map(str, args.threads), "--paths",
           *r["paths"]]  # fmt: skip
    try:
        p = subprocess.run(cmd, capture_output=True, text=True, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": "timeout"}
    got = [x for x in p.stdout.split("\n") if x.startswith("RESULT ")]
    return (
        {"ok": True, **json.loads(got[0][7:])}
        if got
        else {"ok": False, "error": f"rc {p.returncode}: {(p.stderr or p.stdout)[-400:]}"}
    )


def line_of(row):
    if not row["ok"]:
        return "FAILED " + row["error"][-150:].replace("\n", " ")
    times = [
        f"t{x['threads']} {x['median'] * 1e3:.4g} ms (cpu {x['cpu_median'] * 1e3:.4g}, others {x['others_cpu']:.2f})"
        for x in row["results"]
    ]
    return " ".join(times) + f" rel {row['rms_rel']:.1e}"


@contextmanager
def contention(on):
    """A process per core that does nothing but compute."""
    busy = (
        [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)] if on else []
    )
    try:
        yield
    finally:
        for p in busy:
            p.send_signal(signal.SIGKILL)
            p.wait()


# ---- limits, native -----------------------------------------------------------------------------------------------------
def limits(args):
    """Appends a measurement per number of threads; the table takes the best."""
    from dataclasses import asdict

    from trivet.machine import measure as machine

    for threads in args.threads:
        m = machine(threads, seconds=0.1)
        append(Path(args.dir) / "limits.jsonl", asdict(m))
        print(m)


def native(args):
    """trivet's C API (trv_run bench) and ExecuTorch's C++ API (native/et_run)."""
    folder = Path(args.dir)
    latest = {(r["workload"], r["precision"], r["peer"]): r for r in rows_of(folder / "prepared.jsonl") if r["ok"]}
    for turn in range(args.rounds):
        for (workload, precision, peer), r in latest.items():
            if args.workloads and workload not in args.workloads:
                continue
            path = str(folder / r["paths"][0])
            for threads in args.threads:
                if peer == "trivet" and args.trv_run:
                    text = child(
                        args.trv_run, "bench", path, "--json", "--threads", str(threads), "--runs", str(args.runs)
                    )
                elif peer.startswith("executorch") and args.et_run:
                    text = child(args.et_run, path, "1", str(threads))
                else:
                    continue
                if not text:
                    continue
                got = json.loads(text)
                row = {"workload": workload, "precision": precision, "peer": peer, "threads": threads, "round": turn,
                       "load_ms": got["load_ms"], "first_ms": got["first_ms"], "median_ms": got.get("p50_ms", got.get("median_ms")),
                       "rss_mb": got["peak_bytes"] / 2**20 if "peak_bytes" in got else got["rss_peak_mb"]}  # fmt: skip
                append(folder / "native.jsonl", row)
                print(*row.values(), flush=True)


def child(*cmd, timeout=120):
    """What a command printed, "" where it failed. Through a shell: the peak memory of a process that is started from here would count
    this one's.
    """
    try:
        return subprocess.run(
            ["sh", "-c", '"$@"; exit', "sh", *cmd], capture_output=True, text=True, timeout=timeout, check=True
        ).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ""


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="cmd", required=True)
    words = {f.__name__: sub.add_parser(f.__name__) for f in (prepare, limits, one, suite, native)}
    for w in words.values():
        w.add_argument("--dir", required=True)
    for w in (words["limits"], words["one"], words["suite"], words["native"]):
        w.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    words["prepare"].add_argument("--peers", nargs="+", required=True)
    words["suite"].add_argument("--peers", nargs="*")
    for w in (words["prepare"], words["suite"], words["native"]):
        w.add_argument("--workloads", nargs="*")
    for w in (words["prepare"], words["suite"]):
        w.add_argument("--precisions", nargs="*")
    for w in (words["one"], words["suite"]):
        w.add_argument("--seconds", type=float, default=1.0)
        w.add_argument("--warm", type=float, default=0.3)
    words["one"].add_argument("--workload", required=True)
    words["one"].add_argument("--peer", required=True)
    words["one"].add_argument("--paths", nargs="+", required=True)
    words["suite"].add_argument("--rounds", type=int, default=5)
    words["suite"].add_argument("--first-round", type=int, default=0)
    words["suite"].add_argument("--timeout", type=float, default=300)
    words["suite"].add_argument("--budget", type=float, default=0, help="start nothing new after so many seconds")
    words["suite"].add_argument("--busy", action="store_true", help="beside a busy process on every core")
    words["native"].add_argument("--trv-run")
    words["native"].add_argument("--et-run")
    words["native"].add_argument("--rounds", type=int, default=3)
    words["native"].add_argument("--runs", type=int, default=200)
    args = p.parse_args(argv)
    {f.__name__: f for f in (prepare, limits, one, suite, native)}[args.cmd](args)


if __name__ == "__main__":
    main()
