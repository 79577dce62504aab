"""Log-probabilities as the two endpoints write them. They are raw: the model's own, before any setting."""

import codecs
from collections.abc import Sequence
from typing import Any

from deployments.generation import Tokenizer
from dflash_core.events import TokenLogprobs

Json = dict[str, Any]
Numbers = Sequence[TokenLogprobs | None]  # None: the first token of a prompt, which nothing foretells


class Spelling:
    """What tokens are called on the wire. A token that is no whole character is told by its bytes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}  # likely tokens come again and again

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token."""
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._tokenizer.token_bytes(token_id)
        return data

    def name(self, token_id: int, prefix: str = "") -> str:
        r"""Text of a token, or its bytes as ``\xe2\x80`` after ``prefix``."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in data)


class ChatLogprobs:
    """``choices[].logprobs`` of chat completions."""

    def __init__(self, tokenizer: Tokenizer):
        self._spelling = Spelling(tokenizer)

    def write(self, token_ids: Sequence[int], numbers: Numbers, num_prompt: int = 0) -> Json:
        """Write the numbers of some tokens, in order. A chat echoes no prompt."""
        content = [
            self._entry(token_id, number.logprob)
            | {"top_logprobs": [self._entry(other, logprob) for other, logprob in number.top]}
            for token_id, number in zip(token_ids, numbers, strict=True)
            if number is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self._spelling.token_bytes(token_id)
        return {"token": self._spelling.name(token_id), "logprob": logprob, "bytes": list(data)}


class CompletionLogprobs:
    """``choices[].logprobs`` of completions: four lists; offsets run on from call to call."""

    def __init__(self, tokenizer: Tokenizer):
        self._spelling = Spelling(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unwritten = tokenizer.special_ids
        self._offset = 0  # characters written

    def write(self, token_ids: Sequence[int], numbers: Numbers, num_prompt: int = 0) -> Json:
        """Write the numbers of some tokens; ``top_logprobs`` always has the token itself, too.

        The first ``num_prompt`` are an echo, whose text keeps special tokens; an answer's leaves them out.
        """
        offsets: list[int] = []
        for place, token_id in enumerate(token_ids):
            offsets.append(self._offset)
            if place < num_prompt or token_id not in self._unwritten:
                self._offset += len(self._utf8.decode(self._spelling.token_bytes(token_id)))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if number is None else number.logprob for number in numbers],
            "top_logprobs": [
                None if number is None else self._tops(token_id, number)
                for token_id, number in zip(token_ids, numbers, strict=True)
            ],
            "text_offset": offsets,
        }

    def _tops(self, token_id: int, number: TokenLogprobs) -> dict[str, float]:
        tops: dict[str, float] = {}
        for other, logprob in (*number.top, (token_id, number.logprob)):
            tops.setdefault(self._name(other), logprob)  # of two that read alike, the likelier one
        return tops

    def _name(self, token_id: int) -> str:
        return self._spelling.name(token_id, "bytes:")
