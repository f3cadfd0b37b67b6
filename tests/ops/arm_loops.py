"""How near the inner loops for arm64 come to what the machine's pipes allow, by static analysis: `python tests/ops/arm_loops.py`.

Compiles a file of kernels with aarch64-linux-gnu-gcc, takes the loop of a function that has most multiply-accumulate instructions
(the quickest of them), and asks llvm-mca how many cycles it takes again and again, all data in the first cache. The limit of a core is as many such
instructions a cycle as llvm-mca gives for a row of independent ones; on Cortex-A55, where its model is too kind, one of 128 bits
(both of its pipes of 64 bits, says Arm's optimisation guide). llvm-mca takes Cortex-A76 for a Cortex-A57, which it resembles.
"""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GCC = "aarch64-linux-gnu-gcc"
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-S", "-o", "-")
CORES = ("cortex-a55", "cortex-a76", "neoverse-v1")
ONE = {"cortex-a55": 1.0}  # multiply-accumulates of 128 bits a cycle
JUMP = r"\t(?:b\.?(?:eq|ne|lt|le|gt|ge|hi|ls|cc|cs|mi|pl)|cbn?z|tbn?z)\t.*?(\.L\w+)$"

# what, file, function (a regular expression), instruction
LOOPS = (
    ("matmul, conv: 6 x 16 f32", "gemm_ref", "tile_6_1", "fmla"),
    ("Winograd: 6 x 16 f32", "gemm_ref", "wino_tile_6_1", "fmla"),
    ("one row times panels, f32", "gemm_ref", "stream_row", "fmla"),
    ("first layers: 6 x 16 f32", "gemm_ref", "line_1", "fmla"),
    ("depthwise 3x3 f32", "gemm_ref", "dw_tile_8_3_1_0", "fmla"),
    ("depthwise 5x5 f32", "gemm_ref", "dw_tile_8_5_1_0", "fmla"),
    ("matmul: 6 x 16 bf16", "gemm_armbf16", "tile_6_1", "bfdot"),
    ("matmul, conv: 4 x 16 i16 i8", "qgemm", "q_words", "smlal2?"),
    ("matmul, conv: 6 x 16 i8", "qgemm_dotprod", r"a_dot_rows[\w.]*", "sdot"),
    ("4 bits: 2 x 16", "qgemm_dotprod", "q_nibbles", "sdot"),
    ("matmul, conv: 6 x 16 i8", "qgemm_i8mm", r"q_bytes[\w.]*", "smmla"),
)


@functools.cache
def assembly(name: str) -> str:
    """The text that the compiler makes of hal/cpu/NAME.c."""
    include = [f"-I{ROOT / d}" for d in ("hal/include", "schema/gen", "hal/cpu")]
    return subprocess.run(
        [GCC, *FLAGS, *include, str(ROOT / f"hal/cpu/{name}.c")], check=True, capture_output=True, text=True
    ).stdout


def loops(body: str) -> Iterator[list[str]]:
    """The innermost loops of a function, without what decides in them."""
    lines = [line for line in body.splitlines() if line.strip()]
    at = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:$", line)}
    for end, line in enumerate(lines):
        back = re.match(JUMP, line)
        begin = at.get(back[1], end + 1) if back else end + 1
        if begin > end:
            continue
        inner = (begin <= at.get(m[1], end) <= i for i in range(begin, end) if (m := re.match(JUMP, lines[i])))
        if not any(inner):
            yield [x for x in lines[begin : end + 1] if re.match(r"\t[a-z]", x) and not re.match(JUMP, x)]


def cycles(code: list[str], core: str) -> float:
    """Of one round, by llvm-mca."""
    text = subprocess.run(["llvm-mca-19", "-mtriple=aarch64-linux-gnu", f"-mcpu={core}", "-mattr=+v8.6a", "-iterations=300", "-"],
                          input="\n".join(code) + "\n", check=True, capture_output=True, text=True).stdout  # fmt: skip
    total = re.search(r"Total Cycles:\s+(\d+)", text)
    assert total is not None
    return int(total[1]) / 300


@functools.cache
def limit(instruction: str, core: str) -> float:
    """Of such instructions that do not wait for each other, a cycle."""
    form = {"fmla": "v{0}.4s, v1.4s, v2.s[0]", "bfdot": "v{0}.4s, v1.8h, v2.2h[0]", "smlal": "v{0}.4s, v1.4h, v2.h[0]",
            "sdot": "v{0}.4s, v1.16b, v2.4b[0]", "smmla": "v{0}.4s, v1.16b, v2.16b"}[instruction]  # fmt: skip
    n = 24
    most = n / cycles([f"\t{instruction}\t{form.format(3 + i)}" for i in range(n)], core)
    return min(most, ONE.get(core, most))


def share(name: str, function: str, instruction: str, core: str) -> float:
    """Of the limit, 0..1."""
    found = [
        code
        for m in re.finditer(rf"^({function}):\n(.*?)^\t\.size\t\1,", assembly(name), re.S | re.M)
        for code in loops(m[2])
    ]
    most = max((count(code, instruction) for code in found), default=0)
    assert most, f"{name}.c: no loop with {instruction} in {function}"
    best = min(cycles(code, core) for code in found if count(code, instruction) == most)
    return most / best / limit(instruction.rstrip("2?"), core)


def count(code: list[str], instruction: str) -> int:
    return sum(bool(re.match(rf"\t{instruction}\t", x)) for x in code)


def main() -> None:
    print("| loop | file | " + " | ".join(CORES) + " |\n| --- | --- |" + " --- |" * len(CORES))
    for what, name, function, instruction in LOOPS:
        cells = []
        for core in CORES:
            has = core != "cortex-a55" or instruction not in ("bfdot", "smmla")
            cells.append(f"{share(name, function, instruction, core):.0%}" if has else "")
        print(f"| {what} | `{name}.c` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
