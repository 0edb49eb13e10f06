"""What bounds the linears of one thread: peaks of instructions and memory, and kernels' shares.

`python benches/kernels/roofline.py [--program PROGRAM]` builds a release program (two minutes; or
takes one that is built), which measures in turns, by the thread's own time: the clock, by a chain
of additions; how many of an instruction a cycle does; plain reads; and the linears from cache and
memory. It then steps through the linears one instruction after another, so that the instructions
of the tables are those that are executed, by their names in the disassembly. A bound is the longest
of what a kernel's instructions take of one kind alone, or its bytes from memory. About a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from prefixcache.models.quantized import QUANT_FORMATS

ROOT = Path(__file__).parents[2]
FORMATS = QUANT_FORMATS
INPUTS, PANEL = 768, 64
# Two shifts, lookups and products, and their rounding to a word.
DEQUANTIZING = "dequantizing,,,,,,"
STEPPED_ROWS = {1: 1, 8: 8, 1024: 24}

# Kinds of instructions that share pipes of the processor.
KINDS = (
    ("dots", r"vdpbf16ps|vpdpbusd"),
    ("products", r"vfn?m(add|sub)\w+|vmul[ps]s|vpmulld"),
    ("lookups", r"vperm\w+|vpshuf\w+|vinsert\w+|vextract\w+"),
    ("rounding", r"vcvtne\w+"),
    ("conversions", r"vcvt\w+|vpmov[sz]x\w+"),
    (
        "shifts, logic",
        r"vps[lr][la]\w+|vp?and\w*|vp?or\w*|vp?xor\w*|vpternlog\w+|vp?add\w+|vp?sub\w+",
    ),
)
LINE = re.compile(r"^\s*([0-9a-f]+):\s+(?:\{\w+\} )?(\w+)\s*(.*?)(?:\s*#.*)?$")


def built() -> Path:
    command = ["cargo", "build", "--release", "-p", "prefixcache-ops", "--example", "roofline"]
    made = subprocess.run(
        [*command, "--message-format=json"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    messages = map(json.loads, made.stdout.splitlines())
    return Path([m["executable"] for m in messages if m.get("executable")][-1])


def disassembled(program: Path) -> dict[int, tuple[str, str]]:
    """Name and operands of the instruction at each address."""
    command = ["objdump", "-d", "--no-show-raw-insn", "-M", "intel", str(program)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = map(LINE.match, text.splitlines())
    return {int(line[1], 16): (line[2], line[3]) for line in found if line}


def kinds_of(steps: str, code: dict[int, tuple[str, str]]) -> Counter[str]:
    """How many instructions of each kind were executed."""
    counts = Counter[str]()
    for step in steps.split(","):
        address, _, times = step.partition(":")
        name, operands = code.get(int(address, 16), ("?", ""))
        times = int(times)
        counts["all"] += times
        first, _, _ = operands.partition(",")
        if "[" in first and not name.startswith(("cmp", "test", "lea", "prefetch", "call", "j")):
            counts["stores"] += times
        elif "[" in operands and name != "lea":
            counts["loads"] += times
        kind = next((kind for kind, names in KINDS if re.fullmatch(names, name)), None)
        if kind:
            counts[kind] += times
    return counts


class Measured:
    """What the program printed."""

    def __init__(self, text: str, code: dict[int, tuple[str, str]]) -> None:
        self.peaks, self.chains, self.reads = {}, {}, {}
        self.steps: dict[tuple[str, str, int], Counter[str]] = {}
        self.rates = defaultdict[tuple[str, str, int, str], float](float)
        self.parts: dict[tuple[str, str, int], float] = {}
        for line in text.splitlines():
            kind, *words = line.split()
            if kind == "clock":
                self.clock = float(words[0])
            elif kind in ("peak", "chain", "read"):
                {"peak": self.peaks, "chain": self.chains, "read": self.reads}[kind][words[0]] = (
                    float(words[1])
                )
            elif kind == "steps":
                self.steps[words[0], words[1], int(words[2])] = kinds_of(words[3], code)
            elif kind == "kernel":
                self.rates[words[0], words[1], int(words[2]), words[3]] = float(words[4])
            elif kind == "part":
                self.parts[words[0], words[1], int(words[2])] = float(words[3])

    def cycles(self, counts: Counter[str], scale: float) -> dict[str, float]:
        """Cycles that each kind takes at its peak, of counts times `scale`."""
        multiplied = counts["dots"] + counts["products"]
        vectors = sum(counts[kind] for kind, _ in KINDS)
        peaks = self.peaks
        # With its own two lookups and products for each rounding, and the dots after them.
        dequantizing = 0.0
        if counts["rounding"] and counts["lookups"] > 2 * counts["rounding"]:
            dequantizing = (
                7 * counts["rounding"] / peaks[DEQUANTIZING] + multiplied / peaks["vdpbf16ps"]
            )
            dequantizing -= 2 * counts["rounding"] / peaks["vfmadd231ps"]
        return {
            "dequantizing, then dots": scale * dequantizing,
            "multiplying pipes": scale * multiplied / peaks["vdpbf16ps"],
            "lookups, rounding": scale
            * max(
                counts["lookups"] / peaks["vpermps"]
                + counts["rounding"] * _rounding_with_lookup(peaks),
                counts["rounding"] / peaks["vcvtne2ps2bf16"],
            ),
            "vector pipes": scale * vectors / peaks["vpandd"],
            "loads": scale * counts["loads"] / peaks["load"],
            "stores": scale * counts["stores"] / peaks["store"],
        }


def _rounding_with_lookup(peaks: dict[str, float]) -> float:
    """What a rounding adds to a lookup, in cycles."""
    return 2 / peaks["vpermps,vcvtne2ps2bf16"] - 1 / peaks["vpermps"]


def table_of_peaks(measured: Measured) -> None:
    print(f"clock {measured.clock:.2f} GHz (a chain of additions)\n")
    print("| independent | a cycle | | in a chain | cycles |\n|---|---|---|---|---|")
    chains = list(measured.chains.items())
    for i, (name, rate) in enumerate(measured.peaks.items()):
        chain, cycles = chains[i] if i < len(chains) else ("", "")
        print(f"| {name.rstrip(',').replace(',', ' + ')} | {rate:.2f} | | {chain} | {cycles} |")
    print("\n| plain read | " + " | ".join(measured.reads) + " |")
    print("|---|" + "---|" * len(measured.reads))
    print("| GB/s | " + " | ".join(f"{rate:.0f}" for rate in measured.reads.values()) + " |\n")


def table_of_kernels(measured: Measured, rows: int, bytes_of: dict[str, float]) -> None:
    place = "cache" if rows == 1024 else "memory"
    names = [name for name, _ in KINDS]
    print(f"{rows} rows; instructions for 32 weights{' and a row' if rows > 1 else ''}\n")
    print(
        f"| way | all | {' | '.join(names)} | loads | stores | G/s, cache | {place} "
        "| of bfloat16 | bound by | at most | reached |"
    )
    print("|---" * (len(names) + 10) + "|")
    for way, name in [("bfloat16", "all")] + [(w, f) for f in FORMATS for w in ("exact", "int8")]:
        key = (way, name, STEPPED_ROWS[rows])
        if key not in measured.steps:
            continue
        _row(measured, key, rows, place, bytes_of)
    print()


def _row(
    measured: Measured,
    key: tuple[str, str, int],
    rows: int,
    place: str,
    bytes_of: dict[str, float],
) -> None:
    way, name, stepped = key
    counts, scale = measured.steps[key], 32 / (stepped * PANEL * INPUTS)
    of = "Q4_1" if name == "all" else name
    rate = measured.rates[way, of, rows, place]
    cache = measured.rates[way, of, rows, "cache"]
    nanoseconds = {
        kind: cycles / measured.clock for kind, cycles in measured.cycles(counts, scale).items()
    }
    if place == "memory":
        nanoseconds["memory"] = 32 * bytes_of[name] / rows / measured.reads["memory"]
    bound = max(nanoseconds, key=lambda kind: nanoseconds[kind])
    most = 32 / nanoseconds[bound]
    columns = [f"{scale * counts[kind]:.2f}" for kind, _ in KINDS]
    columns += [f"{scale * counts['loads']:.2f}", f"{scale * counts['stores']:.2f}"]
    ratio = rate / measured.rates["bfloat16", of, rows, place]
    label = way if name == "all" else f"{name} {way}"
    print(
        f"| {label} | {scale * counts['all']:.1f} | {' | '.join(columns)} | {cache:.0f} "
        f"| {rate:.0f} | {ratio:.2f} | {bound} | {most:.0f} | {100 * rate / most:.0f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", type=Path, help="a build of the example `roofline`")
    program = parser.parse_args().program or built()
    text = subprocess.run([program], check=True, stdout=subprocess.PIPE, text=True).stdout
    measured = Measured(text, disassembled(program))
    sizes = {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in FORMATS}
    bytes_of = {name: size / numbers for name, (numbers, size) in sizes.items()} | {"all": 2.0}
    table_of_peaks(measured)
    for rows in STEPPED_ROWS:
        table_of_kernels(measured, rows, bytes_of)
    print("| what products begin with | " + " | ".join(FORMATS) + " |")
    print("|---" * (len(FORMATS) + 1) + "|")
    dequantizing = (f"{measured.parts['dequantize', name, 0]:.0f}" for name in FORMATS)
    print(f"| dequantizing, G weights/s | {' | '.join(dequantizing)} |")
    quantizing = ", ".join(f"{measured.parts['quantize', 'all', r]:.1f}" for r in STEPPED_ROWS)
    print(f"\nQuantizing activations of 1, 8 and 1,024 rows: {quantizing} G numbers/s")


if __name__ == "__main__":
    main()
