"""vLLM's flags that are none of ours, and its variables: so its command lines, units and uses of
its `LLM` run here too.

What means nothing here, or is done anyway, is accepted; what asks for more is refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from prefixcache.config.checked import shown
from prefixcache.config.flags import closest
from prefixcache.exceptions import FieldError

KEY_VARIABLE = "VLLM_API_KEY"

_ONE_DEVICE = "asks for more than one device"
_OTHER_KV = "asks for the KV cache in another place"
_OTHER_WEIGHTS = "asks for weights in another place"
_OTHER_TYPE = "asks for another type of the KV cache"
_OTHER_GRAMMARS = "asks for another engine of structured output"
_NO_LORA = "asks for LoRA, which is not supported"
_NOT_TEXT = "asks for something else than text"
_NO_IMAGES = "asks for images or audio, which are not supported"
_NOT_MEASURED = "asks for what is not measured"
_PLUGINS = "asks for plugins"

# Switches that mean nothing here, or what is done anyway.
_IGNORED = """
    --aggregate-engine-logging --allow-deprecated-quantization --async-scheduling
    --disable-cascade-attn --disable-chunked-mm-input --disable-custom-all-reduce
    --disable-fastapi-docs --disable-frontend-multiprocessing --disable-hybrid-kv-cache-manager
    --disable-log-requests --disable-log-stats --disable-nccl-for-dp-synchronization
    --disable-uvicorn-access-log --enable-auto-tool-choice --enable-chunked-prefill
    --enable-flashinfer-autotune --enable-log-requests --enable-offline-docs
    --enable-prompt-tokens-details --enable-reasoning --enable-request-id-headers
    --enable-sleep-mode --enable-ssl-refresh --fail-on-environ-validation --interleave-mm-strings
    --kv-sharing-fast-prefill --language-model-only --log-error-stack --multi-step-stream-outputs
    --skip-mm-profiling --trust-remote-code --use-tqdm-on-load
"""
# Options whose values mean nothing here, or not with one device.
_ANY_VALUE = """
    --all2all-backend --code-revision --compilation-config/-cc -O --cp-kv-cache-interleave-size
    --cpu-distributed-timeout-seconds --cpu-offload-params --cudagraph-capture-sizes
    --data-parallel-address/-dpa --data-parallel-backend/-dpb --data-parallel-rpc-port/-dpp
    --dbo-decode-token-threshold --dbo-prefill-token-threshold --dcp-comm-backend
    --dcp-kv-cache-interleave-size --disable-access-log-for-endpoints
    --distributed-timeout-seconds --eplb-config --expert-placement-strategy
    --h11-max-header-count --h11-max-incomplete-event-size --ignore-patterns --kernel-config
    --kv-cache-metrics-sample --kv-offloading-backend --limit-mm-per-prompt
    --long-prefill-token-threshold --mamba-cache-mode --master-addr --master-port
    --max-cudagraph-capture-size --max-num-partial-prefills --max-long-partial-prefills
    --max-parallel-loading-workers --max-seq-len-to-capture --mm-encoder-attn-backend
    --mm-encoder-tp-mode --mm-processor-cache-gb --mm-processor-cache-type
    --mm-shm-cache-max-object-size-mb --model-loader-extra-config --moe-backend --offload-backend
    --offload-num-in-group --offload-params --offload-prefetch-step --optimization-level
    --performance-mode --prefix-caching-hash-algo --pt-load-map-location
    --safetensors-load-strategy --show-hidden-metrics-for-version --stream-interval --swap-space
    --ubatch-size --uvicorn-log-level --video-pruning-rate
