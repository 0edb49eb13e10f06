"""Options of `vllm serve` that are no flags of ours: so its command lines start here too.

What means nothing here, or is done anyway, is accepted; what asks for more is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
from click.core import ParameterSource

from prefixcache.config.checked import shown
from prefixcache.exceptions import FieldError

_ONE_DEVICE = "asks for more than one device"
_NO_LORA = "asks for LoRA, which is not supported"
_OTHER_KV = "asks for the KV cache in another place"
_NO_IMAGES = "asks for images or audio, which are not supported"
_OTHER_CONFIG = "asks for another configuration than the model's"
_OTHER_TOKENIZER = "asks for another tokenizer than the model's"
_OTHER_TYPE = "asks for another type of the KV cache"
_NO_PLUGINS = "asks for plugins"
_OTHER_GRAMMARS = "asks for another engine of structured output"
_NOT_TEXT = "asks for something else than text"
_NO_PROCESSORS = "asks for processors of logits"
_BY_A_PROXY = "asks for what a proxy in front does"

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
# Switches that ask for what is not done, and why each is refused.
_REFUSED = {
    "--enable-expert-parallel": _ONE_DEVICE,
    "--enable-eplb": _ONE_DEVICE,
    "--data-parallel-hybrid-lb": _ONE_DEVICE,
    "--data-parallel-external-lb": _ONE_DEVICE,
    "--headless": _ONE_DEVICE,
    "--enable-dbo": _ONE_DEVICE,
    "--calculate-kv-scales": _OTHER_TYPE,
    "--no-enable-chunked-prefill": "asks for whole prompts in one step",
    "--disable-sliding-window": "asks for a model without its windows",
    "--enable-lora": _NO_LORA,
    "--enable-lora-bias": _NO_LORA,
    "--enable-prompt-embeds": "asks for prompts as embeddings",
    "--enable-force-include-usage": "asks for usage in every stream",
    "--enable-server-load-tracking": "asks for what is not measured",
    "--enable-tokenizer-info-endpoint": "asks for an endpoint that is not served",
    "--return-tokens-as-token-ids": "asks for another spelling of tokens",
    "--skip-tokenizer-init": "asks for a model without a tokenizer",
    "--exclude-tools-when-tool-choice-none": (
        "asks for prompts without the tools that must not be called"
    ),
}
# Options by their names, the values that each is taken with, and why others are refused.
_ONLY = {
    "--tensor-parallel-size -tp": ("1", _ONE_DEVICE),
    "--pipeline-parallel-size -pp": ("1", _ONE_DEVICE),
    "--data-parallel-size -dp": ("1", _ONE_DEVICE),
    "--prefill-context-parallel-size -pcp": ("1", _ONE_DEVICE),
    "--decode-context-parallel-size -dcp": ("1", _ONE_DEVICE),
    "--nnodes -n": ("1", _ONE_DEVICE),
    "--api-server-count -asc": ("1", "asks for several server processes"),
    "--distributed-executor-backend": ("mp uni", _ONE_DEVICE),
    "--node-rank": ("0", _ONE_DEVICE),
    "--data-parallel-rank": ("0", _ONE_DEVICE),
    "--config-format": ("auto hf", "asks for another form of configuration"),
    "--model-impl": ("auto vllm", "asks for another implementation of models"),
    "--task": ("auto generate", _NOT_TEXT),
    "--runner": ("auto generate", _NOT_TEXT),
    "--convert": ("auto none", _NOT_TEXT),
    "--tokenizer-mode": ("auto fast hf", "asks for another tokenizer"),
    "--tokenizer": ("", _OTHER_TOKENIZER),
    "--tokenizer-revision": ("", _OTHER_TOKENIZER),
    "--hf-config-path": ("", _OTHER_CONFIG),
    "--hf-overrides": ("", _OTHER_CONFIG),
    "--override-generation-config": ("", _OTHER_CONFIG),
    "--rope-scaling": ("", _OTHER_CONFIG),
    "--rope-theta": ("", _OTHER_CONFIG),
    "--generation-config": ("auto", "asks for other defaults than the model's"),
    "--kv-cache-dtype": ("auto bfloat16", _OTHER_TYPE),
    "--cpu-offload-gb": ("0", _OTHER_KV),
    "--kv-offloading-size": ("0", _OTHER_KV),
    "--kv-transfer-config": ("", _OTHER_KV),
    "--speculative-config -sc": ("", "asks for speculative decoding"),
    "--lora-modules": ("", _NO_LORA),
    "--max-loras": ("", _NO_LORA),
    "--max-lora-rank": ("", _NO_LORA),
    "--max-cpu-loras": ("", _NO_LORA),
    "--mm-processor-kwargs": ("", _NO_IMAGES),
    "--allowed-local-media-path": ("", _NO_IMAGES),
    "--allowed-media-domains": ("", _NO_IMAGES),
    "--media-io-kwargs": ("", _NO_IMAGES),
    "--guided-decoding-backend": ("auto guidance", _OTHER_GRAMMARS),
    "--structured-outputs-config.backend": ("auto guidance", _OTHER_GRAMMARS),
    "--chat-template-content-format": ("auto string openai", "asks for another form of content"),
    "--response-role": ("assistant", "asks for another role"),
    "--chat-template": ("", "asks for another chat template than the model's"),
    "--max-logprobs": (" ".join(map(str, range(21))), "asks for more log probabilities than 20"),
    "--logprobs-mode": ("raw_logprobs", "asks for other log probabilities"),
    "--logits-processors": ("", _NO_PROCESSORS),
    "--logits-processor-pattern": ("", _NO_PROCESSORS),
    "--root-path": ("", _BY_A_PROXY),
    "--middleware": ("", _BY_A_PROXY),
    "--log-config-file": ("", "asks for a log of another form"),
    "--collect-detailed-traces": ("", "asks for traces"),
    "--tool-parser-plugin": ("", _NO_PLUGINS),
    "--tool-server": ("", _NO_PLUGINS),
    "--additional-config": ("", _NO_PLUGINS),
    "--download-dir": ("", "asks for another cache of downloads; set HF_HOME"),
}


class VllmOption(click.Option):
    """A hidden option that sets nothing, under its names in vLLM.

    A switch is refused where it has a `why`. An option that `takes_value` is refused for values
    other than `taken`; None takes any.
    """

    def __init__(
        self,
        *names: str,
        takes_value: bool = False,
        taken: tuple[str, ...] | None = None,
        why: str = "",
    ) -> None:
        name = names[0].lstrip("-").replace("-", "_").replace(".", "_")
        value_type = click.UNPROCESSED if takes_value else bool
        super().__init__(
            [f"foreign_{name}", *names], hidden=True, is_flag=not takes_value, type=value_type
        )
        self._takes_value = takes_value
        self._taken = taken
        self._why = why

    def refuse(self, ctx: click.Context) -> None:
        """Raises `FieldError` when the option was given and asks for what is not done."""
        name = self.name or ""
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            return
        value = ctx.params[name]
        if not self._takes_value and not self._why:
            return
        if self._takes_value and (self._taken is None or str(value).lower() in self._taken):
            return
        got = f", got {shown(value)}" if self._takes_value else ""
        only_these = f"; taken is {', '.join(self._taken)}" if self._taken else ""
        raise FieldError(self.opts[0], f"{self._why}{only_these}{got}.")


def vllm_options() -> Iterator[VllmOption]:
    """All of them."""
    for name in _IGNORED.split():
        yield VllmOption(name)
    for name in _ANY_VALUE.split():
        yield VllmOption(name, takes_value=True)
    for name, why in _REFUSED.items():
        yield VllmOption(name, why=why)
    for names, (taken, why) in _ONLY.items():
        yield VllmOption(*names.split(), takes_value=True, taken=tuple(taken.split()), why=why)
