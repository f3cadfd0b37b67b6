"""The command line: trivet export | quantize | run | inspect | bench | profile | tune | compare | check | build | deploy | doctor."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from trivet import commands, commands_devices, commands_speed
from trivet.commands import BAD, OK
from trivet.deploy_targets import MACHINES
from trivet.error import Error
from trivet.platforms import PLATFORMS

USAGE = 2  # exit status: wrong words

MODEL = """\
MODEL is FILE.pt2 (torch.export.save), FILE.py:NAME or MODULE:NAME. NAME is a torch.nn.Module, a class that needs no
arguments, or a function without arguments that returns the module, (module, args[, kwargs[, dynamic_shapes]]) or
{entry: (module, args[, kwargs])}."""

EXAMPLES = {
    "export": """\
examples:
  trivet export net.py:build -o net.trv
  trivet export torchvision.models:resnet18 --example 1x3x224x224 -o resnet18.trv
  trivet export net.py:Encoder --example i64:1x16 --dynamic 0.1=n:1..512 -o encoder.trv
  trivet export exported.pt2 -o net.trv --dump-after fuse_elementwise
  trivet export net.py:build -o net.trv --quantize w8a8 --calibrate samples.npz
  trivet export net.py:build -o net.trv --quantize w4g32""",
    "quantize": """\
examples:
  trivet quantize net.py:build w8a8 --calibrate samples.npz      # prints what every layer became and loses
  trivet quantize net.py:build w8a8 --calibrate net.py:batches --metric net.py:accuracy --max-drop 0.01 -o net.trv
  trivet quantize net.py:build w8 --worst 10 --json""",
    "run": """\
examples:
  trivet run net.trv x.npy                     # prints the results
  trivet run net.trv x.npy mask=m.npy -o y.npz # keeps them
  trivet run net.trv frame.raw --shape x=1x3x480x640
  trivet run net.trv inputs.npz --entry decode""",
    "inspect": """\
examples:
  trivet inspect net.trv                # entries, memory over time, every step with its place in the model
  trivet inspect net.trv --no-steps
  trivet inspect net.trv --json | jq '.entries[0].arena'""",
    "bench": """\
examples:
  trivet bench net.trv                           # random inputs
  trivet bench net.trv --threads 1 --runs 1000 --json
  trivet bench encoder.trv --shape ids=1x128
  trivet bench net.trv --max-p50 4.0             # for CI: status 1 when slower
  trivet bench net.trv --device ssh://pi@raspberrypi --device adb:   # on other machines, beside each other""",
    "profile": """\
examples:
  trivet profile net.trv                         # every command: time, kernel, rate, share of what this machine can do
  trivet profile net.trv --threads 2 --top 10
  trivet profile net.trv --trace trace.json      # for ui.perfetto.dev or chrome://tracing
  trivet profile net.trv --machine limits.json   # keeps the machine's limits there instead of measuring them each time""",
    "tune": """\
examples:
  trivet tune net.trv                            # changes the file
  trivet tune net.trv -o tuned.trv --threads 2 --seconds 60""",
    "compare": """\
examples:
  trivet compare net.py:build                    # exports, runs both, compares every layer
  trivet compare net.py:build net.trv --data x.npy
  trivet compare net.py:build net.trv --tolerance 1e-3 --json
  trivet compare net.py:build small.trv --min-sqnr 25      # quantised: dB in place of the tolerance""",
    "build": """\
examples:
  trivet build --target aarch64-linux-musl       # trv_run, libtrivet.a and headers in trivet-aarch64-linux-musl/
  trivet build --target armv7-linux-gnueabihf --to out --compiler gnu
  trivet build --target wasm32-wasi              # trv_run.wasm for WASI; trivet.wasm and trivet.mjs for JavaScript
  trivet build --target android-arm64 --ndk ~/android-ndk-r27""",
    "new-delegate": """\
examples:
  trivet new-delegate mydev && cd mydev && python -m pytest        # builds it, puts it through the conformance test, runs models on it""",
    "paths": """\
examples:
  cc -c driver.c -I $(trivet paths sources)/hal/include -I $(trivet paths sources)/schema/gen""",
    "deploy": """\
examples:
  trivet deploy net.trv --target cortex-m55 --to firmware && make -C firmware run     # in QEMU
  trivet deploy net.trv --target cortex-m4 --flash 256K --ram 64K                     # fails where it does not fit
  trivet deploy net.trv --target cortex-m7 --weights-at 0x90000000                    # the program in a flash of its own""",
    "doctor": """\
examples:
  trivet doctor                                  # what is here, what is missing, and the command that gets it""",
    "check": """\
examples:
  trivet check net.py:build                      # status 1 and a list when something cannot be exported
  trivet check torchvision.models:vit_b_16 --example 1x3x224x224 --json""",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return USAGE
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except Error as e:
        if getattr(options, "json", False):
            print(json.dumps({"error": {"reason": e.reason, "node": e.node, "remedy": e.remedy}}))
        else:
            commands.make_console(stderr=True).print(f"[bold red]error:[/] {commands.escape(str(e))}", highlight=False)
        return BAD
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


