"""Bounds and paces of the HTTP edge."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What the edge allows and how long it waits."""

    max_body_bytes: int = 4 * 1024 * 1024
    default_max_tokens: int = 4096  # of a chat whose client names no maximum; the context may leave less
    default_completion_tokens: int = 16  # the same of a text completion, as OpenAI and vLLM have it
    max_choices: int = 16  # answers to one request (``n``)
    max_logprobs: int = 400_000  # in one answer; some 70 bytes each on the wire
    grammar_timeout_s: float = 10.0  # how long a client's grammar may take to compile
    request_timeout_s: float = 300.0  # every request's deadline
    body_timeout_s: float = 60.0  # how long a body may take to arrive
    long_body_bytes: int = 64 * 1024  # from here on a body waits its turn apart from the short ones
    peek_s: float = 5.0  # how long a stream waits for its first text before it commits to status 200
    keepalive_s: float = 15.0  # silence after which a stream sends a comment
