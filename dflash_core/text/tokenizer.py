"""A checkpoint's tokenizer: prompts to ids and back.

Stands on ``tokenizers`` alone: loads in a fraction of a second, runs no code of the checkpoint, never
touches the network. Nothing in a ``Tokenizer`` changes after loading (truncation and padding, which make
other wrappers unsafe to share, are switched off once), so one object may be used from several threads
and sharing it is the cheapest copy. What is per request lives in ``Detokenizer`` and ``TextStream``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dflash_core.errors import CheckpointError, InvalidRequest
from dflash_core.text.files import eos_ids, read_json, template_sources, template_variables
from dflash_core.text.messages import parse_messages, parse_tools
from dflash_core.text.shield import Shield, unused_character
from dflash_core.text.template import ChatTemplate
from dflash_core.text.token_bytes import token_bytes


class Tokenizer:
    """Encodes prompts and chats, decodes ids. Make one with ``Tokenizer.load``."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate,
        eos: frozenset[int],
        tool_parser_type: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._ordinary = _without_markers(backend)
        self._template = template
        added = backend.get_added_tokens_decoder()
        self._marker_ids = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.text_markers = frozenset(token.content for token in added.values() if not token.special)
        self.eos_token_ids = eos
        self.tool_parser_type = tool_parser_type
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._shield = Shield(self._marker_ids, (t.content for t in added.values() if t.special))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Load from a checkpoint's directory; ``CheckpointError`` says what is missing or unreadable."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{folder}: no tokenizer.json; expected a checkpoint's directory")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exception, and panics are not even that
            raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
        config = read_json(folder / "tokenizer_config.json")
        variables = template_variables(config)
        template = ChatTemplate(template_sources(folder, config), variables)
        eos = eos_ids(folder, backend.token_to_id(variables.get("eos_token", "")))
        parser = config.get("tool_parser_type")
        return cls(backend, template, eos, parser if isinstance(parser, str) else None)

    def require_within(self, vocab_size: int) -> None:
        """Raise ``CheckpointError`` if an id of this vocabulary lies beyond a model's ``vocab_size``."""
        ids = {"eos_token_id": max(self.eos_token_ids, default=0), "tokenizer.json": self.vocab_size - 1}
        for name, highest in ids.items():
            if highest >= vocab_size:
                raise CheckpointError(
                    f"{name}: token {highest}; expected at most {vocab_size - 1}, the model's"
                )

    @property
    def chat_template(self) -> str:
        """Source of the chat template; empty where there is none."""
        return self._template.source

    def encode(self, text: str, *, parse_special: bool = True, param: str = "prompt") -> list[int]:
        """Return the ids of ``text``; nothing is added.

        With ``parse_special`` false, no part of the text becomes a control token. ``param`` names the
        request's field in errors.
        """
        backend = self._backend if parse_special else self._ordinary
        # Not ``encode``: that one holds the interpreter's lock, and a long text would stop every thread.
        (encoding,) = backend.encode_batch_fast([_valid_unicode(text, param)], add_special_tokens=False)
        return encoding.ids

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat, in which only the template itself can write control tokens.

        Ids are those of rendering and encoding the chat as a whole, except that look-alikes of control
        tokens in the clients' text stay text. Raises ``InvalidRequest``.
        """
        parsed, tool_list, extra = parse_messages(messages), parse_tools(tools), dict(template_kwargs or {})
        try:
            mark = unused_character(parsed, tool_list, extra, self._template.source)
            rendered = self._template.render(
                self._shield.mark_messages(parsed, mark),
                self._shield.mark(tool_list, mark),
                add_generation_prompt,
                self._shield.mark(extra, mark),
            )
        except RecursionError:
            raise InvalidRequest("messages: nested too deeply", param="messages") from None
        if mark not in rendered:
            return self.encode(rendered, param="messages")
        return self._encode_marked(rendered, mark)

    def as_json(self) -> str:
        """Return the tokenizer as its file has it, for libraries that build their own."""
        return self._backend.to_str()

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ``ids``; ids outside the vocabulary have none."""
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it (not its text), None outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for by itself: bytes, which need not be whole characters."""
        return token_bytes(self._backend.id_to_token(token_id), is_byte_level=self.is_byte_level)

    def _encode_marked(self, rendered: str, mark: str) -> list[int]:
        ids: list[int] = []
        for text, marker in self._shield.split(rendered):
            piece = self.encode(text.replace(mark, ""), parse_special=False, param="messages")
            if not self.special_ids.isdisjoint(piece):  # no known vocabulary can; refuse if one does
                raise InvalidRequest("messages: text that encodes as a control token", param="messages")
            ids += piece
            if marker is not None:
                ids.append(self._marker_ids[marker])
        return ids


def _without_markers(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer with no added tokens; the vocabulary itself is shared."""
    ordinary = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        ordinary.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        ordinary.pre_tokenizer = backend.pre_tokenizer
    return ordinary


def _valid_unicode(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param}: not valid Unicode (lone surrogate at character {error.start})", param=param
        ) from None
    return text
