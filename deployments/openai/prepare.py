"""A checked body to a ``Generation``: what needs the model's facts, its tokenizer, or chance.

Pure but for the seed and the id; runs on the edge's tokenising thread.
"""

import secrets
import uuid
from collections.abc import Mapping

from deployments.boundaries import places_to_save
from deployments.generation import Backend, Delivery, Generation, GenerationId, ModelCard, SamplingDefaults
from deployments.openai.conversation import render
from deployments.openai.errors import ModelNotFound
from deployments.openai.grammar import grammar_of
from deployments.openai.limits import Limits
from deployments.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from dflash_core.errors import ContextLengthExceeded, InvalidRequest
from dflash_core.request import Sampling

_MAX_ID_DIGITS = 10
_MAX_SHOWN = 40


def prepare(request: GenerationRequest, backend: Backend, limits: Limits, request_id: str) -> Generation:
    """Fill in every default and check every bound; the result can be played as it is."""
    card = backend.model_card
    require_model(request.model, card)
    prompt_ids, prompt_param, prefix = _prompt(request, backend)
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.",
            param="stream_options",
            code="invalid_value",
        )
    max_tokens = _max_tokens(request, len(prompt_ids), prompt_param, card.max_context, limits)
    num_choices, echo = _num_choices(request, limits), _echo(request, prompt_ids, backend)
    num_top = num_top_logprobs(request)
    if num_top is not None:
        told = max_tokens + (0 if echo is None else len(prompt_ids))
        _require_few_numbers(told * num_choices * (1 + num_top), limits)
    grammar, grammar_param = grammar_of(request, prompt_ids, backend.tokenizer) or (None, None)
    return Generation(
        id=GenerationId(prefix + uuid.uuid4().hex),
        model=request.model,
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        sampling=_sampling(request, card.defaults, backend.tokenizer.vocab_size, max_tokens),
        stop_token_ids=_stop_token_ids(request, backend, ends_by_itself=grammar is not None),
        stop_strings=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        deadline_s=limits.request_timeout_s,
        delivery=Delivery(
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            return_token_ids=bool(request.return_token_ids),
            rounds=bool(request.dflash and request.dflash.rounds),
        ),
        request_id=request_id,
        num_choices=num_choices,
        num_top_logprobs=num_top,
        echo=echo,
        save_at=places_to_save(prompt_ids, card.message_opener),
        grammar=grammar,
        grammar_param=grammar_param,
    )


def _require_few_numbers(count: int, limits: Limits) -> None:
    """Raise if an answer could carry more log-probabilities than it may."""
    if count > limits.max_logprobs:
        raise InvalidRequest(
            f"This request could be told {count} log-probabilities; the most is {limits.max_logprobs}. "
            "Ask for fewer tokens, choices or likeliest tokens.",
            param="logprobs",
            code="invalid_value",
        )


def require_model(name: str, card: ModelCard) -> None:
    """Raise unless ``name`` is a name of the served model."""
    if name not in card.names:
        served = ", ".join(card.names)
        shown = name if len(name) <= 100 else name[:100] + "..."
        raise ModelNotFound(
            f"The model '{shown}' does not exist here. Served: {served}.",
            param="model",
            code=ModelNotFound.kind,
        )


def _prompt(request: GenerationRequest, backend: Backend) -> tuple[tuple[int, ...], str, str]:
    """Return the prompt's ids, the name of the field they came from, and the answer's id prefix."""
    match request:
        case ChatRequest():
            ids, param, prefix = render(request, backend.tokenizer), "messages", "chatcmpl-"
        case CompletionRequest():
            ids, param, prefix = _completion_ids(request, backend), "prompt", "cmpl-"
        case _:
            raise TypeError(f"no prompt in {type(request).__name__}")
    if not ids:
        raise InvalidRequest(
            f"'{param}' is empty: it must give at least one token.", param=param, code="invalid_value"
        )
    return tuple(ids), param, prefix


