"""What the names of a checkpoint's tensors mean to a model that reads text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prefixcache.config.families import FAMILIES
from prefixcache.config.model_config import ModelConfig
from prefixcache.models.fused import RowOrder

# Where the text model stands in a checkpoint that sees or hears too, older and newer spelling.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_SENSES = (
    *("vision_tower", "multi_modal_projector", "visual", "embed_vision"),
    *("audio_tower", "embed_audio"),
)
_SENSE_PREFIXES = tuple(f"{prefix}{part}." for prefix in ("", "model.") for part in _SENSES)
# Layers that guess several tokens.
_GUESSING_PREFIX = "mtp."
# Of a checkpoint that was saved without what makes tokens of it, as embedding models are.
_BARE_PREFIXES = {part: f"model.{part}" for part in ("layers.", "embed_tokens.", "norm.")}


class TensorNames:
    """Which of a model's tensors a name in a checkpoint stands for.

    `fused_experts` says how a tensor of all experts of a layer holds them.
    """

    def __init__(self, config: ModelConfig) -> None:
        rotary = {
            f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)
        }
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set[str]()
        unread = {name for i in range(config.num_layers) for name in _unread(config, i)}
        self._copies = frozenset(rotary | tied | unread | {"model.rotary_emb.inv_freq"})
        self._sees_images = FAMILIES[config.architecture].sees_images
        self._renamed = FAMILIES[config.architecture].renamed
        self.fused_experts: RowOrder = FAMILIES[config.architecture].fused_experts

    def own(self, name: str) -> str | None:
        """The model's own name of a tensor, whether it has one of it or not.

        None for what it does not read: parts that see, hear or guess, copies of what is known
        already, and keys and values of layers that read those of another.
        """
        if self._sees_images:
            if name.startswith((*_SENSE_PREFIXES, _GUESSING_PREFIX)):
                return None
            name = _renamed(name, _TEXT_PREFIXES)
        name = _renamed(name, _BARE_PREFIXES)
        for part, own in self._renamed.items():
            name = name.replace(part, own)
        return None if name in self._copies else name


def _unread(config: ModelConfig, layer: int) -> Iterator[str]:
    if config.kv_owner(layer) != layer:
        for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
            yield f"model.layers.{layer}.self_attn.{part}.weight"


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    for prefix, own in prefixes.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
