"""What one request may hold: generous for every honest use, and what keeps it from hurting others.

Each is checked before any work that grows with it. docs/guides/limits.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY_BYTES = 32 * 2**20
MAX_NUMBERS = 2**20
MAX_OTHER_VALUES = 2**16
MAX_MESSAGES = 4096
MAX_SEQUENCES = 4096
MAX_STOP_STRINGS = 1024
MAX_STOP_CHARACTERS = 2**16
MAX_STOP_TOKEN_IDS = 1024
MAX_GRAMMAR_CHARACTERS = 2**18
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 2**14
MAX_MODEL_NAME_CHARACTERS = 1024
MAX_SALT_CHARACTERS = 1024
MAX_PATH_CHARACTERS = 4096
MAX_UNREAD_OUTPUTS = 1024
"""Tokens of a stream that wait for a client who reads slowly, after what the system buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What all requests share, as the operator decided.

    `request_seconds` is the time from a request's head to the last token of its answer (None: any),
    `body_bytes` bounds the bodies that are being read or not yet turned into requests, together
    with the log probabilities that answers keep until they are written.
    """

    request_seconds: float | None = None
    body_bytes: int = 8 * MAX_BODY_BYTES