"""
# Switches that ask for what is not done, by why they are refused.
_REFUSED_SWITCHES = {
    _ONE_DEVICE: """
        --enable-expert-parallel/-ep --enable-elastic-ep --enable-eplb --enable-fault-tolerance
        --data-parallel-hybrid-lb/-dph --data-parallel-external-lb/-dpe --headless --enable-dbo
    """,
    _OTHER_TYPE: "--calculate-kv-scales",
    _NO_LORA: """
        --enable-lora --enable-lora-bias --enable-tower-connector-lora --fully-sharded-loras
        --specialize-active-lora
    """,
    _NO_IMAGES: "--enable-mm-embeds --mm-encoder-only",
    _NOT_MEASURED: """
        --cudagraph-metrics --enable-layerwise-nvtx-tracing --enable-mfu-metrics
        --enable-server-load-tracking --ray-workers-use-nsight
    """,
    "asks for whole prompts in one step": "--no-enable-chunked-prefill",
    "asks for a model without its windows": "--disable-sliding-window",
    "asks for prompts as embeddings": "--enable-prompt-embeds",
    "asks for the experts of each token": "--enable-return-routed-experts",
    "asks for usage in every stream": "--enable-force-include-usage",
    "asks for more in the log": """
        --enable-log-deltas --enable-log-outputs --enable-logging-iteration-details
    """,
    "asks for an endpoint that is not served": "--enable-tokenizer-info-endpoint --tokens-only",
    "asks for another spelling of tokens": "--return-tokens-as-token-ids",
    "asks for a model without a tokenizer": "--skip-tokenizer-init",
    "asks for chat templates of clients": "--trust-request-chat-template",
    "asks for prompts without the tools that must not be called": (
        "--exclude-tools-when-tool-choice-none"
    ),
}
# Options that are refused with any value, by why.
_REFUSED_OPTIONS = {
    _OTHER_KV: "--kv-transfer-config",
    _ONE_DEVICE: "--fault-tolerance-config",
    _NO_LORA: """
        --default-mm-loras --lora-dtype --lora-modules --max-cpu-loras --max-lora-rank --max-loras
    """,
    _NOT_TEXT: "--ec-transfer-config --pooler-config",
    _NOT_MEASURED: "--profiler-config",
    _PLUGINS: """
        --additional-config --io-processor-plugin --reasoning-parser-plugin --scheduler-cls
        --tool-parser-plugin --tool-server --worker-extension-cls
    """,
    "asks for another tokenizer than the model's": "--tokenizer --tokenizer-revision",
    "asks for another configuration than the model's": """
        --hf-config-path --hf-overrides --override-attention-dtype --override-generation-config
        --rope-scaling --rope-theta
    """,
    "asks for other markers of reasoning than the model's": "--reasoning-config",
    "names what is not known here: give --attention": "--attention-backend --attention-config/-ac",
    "names what is not known here: give --state-block-size": "--mamba-block-size",
    _NO_IMAGES: """
        --mm-processor-kwargs --allowed-local-media-path --allowed-media-domains --media-io-kwargs
    """,
    "asks for processors of logits": "--logits-processors --logits-processor-pattern",
    "asks for another way of weight updates": "--weight-transfer-config",
    "asks for what a proxy in front does": "--root-path --middleware --ssl-ciphers",
    "asks for a log of another form": "--log-config-file",
    "asks for traces": "--collect-detailed-traces",
    "asks for another cache of downloads; set HF_HOME": "--download-dir",
}
# Options by their names, the values that each is taken with, and why others are refused.
_SOME_VALUES = {
    "--tensor-parallel-size/-tp": ("1", _ONE_DEVICE),
    "--pipeline-parallel-size/-pp": ("1", _ONE_DEVICE),
    "--data-parallel-size/-dp": ("1", _ONE_DEVICE),
    "--data-parallel-size-local/-dpl": ("1", _ONE_DEVICE),
    "--prefill-context-parallel-size/-pcp": ("1", _ONE_DEVICE),
    "--decode-context-parallel-size/-dcp": ("1", _ONE_DEVICE),
    "--nnodes/-n": ("1", _ONE_DEVICE),
    "--api-server-count/-asc": ("1", "asks for several server processes"),
    "--distributed-executor-backend": ("mp uni", _ONE_DEVICE),
    "--node-rank/-r": ("0", _ONE_DEVICE),
    "--data-parallel-rank/-dpn": ("0", _ONE_DEVICE),
    "--data-parallel-start-rank/-dpr": ("0", _ONE_DEVICE),
    "--config-format": ("auto hf", "asks for another form of configuration"),
    "--model-impl": ("auto vllm", "asks for another implementation of models"),
    "--task": ("auto embed generate", _NOT_TEXT),
    "--runner": ("auto generate pooling", _NOT_TEXT),
    "--convert": ("auto embed none", _NOT_TEXT),
    "--tokenizer-mode": ("auto fast hf", "asks for another tokenizer"),
    "--generation-config": ("auto", "asks for other defaults than the model's"),
    "--mamba-cache-dtype": ("auto", _OTHER_TYPE),
    "--mamba-ssm-cache-dtype": ("auto", _OTHER_TYPE),
    "--cpu-offload-gb": ("0", _OTHER_WEIGHTS),
    "--offload-group-size": ("0", _OTHER_WEIGHTS),
    "--kv-offloading-size": ("0", _OTHER_KV),
    "--guided-decoding-backend": ("auto guidance", _OTHER_GRAMMARS),
    "--chat-template-content-format": ("auto string openai", "asks for another form of content"),
    "--response-role": ("assistant", "asks for another role"),
    "--worker-cls": ("auto", _PLUGINS),
    "--max-logprobs": (" ".join(map(str, range(21))), "asks for more log probabilities than 20"),
    "--logprobs-mode": ("raw_logprobs", "asks for other log probabilities"),
}
# JSON objects, by the values that each key is taken with, and why others are refused.
_OBJECTS = {
    "--structured-outputs-config": {
        "backend": ("auto guidance", _OTHER_GRAMMARS),
        "disable_fallback": ("true false", _OTHER_GRAMMARS),
        "disable_any_whitespace": ("false", "asks for JSON without white space"),
        "disable_additional_properties": ("false", "asks for schemas without other properties"),
        "enable_in_reasoning": ("false", "asks for a grammar of the reasoning"),
        "reasoning_parser": ("", "is not read: give --reasoning-parser"),
        "reasoning_parser_plugin": ("", _PLUGINS),
    },
}


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A flag that sets nothing, by its `names` as options.

    A switch is refused where it has a `why`. A flag that `takes_value` is refused for values
    other than `taken`; None takes any. One with `keys` takes a JSON object, and each of its values
    is checked.
    """

    names: tuple[str, ...]
    takes_value: bool = False
    taken: tuple[str, ...] | None = None
    why: str = ""
    keys: Mapping[str, VllmFlag] | None = None

    def check(self, name: str, value: object) -> None:
        """Raises `FieldError` with the `name` when the value asks for what is not done."""
        for key, part in self._parts(name, value).items():
            self._key(name, key).check(f"{name}.{key}", part)
        if not self.takes_value and not self.why:
            return
        if self.takes_value and (self.taken is None or str(value).lower() in self.taken):
            return
        got = f", got {shown(value)}" if self.takes_value else ""
        only_these = ""
        if self.taken:
            verb = "is" if len(self.taken) == 1 else "are"
            only_these = f"; only {', '.join(self.taken)} {verb} supported"
        refused = "" if only_these or "not" in self.why.split() else ", which is not supported"
        raise FieldError(name, f"{self.why}{refused}{only_these}{got}.")

    def _parts(self, name: str, value: object) -> Mapping[str, object]:
        if self.keys is None:
            return {}
        with suppress(ValueError, RecursionError):
            value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise FieldError(name, f"must be a JSON object, got {shown(value)}.")
        return cast("Mapping[str, object]", value)

    def _key(self, name: str, key: str) -> VllmFlag:
        keys = self.keys or {}
        if key not in keys:
            hint = closest(key, keys) or f": its keys are {', '.join(keys)}"
            raise FieldError(name, f"has no key {shown(key)}{hint}")
        return keys[key]


