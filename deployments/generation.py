"""The seam between the edges (HTTP, gRPC) and the router.

An edge parses what a client sent into a ``Generation`` and reads ``Event``s back; the router implements
``Backend``. What has not been validated and tokenised is another type, so it cannot get in. Nothing here
knows JSON, sockets or Ray.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NewType, Protocol

from deployments.telemetry import Snapshot
from deployments.view import Overview
from dflash_core.checkpoints.fields import Fields
from dflash_core.events import TokenLogprobs
from dflash_core.request import RowId, Sampling
from dflash_core.text.stream import Piece

GenerationId = NewType("GenerationId", str)


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the client wants its answer; without influence on which tokens come."""

    stream: bool = False
    include_usage: bool = False  # a last chunk with the usage
    continuous_usage: bool = False  # running usage in every chunk
    return_token_ids: bool = False
    rounds: bool = False  # what each round drafted, walked and accepted, and which tokens are which


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that can be played: validated, tokenised, every default filled in."""

    id: GenerationId  # unique; also the ``id`` of the answer
    model: str  # the served name or alias that the client used
    prompt_ids: tuple[int, ...]  # at least one; together with max_tokens it fits the context
    max_tokens: int  # at least one, or none if nothing but the prompt is asked for
    sampling: Sampling  # the seed is drawn already if the client gave none
    stop_token_ids: frozenset[int]  # the model's own end tokens are in, unless the client ignores them
    stop_strings: tuple[str, ...]  # none is empty; not part of the text that comes back
    deadline_s: float  # seconds that the request may take, from its arrival
    delivery: Delivery = field(default_factory=Delivery)
    request_id: str = ""  # the client's or our correlation id, for logs and spans
    client: str = ""  # whose it is, to be fair between clients: a key's name, else the peer's address
    num_choices: int = 1  # answers, each a row with a seed of its own
    num_top_logprobs: int | None = None  # likeliest tokens to tell beside each; None: no log-probabilities
    echo: str | None = None  # the prompt's text, if the answer is to begin with it
    save_at: tuple[int, ...] = ()  # lengths of the prompt that another one may share: its message boundaries
    num_continued: int = 0  # of the last prompt_ids: an answer begun elsewhere, which goes on here
    grammar: str | None = None  # what every answer must be, in llguidance's own form
    grammar_param: str | None = None  # the field of the request that says so
    via: tuple[str, ...] = ()  # clusters whose routers passed it on to here; none: it is a client's

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's tokens are to be told as the answer's."""
        return self.echo is not None and self.num_top_logprobs is not None

    def row_id(self, index: int = 0) -> RowId:
        """The name that the row of a choice has in every window."""
        return RowId(f"{self.id}.{index}" if index else self.id)


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of one request up to now. All grow; ``accepted`` is without the bonus token."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    walked: int = 0
    accepted: int = 0

    @classmethod
    def total(cls, choices: "Sequence[Usage]") -> "Usage":
        """The sum over a request's choices; the prompt counts once."""
        return cls(
            prompt_tokens=max(usage.prompt_tokens for usage in choices),
            completion_tokens=sum(usage.completion_tokens for usage in choices),
            cached_tokens=max(usage.cached_tokens for usage in choices),
            rounds=sum(usage.rounds for usage in choices),
            drafted=sum(usage.drafted for usage in choices),
            walked=sum(usage.walked for usage in choices),
            accepted=sum(usage.accepted for usage in choices),
        )

    @property
    def mean_accept(self) -> float:
        """Accepted drafts per round, 0 before the first."""
        return self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class Started:
    """The row has a place in a window. Comes again if the row had to move to another one."""

    window: str
    lane: str
    waited_s: float = 0.0  # from its arrival to its first place


Source = Literal["accepted", "bonus", "classic"]
"""An accepted draft; the target's own token after drafts; its own without any."""


