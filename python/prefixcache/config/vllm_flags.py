"""vLLM's flags that are none of ours, and its variables: so its command lines, units and uses of
its `LLM` run here too.

What means nothing here, or is done anyway, is accepted; what asks for more is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prefixcache.config.checked import shown
from prefixcache.exceptions import FieldError

KEY_VARIABLE = "VLLM_API_KEY"

_ONE_DEVICE = "asks for more than one device"
_OTHER_KV = "asks for the KV cache in another place"
_OTHER_TYPE = "asks for another type of the KV cache"
_OTHER_GRAMMARS = "asks for another engine of structured output"
_NO_LORA = "asks for LoRA, which is not supported"
_NOT_TEXT = "asks for something else than text"

# Switches that mean nothing here, or what is done anyway.
_IGNORED = """
    --aggregate-engine-logging --async-scheduling --no-async-scheduling --disable-cascade-attn
    --no-disable-cascade-attn --disable-custom-all-reduce --disable-fastapi-docs
    --disable-frontend-multiprocessing --disable-log-requests --no-disable-log-requests
    --disable-log-stats --disable-uvicorn-access-log --enable-auto-tool-choice
    --enable-chunked-prefill --enable-log-requests --no-enable-log-requests
    --enable-prompt-tokens-details --enable-reasoning --enable-request-id-headers
    --enable-sleep-mode --enable-ssl-refresh --no-enable-sleep-mode --multi-step-stream-outputs
    --no-trust-remote-code --no-use-tqdm-on-load --trust-remote-code --use-tqdm-on-load
"""
# Options whose values mean nothing here.
_ANY_VALUE = """
    --compilation-config -O --cudagraph-capture-sizes --h11-max-header-count
    --h11-max-incomplete-event-size --kv-cache-metrics-sample --limit-mm-per-prompt
    --max-cudagraph-capture-size --max-num-partial-prefills --max-long-partial-prefills
    --max-parallel-loading-workers --max-seq-len-to-capture --prefix-caching-hash-algo
    --safetensors-load-strategy --show-hidden-metrics-for-version --stream-interval --swap-space
    --uvicorn-log-level