def _completion_ids(request: CompletionRequest, backend: Backend) -> list[int]:
    prompt = request.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequest(
                "Several prompts in one request are not supported; send one request for each.",
                param="prompt",
                code="unsupported_parameter",
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        return backend.tokenizer.encode(prompt)
    ids = [token for token in prompt if isinstance(token, int)]
    vocab_size = backend.tokenizer.vocab_size
    for index, token in enumerate(ids):
        _require_in_vocabulary(token, vocab_size, f"prompt[{index}]")
    return ids


def _max_tokens(
    request: GenerationRequest, prompt: int, prompt_param: str, context: int, limits: Limits
) -> int:
    newer = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    asked = newer if newer is not None else request.max_tokens
    room = context - prompt
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's context is {context} tokens, prompt and answer together. "
            f"Your prompt has {prompt}: shorten it.",
            param=prompt_param,
            code=ContextLengthExceeded.kind,
        )
    if asked is None:
        is_text = isinstance(request, CompletionRequest)
        return min(room, limits.default_completion_tokens if is_text else limits.default_max_tokens)
    if asked == 0 and not (isinstance(request, CompletionRequest) and request.echo):
        raise InvalidRequest(
            "'max_tokens' may be 0 only with 'echo'.", param="max_tokens", code="invalid_value"
        )
    if asked > room:
        raise ContextLengthExceeded(
            f"This model's context is {context} tokens. You asked for {prompt + asked}: {prompt} in the "
            f"prompt and {asked} for the answer. Shorten the prompt or ask for at most {room}.",
            param="max_completion_tokens" if newer is not None else "max_tokens",
            code=ContextLengthExceeded.kind,
        )
    return asked


def _num_choices(request: GenerationRequest, limits: Limits) -> int:
    wanted = request.n or 1
    if wanted > limits.max_choices:
        raise InvalidRequest(
            f"'n' is {wanted}; this server gives at most {limits.max_choices} choices to a request.",
            param="n",
            code="invalid_value",
        )
    return wanted


def num_top_logprobs(request: GenerationRequest) -> int | None:
    """Return how many likeliest tokens to tell beside each, None for no log-probabilities."""
    match request:
        case ChatRequest(logprobs=True):
            return request.top_logprobs or 0
        case ChatRequest() if request.top_logprobs:
            raise InvalidRequest(
                "'top_logprobs' is only allowed when 'logprobs' is true.",
                param="top_logprobs",
                code="invalid_value",
            )
        case CompletionRequest():
            return request.logprobs
        case _:
            return None


def _echo(request: GenerationRequest, prompt_ids: tuple[int, ...], backend: Backend) -> str | None:
    if not isinstance(request, CompletionRequest) or not request.echo:
        return None
    if isinstance(request.prompt, str):
        return request.prompt
    return backend.tokenizer.decode(prompt_ids, skip_special=False)


def _sampling(
    request: GenerationRequest, defaults: SamplingDefaults, vocab_size: int, max_tokens: int
) -> Sampling:
    temperature = _or(request.temperature, defaults.temperature)
    top_p = _or(request.top_p, defaults.top_p)
    top_k = int(_or(request.top_k, defaults.top_k))
    if top_p == 0:  # the limit of ever smaller values: only the likeliest token is left
        top_k, top_p = 1, 1.0
    if top_k < 1 or top_k >= vocab_size:
        top_k = 0
    seed = secrets.randbits(64) if request.seed is None else request.seed % 2**64
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' is {min_tokens}, more than the {max_tokens} tokens that the answer may have.",
            param="min_tokens",
            code="invalid_value",
        )
    return Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=_or(request.min_p, defaults.min_p),
        seed=seed,
        logit_bias=_logit_bias(request, vocab_size),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        min_tokens=min_tokens,
    )


def _logit_bias(request: GenerationRequest, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: list[tuple[int, float]] = []
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            shown = key if len(key) <= _MAX_SHOWN else key[:_MAX_SHOWN] + "..."
            raise InvalidRequest(
                f"'logit_bias' names '{shown}'; its keys are token ids.",
                param="logit_bias",
                code="invalid_value",
            )
        _require_in_vocabulary(int(key), vocab_size, "logit_bias")
        if bias != 0:
            biases.append((int(key), bias))
    return tuple(biases)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop_token_ids(request: GenerationRequest, backend: Backend, *, ends_by_itself: bool) -> frozenset[int]:
    """Return what ends the answer; a grammar's end does, whether or not the client ignores end tokens."""
    asked = request.stop_token_ids or []
    for index, token in enumerate(asked):
        _require_in_vocabulary(token, backend.tokenizer.vocab_size, f"stop_token_ids[{index}]")
    own = frozenset() if request.ignore_eos and not ends_by_itself else backend.tokenizer.eos_token_ids
    return own | frozenset(asked)


def _require_in_vocabulary(token: int, vocab_size: int, param: str) -> None:
    if token >= vocab_size:
        raise InvalidRequest(
            f"'{param}' is {token}, beyond the vocabulary of {vocab_size} tokens.",
            param=param,
            code="invalid_value",
        )


def effective_defaults(card: ModelCard) -> Mapping[str, float]:
    """Return what applies when a client leaves a sampling field out."""
    defaults = card.defaults
    return {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
    }
