"""How large a request may be so that it can be served to its end."""

from __future__ import annotations

from prefixcache.exceptions import RequestTooLargeError
from prefixcache.kv.cache_manager import CacheManager
from prefixcache.kv.cache_settings import fitting_tokens
from prefixcache.types.request import Request


class Limits:
    """The model's context length, and what the pool holds of one request in all groups.

    At most `max_chunk` tokens of a request are computed in a step. The pool counts with the size
    that it has now, or can return to by itself.
    """

    def __init__(self, cache: CacheManager, max_chunk: int, *, max_model_len: int) -> None:
        self._cache = cache
        self._max_chunk = max_chunk
        self._max_model_len = max_model_len
        self._measured = (cache.size.max_blocks, max_model_len)

    @property
    def max_num_tokens_now(self) -> int:
        """Tokens of the longest sequence that the model and the pool take. From any thread."""
        size = self._cache.size.attainable_blocks
        if size != self._measured[0]:
            most, cache = self._max_model_len, self._cache
            fitting = fitting_tokens(
                size, cache.block_size, cache.groups, chunk=self._max_chunk, most=most
            )
            self._measured = size, fitting
        return self._measured[1]

    def max_num_tokens(self, request: Request) -> int:
        """Prompt and longest answer together.

        Where no answer is wanted one token is sampled all the same, and dropped.
        """
        prompt = len(request.prompt_token_ids)
        if request.params.max_tokens is None:
            return max(self.max_num_tokens_now, min(prompt + 1, self._max_model_len))
        return prompt + max(request.params.max_tokens, 1)

    def check(self, request: Request) -> None:
        """Raises `RequestTooLargeError` when the request could never be served to its end."""
        prompt = len(request.prompt_token_ids)
        output = self.max_num_tokens(request) - prompt
        least = 0 if request.params.max_tokens == 0 else 1
        self._check_context(prompt, output if least else 0, least)
        self._check_blocks(prompt + output - 1)

    def describe_lack(self, num_tokens: int) -> str:
        """Why a request of that many tokens cannot start now."""
        size = self._cache.size
        return (
            f"The request needs {self._most_blocks(num_tokens)} KV cache blocks of "
            f"{self._cache.block_size} tokens for its {num_tokens} tokens, but only "
            f"{size.num_free_blocks} blocks of the cache's {size.num_usable_blocks} "
            "are free."
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether the pool of now holds a request of that many tokens, where it is alone."""
        return self._most_blocks(num_tokens) <= self._cache.size.num_usable_blocks

    def make_room(self, num_tokens: int) -> bool:
        """Whether the pool has grown for a request of that many tokens that alone has no room."""
        return self._cache.size.make_room(self._most_blocks(num_tokens))

    def _check_context(self, prompt: int, output: int, least: int) -> None:
        room = self._max_model_len - prompt
        if room < max(output, least):
            raise RequestTooLargeError(
                f"This model's maximum context length is {self._max_model_len} tokens, but the "
                f"request needs {prompt + max(output, least)}: {prompt} in the prompt and "
                f"{max(output, least)} for the answer.",
                param="prompt" if room < least else "max_tokens",
                code="context_length_exceeded",
            )

    def _check_blocks(self, num_tokens: int) -> None:
        have, need = self._cache.size.attainable_blocks - 1, self._most_blocks(num_tokens)
        if need > have:
            # A group with a window holds the window and the tokens that a step computes.
            smaller = ", or a smaller --max-num-batched-tokens" if self._cache.has_windows else ""
            raise RequestTooLargeError(
                f"The request needs up to {need} KV cache blocks of {self._cache.block_size} "
                f"tokens, but the cache has {have}. Shorten the prompt, lower max_tokens, or "
                f"start with a larger --num-blocks or --kv-cache-memory{smaller}.",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _most_blocks(self, num_tokens: int) -> int:
        return self._cache.core.most_blocks(num_tokens, self._max_chunk)