# ---- words --------------------------------------------------------------------------------------------------------------
def _parser() -> argparse.ArgumentParser:
    import trivet

    parser = argparse.ArgumentParser("trivet", description="PyTorch models in one file that a small C runtime runs.",
                                     epilog="`trivet COMMAND --help` explains a command, with examples.")  # fmt: skip
    parser.add_argument("--version", action="version", version=f"trivet {trivet.__version__}")
    words = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], what: str, *, model: bool = False) -> argparse.ArgumentParser:
        p = words.add_parser(name, help=what, description=what + "." + (f"\n\n{MODEL}" if model else ""),
                                epilog=EXAMPLES[name], formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        p.set_defaults(run=run)
        p.add_argument("--json", action="store_true", help="print JSON for tools instead of text for people")
        if model:
            p.add_argument("model", metavar="MODEL")
            p.add_argument("--example", action="append", default=[], metavar="[DTYPE:]SHAPE",
                           help="an example argument, once per argument: 1x3x224x224, i64:1x16 (default: f32, or what "
                           "the function returns)")  # fmt: skip
            p.add_argument("--dynamic", action="append", default=[], metavar="ARG.AXIS=[NAME:]MIN..MAX",
                           help="a size that may change, e.g. 0.2=h:64..512; equal names are equal sizes")  # fmt: skip
        return p

    p = command("export", commands.do_export, "Make a program of a PyTorch model", model=True)
    p.add_argument("-o", "--output", metavar="FILE.trv", help="where to (default: the model's name)")
    p.add_argument("--target", default="cpu", help="delegates in order of preference (default: cpu)")
    p.add_argument("--place", action="append", default=[], metavar="PATH=DELEGATE", type=_pin,
                   help="pin the nodes below a module path to a delegate; may be given several times")  # fmt: skip
    p.add_argument("--strict", action="store_true", help="an error for what the first delegate does not take")
    p.add_argument(
        "--no-fallback", action="store_true", help="no alternatives for the CPU: smaller, but needs the delegates"
    )
    p.add_argument("--device-io", default="", metavar="NAME[,..]",
                   help="inputs and outputs that the caller binds in the delegate's own memory")  # fmt: skip
    p.add_argument("--memory", default="", metavar="NAME=SIZE[,..]", type=_memories,
                   help="budgets of the device's memories, fastest first: dtcm=64K,sram=512K")  # fmt: skip
    p.add_argument("--dump-after", default="", metavar="PASS[,PASS]", help="print the IR after passes to stderr")
    p.add_argument("--skip", default="", metavar="PASS[,PASS]", help="leave optimising passes out")
    p.add_argument("--strip", action="store_true", help="leave names and source lines out of the file")
    p.add_argument("--quantize", metavar="RECIPE", help="w8a8, w8a8-dynamic, w8a16, w8, w4g32, w4g32a8, f16, bf16")
    _calibrated(p)

    p = command(
        "quantize", commands.do_quantize, "Quantise a model and show what every layer became and loses", model=True
    )
    p.add_argument(
        "recipe", metavar="RECIPE", nargs="?", default="w8a8", help="as of export --quantize (default: w8a8)"
    )
    _calibrated(p)
    p.add_argument("--target", default="cpu", help="delegates in order of preference (default: cpu)")
    p.add_argument("--worst", type=_natural, metavar="N", help="the N worst layers only, worst first (0: all)")
    p.add_argument("-o", "--output", metavar="FILE.trv", help="keep the program")

    p = command("run", commands.do_run, "Run a program on data")
    _program(p)
    p.add_argument("inputs", nargs="*", metavar="[NAME=]FILE", help=".npy, .npz or raw little-endian files; random numbers "
                   "when there are none")  # fmt: skip
    p.add_argument(
        "-o", "--output", metavar="FILE", help=".npz for all results, .npy for the first, else a folder of .npy"
    )
    p.add_argument("--repeat", type=_positive, default=1, metavar="N", help="call it N times (state goes on)")

    p = command("inspect", commands.do_inspect, "Show entries, memory over time, steps, placement and its reason")
    p.add_argument("program", metavar="FILE.trv")
    p.add_argument("--weights", metavar="FILE", help="the external weights file, where the program has one")
    p.add_argument("--entry", default="", help="only this one")
    p.add_argument("--no-steps", action="store_true", help="without the list of commands")

    p = command("bench", commands_speed.do_bench, "Measure load, first run, latency percentiles and memory")
    _program(p)
    p.add_argument(
        "--data", action="append", default=[], metavar="[NAME=]FILE", help="inputs as of run (default: random)"
    )
    p.add_argument("--warmup", type=_natural, default=5, metavar="N", help="runs that do not count (default: 5)")
    p.add_argument("--runs", type=_positive, default=100, metavar="N", help="runs that count (default: 100)")
    p.add_argument("--seconds", type=float, default=10.0, help="stop counting after that long (default: 10)")
    p.add_argument("--max-p50", type=float, metavar="MS", help="status 1 when the median is above")
    p.add_argument("--device", action="append", default=[], metavar="D",
                   help="where, may be given several times: local, ssh://[user@]host[:port], adb:SERIAL, qemu:aarch64 | armv7 | riscv64, wasm, wine; firmware made by deploy: qemu:cortex-m0 .. cortex-m55, serial:PORT")  # fmt: skip
    p.add_argument("--trv-run", metavar="FILE", help="the runner for the devices (default: built and kept by trivet)")

    p = command(
        "profile",
        commands_speed.do_profile,
        "Show where the time goes, and how near each command is to the machine's limit",
    )
    _program(p)
    p.add_argument(
        "--data", action="append", default=[], metavar="[NAME=]FILE", help="inputs as of run (default: random)"
    )
    p.add_argument(
        "--runs", type=_positive, default=50, metavar="N", help="runs, of which the fastest counts (default: 50)"
    )
    p.add_argument("--seconds", type=float, default=5.0, help="stop running after that long (default: 5)")
    p.add_argument("--top", type=_natural, default=0, metavar="N", help="the N slowest commands only, slowest first")
    p.add_argument("--trace", metavar="FILE.json", help="write the fastest run as a Chrome trace")
    p.add_argument(
        "--machine", metavar="FILE.json", help="where the machine's limits are kept; measured when not there yet"
    )

    p = command("tune", commands_speed.do_tune, "Measure alternatives on this machine and store the best in the file")
    _program(p)
    p.add_argument("-o", "--output", metavar="FILE.trv", help="where to (default: the program itself)")
    p.add_argument("--rounds", type=_positive, default=5, metavar="N", help="how often each is measured (default: 5)")
    p.add_argument("--seconds", type=float, default=20.0, help="for each entry (default: 20)")

    p = command("compare", commands.do_compare, "Run model and program side by side and find the first layer that differs",
                model=True)  # fmt: skip
    _program(p, optional=True)
    p.add_argument(
        "--data", action="append", default=[], metavar="FILE", help="inputs as of run (default: the examples)"
    )
    p.add_argument("--tolerance", type=float, default=1e-4, help="largest relative error (default: 1e-4)")
    p.add_argument("--min-sqnr", type=float, default=20.0, metavar="DB",
                   help="for a quantised program: least signal-to-noise ratio of results and layers (default: 20)")  # fmt: skip
    p.add_argument("--outputs-only", action="store_true", help="do not look into the layers")
    p.add_argument("--all", action="store_true", help="list every layer, not only the worst")

    p = command("build", commands_devices.do_build, "Build the C runtime and trv_run for another machine")
    p.add_argument("--target", required=True, metavar="T", help=", ".join(PLATFORMS))
    p.add_argument("--to", metavar="DIR", help="where to (default: trivet-T)")
    p.add_argument(
        "--compiler", default="auto", choices=("auto", "gnu", "zig"), help="auto: GNU where it is on PATH, else zig"
    )
    p.add_argument("--ndk", metavar="DIR", help="the Android NDK, for android-arm64 (default: $ANDROID_NDK_HOME)")
    p.add_argument(
        "--option", action="append", default=[], metavar="-DX=Y", help="further words for CMake: --option=-DX=Y"
    )

    p = command(
        "new-delegate", commands_devices.do_new_delegate, "Start a delegate of your own: driver, Target, build, tests"
    )
    p.add_argument("name", metavar="NAME", help="lower case letters, digits and _")
    p.add_argument("--to", metavar="DIR", help="where (default: ./NAME)")

    p = command("paths", commands_devices.do_paths, "Say where the C sources and headers, or the library, are")
    p.add_argument("what", choices=("sources", "library"))

    p = command(
        "deploy", commands_devices.do_deploy, "Write a C project that runs a program on a machine without files or heap"
    )
    p.add_argument("program", metavar="FILE.trv")
    p.add_argument("--target", required=True, metavar="T", help=", ".join(MACHINES))
    p.add_argument("--to", metavar="DIR", help="where to (default: trivet-T)")
    p.add_argument("--flash", type=_bytes, metavar="SIZE", help="flash that there is: 256K")
    p.add_argument("--ram", type=_bytes, metavar="SIZE", help="RAM that there is: 64K")
    p.add_argument("--stack", type=_bytes, metavar="SIZE", help="stack to reserve (default: what the kernels may need)")
    p.add_argument(
        "--weights-at",
        type=_address,
        metavar="ADDRESS",
        help="the program lies there, in another flash, as program.bin",
    )
    p.add_argument("--debug", action="store_true", help="keep names and source lines in the program")

    command("doctor", commands_devices.do_doctor, "Say which tools are here, which are missing and how to get them")
    command("check", commands.do_check, "List everything of a model that cannot be exported, at once", model=True)
    return parser


def _calibrated(p: argparse.ArgumentParser) -> None:
    p.add_argument("--calibrate", metavar="DATA", help="FILE.npz with an array per argument (one axis more than the argument: "
                   "a batch per row), or FILE.py:NAME, MODULE:NAME: argument tuples")  # fmt: skip
    p.add_argument("--metric", metavar="FILE.py:NAME", help="function of a net, higher is better; it limits the loss")
    p.add_argument("--max-drop", type=float, metavar="X", help="what the metric may lose (default: 0.01)")


def _program(p: argparse.ArgumentParser, optional: bool = False) -> None:
    if optional:
        p.add_argument("program", metavar="FILE.trv", nargs="?", help="default: export the model now")
    else:
        p.add_argument("program", metavar="FILE.trv")
    p.add_argument("--entry", default="", help="which entry (default: forward, or the only one)")
    p.add_argument("--threads", type=_natural, default=0, metavar="N", help="threads per run (default: one per core)")
    p.add_argument("--weights", metavar="FILE", help="the external weights file, where the program has one")
    p.add_argument(
        "--shape", action="append", default=[], metavar="NAME=SHAPE", help="size of a dynamic input: ids=1x128"
    )
    p.add_argument("--devices", metavar="A,B:OPTIONS", help="who runs it, best first (default: what the program asks for, as far as "
                   "it is here, then the CPU)")  # fmt: skip
    p.add_argument("--plugin", action="append", default=[], metavar="FILE", help="a library with one more driver; or its name, where "
                   "it came with trivet: npu_sim")  # fmt: skip


def _natural(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number from {least} on expected, got {text!r}")
    return int(text)


def _pin(text: str) -> tuple[str, str]:
    path, equals, name = text.rpartition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"PATH=DELEGATE expected, got {text!r}")
    return path, name


def _bytes(text: str) -> int:
    """65536 of "64K"."""
    m = re.fullmatch(r"(\d+)([KMG]?)", text)
    if m is None:
        raise argparse.ArgumentTypeError(f"a size expected, for example 256K; got {text!r}")
    return int(m[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[m[2]]


def _address(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise argparse.ArgumentTypeError(f"an address expected, for example 0x90000000; got {text!r}") from None


def _memories(text: str) -> dict[str, int]:
    """{"dtcm": 65536} of "dtcm=64K"."""
    out = {}
    for part in text.split(",") if text else ():
        m = re.fullmatch(r"(\w+)=(\d+)([KMG]?)", part)
        if m is None:
            raise argparse.ArgumentTypeError(f"NAME=SIZE expected, for example sram=512K; got {part!r}")
        out[m[1]] = int(m[2]) << {"": 0, "K": 10, "M": 20, "G": 30}[m[3]]
    return out


if __name__ == "__main__":
    sys.exit(main())
