"""Fields that are not in the schema: accepted silently, refused by name, or reported as ignored."""

import json
from collections.abc import Mapping
from urllib.parse import quote

from dflash_core.errors import InvalidRequest

# Bookkeeping of the client's or of OpenAI's service: nothing here would change the answer.
_SILENT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
    }
)

# Would change the answer, and is not built. The values are those that ask for nothing; null always does.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

_MAX_NAMES = 20
_MAX_NAME = 64


def ignored_fields(extra: Mapping[str, object]) -> tuple[str, ...]:
    """Return the unknown names among ``extra``, safe for a header; raise for what is not supported."""
    unknown: list[str] = []
    for name, value in extra.items():
        if name in _UNSUPPORTED:
            refuse(name, value, _UNSUPPORTED[name])
        elif name not in _SILENT and len(unknown) < _MAX_NAMES:  # of a million names few are quoted
            unknown.append(quote(name[:_MAX_NAME], safe="")[:_MAX_NAME])
    return tuple(unknown)


def refuse(name: str, value: object, neutral: tuple[object, ...], reason: str = "") -> None:
    """Raise unless ``value`` is null, or one of those that ask for nothing."""
    # Python holds False, 0 and 0.0 for equal; here `logprobs: 0` asks for something and `false` does not.
    if value is None or any(type(value) is type(n) and value == n for n in neutral):
        return
    message = f"'{name}' is not supported by this server with this value; leave it out"
    if neutral:
        message += f" or send {json.dumps(neutral[0])}"
    message += f" ({reason})" if reason else ""
    raise InvalidRequest(f"{message}.", param=name, code="unsupported_parameter")
