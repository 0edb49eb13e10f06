"""The command `prefixcache rerun`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from prefixcache.cli.command_line import Given
from prefixcache.config.checked import shown
from prefixcache.config.engine_config import EngineConfig
from prefixcache.config.logs import set_up_logging
from prefixcache.exceptions import FieldError, InvalidRequestError, PrefixCacheError
from prefixcache.tools.results import check_can_read

if TYPE_CHECKING:
    from prefixcache.engine.build import BuiltEngine
    from prefixcache.kv.recordings.request_records import WholeAnswer

_Record = Mapping[str, Any]
# Flags by what a record calls them.
_FLAGS = {
    "model": "model",
    "revision": "revision",
    "dtype": "dtype",
    "kv_dtype": "kv_cache_dtype",
    "activations": "cpu_activations",
    "instructions": "cpu_instructions",
    "max_model_len": "max_model_len",
}


def rerun(given: Given) -> None:
    """Repeat recorded requests and compare answers.

    They are compared bit for bit. RECORD is a file of --record-requests; ID is the id of a request,
    or its part before a dash. Model and arithmetic are those of the record unless a flag changes
    them. The command fails if an answer differs or cannot be compared.
    """
    path, ids = given.values["record"], given.values["ids"]
    check_can_read("RECORD", path)
    about, records = _read(path)
    about = {"kv_dtype": about.get("dtype"), **about}  # older records do not tell it
    chosen = _chosen(records, ids)
    about = {"activations": "exact", **about}  # as all were before they had a name
    flags = {flag: about.get(name) for name, flag in _FLAGS.items()}
    flags = {flag: value for flag, value in flags.items() if value is not None}
    if flags.get("kv_cache_dtype") != "int8":
        flags.pop("kv_cache_dtype", None)  # it follows --dtype, which may be another one now
    _check_instructions(flags.get("cpu_instructions"))
    config = given.make(EngineConfig, **flags)
    set_up_logging("warning")
    from prefixcache.engine.build import build

    same = 0
    for record, outcome in _outcomes(build(config), about, chosen):
        same += outcome.startswith("same")
        click.echo(f"{record['id']}: {outcome}")
    click.echo(f"{same} of {len(chosen)} are the same.")
    sys.exit(same < len(chosen))


def _read(path: Path) -> tuple[_Record, list[dict[str, Any]]]:
    from prefixcache.kv.recordings.request_records import read_records

    try:
        return read_records(path)
    except ValueError as error:
        raise FieldError("RECORD", f"{path} cannot be used: {error}.") from None


def _chosen(records: Sequence[_Record], ids: Sequence[str]) -> list[_Record]:
    """Raises `FieldError` for an id that no request has."""
    for wanted in ids:
        if not any(_is_of(record, wanted) for record in records):
            raise FieldError("ID", f"{shown(wanted)} is not in the record.")
    return [
        record for record in records if not ids or any(_is_of(record, wanted) for wanted in ids)
    ]


def _is_of(record: _Record, wanted: str) -> bool:
    return record["id"] == wanted or record["id"].startswith(f"{wanted}-")


def _check_instructions(name: str | None) -> None:
    from prefixcache._core import Cpu

    if name is not None and name not in Cpu.available_instructions():
        raise PrefixCacheError(
            f"The record was made with the instructions {name}, which this processor does not have."
        )


def _outcomes(
    built: BuiltEngine, about: _Record, records: Sequence[_Record]
) -> Iterator[tuple[_Record, str]]:
    """What came of each request: "same ...", "differs: ..." or "cannot be rerun: ..."."""
    answers = [
        _why_not(built, about, record) or _add(built, record, str(place))
        for place, record in enumerate(records)
    ]
    while built.engine.has_unfinished():
        for output in built.engine.step():
            answer = answers[int(output.request_id)]
            assert not isinstance(answer, str)
            answer.push(output)
    is_other = about["program"] != built.arithmetic["program"]
    hint = "; another build of prefixcache made the record" if is_other else ""
    for record, answer in zip(records, answers, strict=True):
        if isinstance(answer, str):
            yield record, f"cannot be rerun: {answer}"
        elif (difference := _difference(record, answer)) is not None:
            yield record, f"differs: {difference}{hint}"
        else:
            num_tokens, num_scores = len(record["tokens"]), len(record["logprobs"])
            yield record, f"same, {num_tokens} tokens, {num_scores} log probabilities"


def _why_not(built: BuiltEngine, about: _Record, record: _Record) -> str | None:
    """Why the answer is no function of the request, the weights and the arithmetic of now."""
    for name, now in built.arithmetic.items():
        if name != "program" and about.get(name) != now:
            return f"its {name} was {about.get(name)}, and is {now} here"
    name, here = str(record["weights"]), built.engine.control.weights_name
    if not built.batch_invariant:
        return "its bits depended on what else was computed at the time (batch_invariant is off)"
    if record["mixed"]:
        return "its weights were replaced while it was computed"
    if record["staleness"]:
        return "it hit what older weights had computed"
    if record["params"]["max_tokens"] != 0 and not (record["tokens"] or record["prompt_logprobs"]):
        return f"it ended before its first token ({record['finish']})"
    if name != here:
        if "blake3:" not in name:
            return f"only {name!r} names its weights, and no digest"
        return f"its weights were {name}, and are {here} here: --model takes others"
    return None


def _add(built: BuiltEngine, record: _Record, request_id: str) -> WholeAnswer | str:
    """Asks a request again, for as many tokens as it had; its answer, or why there is none."""
    from prefixcache.kv.recordings.request_records import PARAMS, WholeAnswer
    from prefixcache.types.request import Request

    params, count = PARAMS.validate_python(record["params"]), len(record["tokens"])
    params = replace(params, max_tokens=count, min_tokens=min(params.min_tokens, count))
    try:
        built.engine.add_request(
            Request(request_id=request_id, prompt_token_ids=record["prompt"], params=params)
        )
    except InvalidRequestError as error:
        return str(error)
    return WholeAnswer()


def _difference(record: _Record, again: WholeAnswer) -> str | None:
    """The first one, in words."""
    kinds = {"token": "tokens", "log probability": "logprobs", "prompt's": "prompt_logprobs"}
    for kind, name in kinds.items():
        was: list[Any] = record[name] or []
        now: list[Any] = getattr(again, name) or []
        for place, pair in enumerate(zip(was, now, strict=False)):
            if repr(pair[0]) != repr(pair[1]):  # tells -0.0 from 0.0, and NaN from nothing
                return f"{kind} {place} is {pair[1]}, and was {pair[0]}"
        if len(was) != len(now):
            return f"{len(now)} {name}, and there were {len(was)}"
    if record["finish"] in ("stop", "length") and record["finish"] != again.finish:
        return f"it ended by {again.finish}, and had by {record['finish']}"
    return None
