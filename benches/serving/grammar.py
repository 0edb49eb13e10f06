"""What grammars cost: steps of two engines in turn, whose answers follow a schema and do not.

`python benches/serving/grammar.py` prints, for each batch and way to sample, the median time of a
decode step of both, and the median of what a guided one takes longer than the plain one beside it;
then the same in time of processors, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator

from prefixcache.config.engine_config import DEFAULT_MODEL, EngineConfig
from prefixcache.engine.build import build
from prefixcache.engine.engine import Engine
from prefixcache.types.request import Request
from prefixcache.types.sampling_params import SamplingParams
from prefixcache.types.structured_output import StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["friend", "colleague", "neighbour"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 200}
Times = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, action="append")
    arguments = parser.parse_args()
    output = StructuredOutput("json", json.dumps(PEOPLE))
    plain, guided = (_engine(arguments.model) for _ in range(2))
    for batch in arguments.batch or [1, 8, 32]:
        for temperature in (0.0, 1.0):
            params = {"temperature": temperature, "max_tokens": arguments.steps + 8}
            pairs = zip(
                _step_times(plain, batch, **params),
                _step_times(guided, batch, structured_output=output, **params),
                strict=True,
            )
            _report(batch, temperature, [*pairs][4 : arguments.steps])


def _engine(model: str) -> Engine:
    flags = {"max_model_len": 1024, "max_num_seqs": 32, "enable_prefix_caching": False}
    return build(EngineConfig.from_flags(model=model, **flags)).engine


def _step_times(engine: Engine, batch: int, **params: object) -> Iterator[Times]:
    """Seconds, on the clock and of processors, of each decode step of `batch` unending answers."""
    for number in range(batch):
        sampling = SamplingParams(seed=number, ignore_eos=True, **params)  # type: ignore[arg-type]
        token_ids = [*range(100 + number, 148 + number)]
        engine.add_request(
            Request(request_id=f"{number}", prompt_token_ids=token_ids, params=sampling)
        )
    num_running = 0
    while engine.has_unfinished():
        begun, used = time.perf_counter(), time.process_time()
        outputs = engine.step()
        seconds = time.perf_counter() - begun, time.process_time() - used
        num_running = max(num_running, len(outputs))
        if num_running == batch:
            yield seconds


def _report(batch: int, temperature: float, pairs: list[tuple[Times, Times]]) -> None:
    for place, name in enumerate(("", " of processors")):
        plain = statistics.median(first[place] for first, _ in pairs)
        guided = statistics.median(second[place] for _, second in pairs)
        more = statistics.median(second[place] / first[place] - 1 for first, second in pairs)
        print(
            f"batch {batch:2}, temperature {temperature}: {plain * 1e3:.2f} ms{name} plain, "
            f"{guided * 1e3:.2f} ms with a schema, {more:+.1%} a token over {len(pairs)} steps"
        )


if __name__ == "__main__":
    main()
