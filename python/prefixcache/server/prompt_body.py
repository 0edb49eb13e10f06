"""The body of a completion or of a chat, for endpoints that ask about its prompts alone."""

from __future__ import annotations

from prefixcache.server.body import parse_fields, parse_object
from prefixcache.server.chat import chat_job, chat_names
from prefixcache.server.completions import completion_job
from prefixcache.server.context import Call
from prefixcache.server.job_maker import Job, JobMaker, fields_named, parse_prompts
from prefixcache.server.protocol import ChatRequest, CompletionRequest
from prefixcache.token_ids import TokenIds

PromptBody = ChatRequest | tuple[CompletionRequest, list[str | TokenIds]]


def parse_prompt_body(body: bytes) -> PromptBody:
    """The fields of a body, which with `messages` is that of a chat, and a completion's prompts."""
    values = parse_object(body)
    if "messages" in values:
        return parse_fields(values, ChatRequest)
    fields = parse_fields(values, CompletionRequest)
    return fields, parse_prompts(fields.prompt)


async def prompt_job(maker: JobMaker, parsed: PromptBody, size: int, call: Call) -> Job:
    """The requests that the endpoint of the same body would make. `size` is the body's."""
    if not isinstance(parsed, ChatRequest):
        return await completion_job(maker, *parsed, call)
    with fields_named(chat_names(parsed)):
        return await chat_job(maker, parsed, size, call)
