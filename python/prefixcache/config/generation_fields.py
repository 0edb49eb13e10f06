"""What becomes of each field of a generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OBEYED = frozenset(
    (
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"),
        *("eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
    )
)
"""Fields that act; those of sampling where a request sets none."""

NOT_OBEYED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints"), ((),)),
    **dict.fromkeys(("sequence_bias", "stop_strings"), ((), {}, "")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), ()),
    "dola_layers": (),
}
"""Fields that would change answers, each with the values, next to null, that change none."""

WITHOUT_EFFECT = frozenset(
    (
        # Requests choose these, or other files of the model.
        *("do_sample", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
        *("max_length", "min_length", "min_new_tokens", "max_time", "num_return_sequences"),
        # Other ways to search or to sample.
        *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"),
        *("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "penalty_alpha", "token_healing"),
        *("renormalize_logits", "remove_invalid_values", "low_memory"),
        # How quickly transformers computes, and what it returns.
        *("use_cache", "cache_config", "cache_implementation", "max_cache_len"),
        "prefill_chunk_size",
        *("compile_config", "disable_compile", "continuous_batching_config"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"),
        *("assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens"),
        *("max_matching_ngram_size", "speculation_type", "use_mtp"),
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
        *("return_dict_in_generate", "transformers_version", "_from_model_config"),
    )
)
"""Fields that change nothing here."""


def not_obeyed(source: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of `NOT_OBEYED` that a generation_config.json sets to change answers."""
    values = {name: source.get(name) for name in NOT_OBEYED}
    values = {name: () if value == [] else value for name, value in values.items()}
    return tuple(name for name, value in values.items() if value not in (None, *NOT_OBEYED[name]))