@dataclass(frozen=True, slots=True)
class RoundDetail:
    """What one round did for one choice, for clients that ask."""

    width: int  # 0: there was no round, reading the prompt gave the token
    drafted: int
    walked: int
    accepted: int
    sources: tuple[Source, ...]  # one for each token id
    pieces: tuple[Piece, ...]  # the event's text, each piece with the number of its token in the answer


@dataclass(frozen=True, slots=True)
class TextTokens:
    """What one round gave one choice of the client's; ``usage`` is that choice's.

    ``text`` may lag behind ``token_ids``: a half character or the possible start of a stop string is held
    back until it is sure. Either may be empty, not both.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    index: int = 0  # of the choice
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token id, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # once, of the prompt's second token and on
    round: RoundDetail | None = None  # if asked for
    num_first: int = 0  # leading ``token_ids`` that reading the prompt gave, before any round


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event of a choice that went well. A failure is an exception of ``dflash_core.errors``."""

    finish_reason: Literal["stop", "length"]
    usage: Usage
    stop_reason: int | str | None = None  # the token id or string that stopped it; None: end token, length
    index: int = 0  # of the choice


Event = Started | TextTokens | Ended


class Tokenizer(Protocol):
    """The part of ``dflash_core.text.tokenizer.Tokenizer`` that an edge uses."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every valid id is below."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens; an answer's text leaves them out."""
        ...

    @property
    def text_markers(self) -> frozenset[str]:
        """The protocol's ordinary words, ``<think>`` and such: added tokens that stay in the text."""
        ...

    @property
    def chat_template(self) -> str:
        """Source of the chat template; empty where there is none."""
        ...

    @property
    def tool_parser_type(self) -> str | None:
        """The parser that the checkpoint names for tool calls."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text."""
        ...

    def as_json(self) -> str:
        """The tokenizer as its file has it."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids."""
        ...

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it, None outside the vocabulary."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself; need not be whole characters."""
        ...

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of a conversation rendered by the model's chat template; raises ``InvalidRequest``."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What applies when a client leaves a sampling field out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_generation_config(cls, config: Mapping[str, object]) -> "SamplingDefaults":
        """Read a ``generation_config.json``; ``do_sample: false`` means temperature 0.

        Raises CheckpointError for what no client could ask for.
        """
        fields = Fields(config, "generation_config.json")

        def number(key: str, default: float, low: float, high: float) -> float:
            return fields.number(key, low, high) if key in fields else default

        return cls(
            temperature=0.0 if config.get("do_sample") is False else number("temperature", 1.0, 0, 2),
            top_p=number("top_p", 1.0, 0, 1),
            top_k=max(0, int(number("top_k", 0, -1, 2**31 - 1))),
            min_p=number("min_p", 0.0, 0, 1),
            repetition_penalty=number("repetition_penalty", 1.0, 0.01, 100),
        )


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of the served model that an edge needs and shows."""

    names: tuple[str, ...]  # the first is the model's name, the others are aliases
    created: int  # unix seconds
    max_context: int  # prompt and output together, in tokens
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    drafter: str | None = None
    block_size: int = 1  # widest block, the anchor included
    owned_by: str = "dflash-serve"
    message_opener: int | None = None  # the control token that begins a message, if the template has one


class Backend(Protocol):
    """What plays a ``Generation``: the router, or a stub in tests."""

    @property
    def model_card(self) -> ModelCard:
        """The model served here."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; the edge calls it on a thread of its own."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        """Play a request: for each choice ``Started``, any number of ``TextTokens``, one ``Ended``; or raise.

        ``QueueFull`` and ``Unavailable`` come before the first event. Closing the generator means that the
        client went away: its row is gone by the next round.
        """
        ...

    async def health(self) -> Mapping[str, object]:
        """State for ``/health``; ``status`` is ``ok``, ``loading`` or ``draining``, the rest is free."""
        ...

    async def snapshot(self) -> Sequence[Snapshot]:
        """Statistics, one per engine."""
        ...


class OverviewBackend(Backend, Protocol):
    """A backend that can show all routers, itself included: what the HTTP edge is built over."""

    async def overview(self) -> Overview:
        """Statistics and windows of every engine."""
        ...