"""
# Switches that ask for what is not done, by why they are refused.
_REFUSED_SWITCHES = {
    _ONE_DEVICE: """
        --enable-expert-parallel --enable-eplb --data-parallel-hybrid-lb --data-parallel-external-lb
        --headless --enable-dbo
    """,
    _OTHER_TYPE: "--calculate-kv-scales",
    _NO_LORA: "--enable-lora --enable-lora-bias",
    "asks for whole prompts in one step": "--no-enable-chunked-prefill",
    "asks for a model without its windows": "--disable-sliding-window",
    "asks for prompts as embeddings": "--enable-prompt-embeds",
    "asks for usage in every stream": "--enable-force-include-usage",
    "asks for what is not measured": "--enable-server-load-tracking",
    "asks for an endpoint that is not served": "--enable-tokenizer-info-endpoint",
    "asks for another spelling of tokens": "--return-tokens-as-token-ids",
    "asks for a model without a tokenizer": "--skip-tokenizer-init",
    "asks for prompts without the tools that must not be called": (
        "--exclude-tools-when-tool-choice-none"
    ),
}
# Options that are refused with any value, by why.
_REFUSED_OPTIONS = {
    _OTHER_KV: "--kv-transfer-config",
    _NO_LORA: "--lora-modules --max-loras --max-lora-rank --max-cpu-loras",
    "asks for another tokenizer than the model's": "--tokenizer --tokenizer-revision",
    "asks for another configuration than the model's": """
        --hf-config-path --hf-overrides --override-generation-config --rope-scaling --rope-theta
    """,
    "asks for images or audio, which are not supported": """
        --mm-processor-kwargs --allowed-local-media-path --allowed-media-domains --media-io-kwargs
    """,
    "asks for processors of logits": "--logits-processors --logits-processor-pattern",
    "asks for what a proxy in front does": "--root-path --middleware",
    "asks for a log of another form": "--log-config-file",
    "asks for traces": "--collect-detailed-traces",
    "asks for plugins": "--tool-parser-plugin --tool-server --additional-config",
    "asks for another cache of downloads; set HF_HOME": "--download-dir",
}
# Options by their names, the values that each is taken with, and why others are refused.
_SOME_VALUES = {
    "--tensor-parallel-size/-tp": ("1", _ONE_DEVICE),
    "--pipeline-parallel-size/-pp": ("1", _ONE_DEVICE),
    "--data-parallel-size/-dp": ("1", _ONE_DEVICE),
    "--prefill-context-parallel-size/-pcp": ("1", _ONE_DEVICE),
    "--decode-context-parallel-size/-dcp": ("1", _ONE_DEVICE),
    "--nnodes/-n": ("1", _ONE_DEVICE),
    "--api-server-count/-asc": ("1", "asks for several server processes"),
    "--distributed-executor-backend": ("mp uni", _ONE_DEVICE),
    "--node-rank": ("0", _ONE_DEVICE),
    "--data-parallel-rank": ("0", _ONE_DEVICE),
    "--config-format": ("auto hf", "asks for another form of configuration"),
    "--model-impl": ("auto vllm", "asks for another implementation of models"),
    "--task": ("auto generate", _NOT_TEXT),
    "--runner": ("auto generate", _NOT_TEXT),
    "--convert": ("auto none", _NOT_TEXT),
    "--tokenizer-mode": ("auto fast hf", "asks for another tokenizer"),
    "--generation-config": ("auto", "asks for other defaults than the model's"),
    "--kv-cache-dtype": ("auto bfloat16", _OTHER_TYPE),
    "--cpu-offload-gb": ("0", _OTHER_KV),
    "--kv-offloading-size": ("0", _OTHER_KV),
    "--guided-decoding-backend": ("auto guidance", _OTHER_GRAMMARS),
    "--structured-outputs-config.backend": ("auto guidance", _OTHER_GRAMMARS),
    "--chat-template-content-format": ("auto string openai", "asks for another form of content"),
    "--response-role": ("assistant", "asks for another role"),
    "--max-logprobs": (" ".join(map(str, range(21))), "asks for more log probabilities than 20"),
    "--logprobs-mode": ("raw_logprobs", "asks for other log probabilities"),
}


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A flag that sets nothing, by its `names` as options.

    A switch is refused where it has a `why`. A flag that `takes_value` is refused for values
    other than `taken`; None takes any.
    """

    names: tuple[str, ...]
    takes_value: bool = False
    taken: tuple[str, ...] | None = None
    why: str = ""

    def check(self, name: str, value: object) -> None:
        """Raises `FieldError` with the `name` when the value asks for what is not done."""
        if not self.takes_value and not self.why:
            return
        if self.takes_value and (self.taken is None or str(value).lower() in self.taken):
            return
        got = f", got {shown(value)}" if self.takes_value else ""
        only_these = f"; taken is {', '.join(self.taken)}" if self.taken else ""
        refused = "" if only_these or "not" in self.why.split() else ", which is not supported"
        raise FieldError(name, f"{self.why}{refused}{only_these}{got}.")


def vllm_flags() -> Iterator[VllmFlag]:
    """All options of `vllm serve` that `serve` does not have itself."""
    for name in _IGNORED.split():
        yield VllmFlag((name,))
    for name in _ANY_VALUE.split():
        yield VllmFlag((name,), takes_value=True)
    for why, switches in _REFUSED_SWITCHES.items():
        for name in switches.split():
            yield VllmFlag((name,), why=why)
    for why, options in _REFUSED_OPTIONS.items():
        for names in options.split():
            yield VllmFlag(tuple(names.split("/")), takes_value=True, taken=(), why=why)
    for names, (taken, why) in _SOME_VALUES.items():
        values = tuple(taken.split())
        yield VllmFlag(tuple(names.split("/")), takes_value=True, taken=values, why=why)


def unused_variables(api_keys: Collection[str]) -> list[str]:
    """The variables of vLLM that are set and change nothing on a server with these keys."""
    names = (name for name in sorted(os.environ) if name.startswith("VLLM_"))
    return [name for name in names if name != KEY_VARIABLE or os.environ[name] not in api_keys]


def without_vllm_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's `LLM` that are none of its flags; None counts as not given.

    Raises `FieldError` for a flag that asks for what is not done.
    """
    known = {one.names[0]: one for one in vllm_flags()}
    own = dict[str, Any]()
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if option not in known:
            own[name] = value
        elif value is False and not known[option].takes_value:
            option = f"--no-{option[2:]}"
        if option in known and value is not None:
            known[option].check(name, value)
    return own