def vllm_flags() -> Iterator[VllmFlag]:
    """All options of `vllm serve` that `serve` does not have itself."""
    why_switches = {"": _IGNORED, **_REFUSED_SWITCHES}
    switches = {name: why for why, names in why_switches.items() for name in names.split()}
    # What a switch asks for by --no is what is done here, but for the one that is refused above.
    negated = (f"--no-{name.partition('/')[0][2:]}" for name in switches)
    for names, why in (dict.fromkeys(negated, "") | switches).items():
        yield VllmFlag(_split(names), why=why)
    for names in _ANY_VALUE.split():
        yield VllmFlag(_split(names), takes_value=True)
    for why, options in _REFUSED_OPTIONS.items():
        for names in options.split():
            yield VllmFlag(_split(names), takes_value=True, taken=(), why=why)
    for names, rule in _SOME_VALUES.items():
        yield _of_some_values(names, *rule)
    for names, rules in _OBJECTS.items():
        keys = {key: _of_some_values(key, *rule) for key, rule in rules.items()}
        yield VllmFlag(_split(names), takes_value=True, keys=keys)


def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split("/"))


def _of_some_values(names: str, taken: str, why: str) -> VllmFlag:
    return VllmFlag(_split(names), takes_value=True, taken=tuple(taken.split()), why=why)


def unused_variables(api_keys: Collection[str]) -> list[str]:
    """The variables of vLLM that are set and change nothing on a server with these keys."""
    names = (name for name in sorted(os.environ) if name.startswith("VLLM_"))
    return [name for name in names if name != KEY_VARIABLE or os.environ[name] not in api_keys]


def without_vllm_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM's `LLM` that are none of its flags; None counts as not given.

    Raises `FieldError` for a flag that asks for what is not done.
    """
    flags = {flag.names[0]: flag for flag in vllm_flags()}
    own = dict[str, Any]()
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if option not in flags:
            own[name] = value
        elif value is False and not flags[option].takes_value:
            option = f"--no-{option[2:]}"
        if option in flags and value is not None:
            flags[option].check(name, value)
    return own
