"""Steps of GRPO with the default model in float32: with the prefix cache and without it, by turns.

    python benches/serving/rollouts.py --output benches/record/rollouts.json

Runs examples/grpo.py on prompts that share about 100 tokens of instructions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from prefixcache.config.engine_config import DEFAULT_MODEL
from prefixcache.models.conversion import convert_model
from prefixcache.tools.bench.machine import write_record

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
SHOT = "After the digit {} a good answer is {}, and one with an even digit is wrong. "
INSTRUCTIONS = "Write odd digits and nothing else. " + "".join(
    SHOT.format(i, "1 3 5 7 9"[:: 1 if i % 2 else -1]) for i in range(4)
)
LINE = re.compile(r"kl=(\S+)  cached (\S+)  (\S+) tokens/s  (\S+) s")
VARIANTS = {"cache on": (), "cache off": ("--no-cache",)}


def steps_of(model: Path, options: argparse.Namespace, flags: tuple[str, ...]) -> list[list[float]]:
    """KL, hits as a share of prompt tokens, tokens a second and seconds, of each step."""
    chosen = {"steps": options.steps, "prompts": options.prompts, "group": options.group}
    chosen |= {"tokens": options.tokens, "rate": 1e-5, "model": model}
    words = [f"--{name}={value}" for name, value in chosen.items()]
    command = [sys.executable, str(EXAMPLE), *words, f"--instructions={INSTRUCTIONS}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(done.stdout, end="", flush=True)
    return [[float(one) for one in found] for found in LINE.findall(done.stdout)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    values: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)
    with TemporaryDirectory() as scratch:
        model = Path(scratch) / "float32"
        convert_model(DEFAULT_MODEL, None, model, quant_format=None, dtype="float32")
        for name in list(VARIANTS) * options.rounds:
            for kl, cached, speed, seconds in steps_of(model, options, VARIANTS[name]):
                sampled = options.prompts * options.group * options.tokens
                row = {"kl": kl, "step (s)": seconds, "rollouts (s)": sampled / speed}
                for what, value in (row | {"prompt tokens computed": 1 - cached}).items():
                    values[what].setdefault(name, []).append(round(value, 4))
    write_record(options.output, values=values)


if __name__ == "__main__":
    main()
