"""Transcripts: what was said, by whom and when; and the token ids a model is fed for it.

    threads = read("artifacts/threads")        # own format, chat JSONL, or transcripts; file or folder
    rendered = render(threads[0], tokenizer)   # ids, message boundaries, which tokens are answers

A *thread* belongs to one *owner* and holds *messages*. Owners are the strongest boundary of every
later split, so one owner has one spelling here, and a thread without an owner gets one of its own,
marked as derived. Dates come from the thread, never from the clock.
"""

from .reading import read
from .records import (
    ASSISTANT,
    ROLES,
    SYSTEM,
    TOOL,
    USER,
    Message,
    Thread,
    ToolCall,
    normalise_owner,
    provenance,
    shared_prompts,
)
from .rendering import Conversation, Rendered, render, render_sequences
from .template import stop_ids, template_digest, tokenizer_digest

__all__ = [
    "ASSISTANT",
    "ROLES",
    "SYSTEM",
    "TOOL",
    "USER",
    "Conversation",
    "Message",
    "Rendered",
    "Thread",
    "ToolCall",
    "normalise_owner",
    "provenance",
    "read",
    "render",
    "render_sequences",
    "shared_prompts",
    "stop_ids",
    "template_digest",
    "tokenizer_digest",
]
