"""Which blocks behind a sliding window are evicted first, and which of them last.

A window's blocks are given back as it moves on. Those before an *anchor*, a position at which a
later request is likely to begin, are evicted as others are; the rest before all others. Anchors are

- the last full block before the prompt's last token: the same prompt again. Of a state it ends
  `EARLY_TOKENS` before, as a chat's next turn may differ in the last tokens of a prompt;
- the end of the answer: the next turn of a conversation. The core adds it;
- where the blocks of full attention matched further than the windows could follow: two requests
  share the prompt up to there, so a third one may (`CacheManager.add_junction`);
- where a request that waits parts from the one that computes their prefix (`in_flight.py`);
- every multiple of `interval` tokens;
- the last token that a request may write: what is written can be read from there alone.

Pinned anchors are evicted after everything else. Nothing waits for a pinned block: whoever finds no
other free one takes the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefixcache.config.engine_config import EngineConfig
from prefixcache.core import Sequence as CoreSequence
from prefixcache.kv.specs import GroupKind
from prefixcache.types.request import Request

EARLY_TOKENS = 8
_PREFIX_TOKENS = 25_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What requests leave behind their windows; the flags of `CacheConfig` say what each means.

    `interval` None lets every block be evicted as others are, 0 those of the other anchors alone.
    """

    interval: int | None = 0
    pin: bool = False
    pin_max_share: float = 0.2
    pin_min_drop_size: int = 16
    pin_prefix_blocks: bool = True
    has_states: bool = False

    @classmethod
    def of(cls, config: EngineConfig, groups: Sequence[GroupKind]) -> Retention:
        """What the flags say for a model with groups of these kinds."""
        return cls(
            interval=config.retention_interval(has_full_attention="full" in groups),
            pin=config.cache.pin_swa_tokens,
            pin_max_share=config.cache.pin_max_share,
            pin_min_drop_size=config.cache.pin_min_drop_size,
            pin_prefix_blocks=config.cache.pin_prefix_blocks,
            has_states="state" in groups,
        )

    def apply(self, sequence: CoreSequence, request: Request) -> None:
        """Tells a new sequence its retention, and the anchors that are known when it starts."""
        sequence.set_retention(
            self.interval,
            pin=self.pin and request.cache.write,
            min_pin_blocks=self.pin_min_drop_size,
            pin_prefix=self.pin_prefix_blocks,
        )
        last = len(request.prompt_token_ids) - 1
        sequence.add_prompt_end(max(0, last - EARLY_TOKENS * self.has_states))
        if request.cache.write_upto:
            sequence.add_anchor(request.cache.write_upto)

    def recorded(self) -> dict[str, object]:
        """What a replay of the cache needs of it."""
        return {
            "interval": self.interval,
            "pin": self.pin,
            "min_pin_blocks": self.pin_min_drop_size,
            "pin_prefix": self.pin_prefix_blocks,
        }

    def num_blocks_kept(
        self, num_tokens: int, block_size: int, windows: Sequence[int | None]
    ) -> int:
        """Blocks that a prefix of that many tokens leaves behind, in groups with these windows.

        None stands for full attention.
        """
        full = num_tokens // block_size
        anchors = 1 + (num_tokens // self.interval if self.interval else 0)
        kept = 0
        for window in windows:
            if window is None or self.interval is None:
                kept += full
            else:
                # With one block below the window, for prompts that differ in their last tokens; a
                # state, whose window is 2, has none.
                kept += min(full, anchors * (-(-(window - 1) // block_size) + (window > 2)))
        return kept

    def describe_pins(
        self,
        num_usable_blocks: int,
        block_size: int,
        windows: Sequence[int | None],
        max_model_len: int,
        max_cached_blocks: int | None = None,
    ) -> str:
        """What is pinned, and how many prefixes stay pinned, in one line."""
        every = f", and every {self.interval} tokens" if self.interval else ""
        prefix = self.pin_prefix_blocks and None in windows
        before = ", with the blocks of full attention before them" if prefix else ""
        length = min(_PREFIX_TOKENS, max_model_len)
        pinned = [window for window in windows if prefix or window is not None]
        apart = self.pin_min_drop_size * block_size
        interval = self.interval and self.interval * max(1, -(-apart // self.interval))
        spaced = replace(self, interval=interval)
        each = max(1, spaced.num_blocks_kept(length, block_size, pinned))
        most, limit = int(self.pin_max_share * num_usable_blocks), f"{self.pin_max_share:.0%}"
        if max_cached_blocks is not None and max_cached_blocks < most:
            most, limit = max_cached_blocks, "--prefix-cache-max-blocks"
        tokens = most * length // each if length >= apart else 0
        count = tokens // length
        return (
            f"Pinned: windows where prompts and answers end, where prompts part{every}{before}; at "
            f"most {most} of {num_usable_blocks} blocks ({limit}), which are "
            f"{count} prefix{'es' * (count != 1)} of {length} tokens, {tokens} tokens in all. Pins "
            f"are {apart} tokens apart or more, that of a prompt's end as far from the start. With "
            "more in turns, the oldest are demoted, and evicted as others are."
        )
