"""Prefix reuse in the deployments: where to save, what a drafter is given, what a client is told."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from deployments.boundaries import find_opener, places_to_save
from deployments.desk import Desk
from deployments.exchange.messages import DraftCall, DraftReply
from deployments.exchange.patience import Patience
from deployments.exchange.remote import RemoteDrafter
from deployments.exchange.sessions import Sessions
from deployments.exchange.transport import Transport
from deployments.generation import Event, Generation
from deployments.http import create_app
from deployments.lane import Lane
from deployments.memory import MOST_PREFIX_BYTES, Limit, read_pair, require_room, with_prefixes
from deployments.telemetry import Statistics
from dflash_core.errors import CheckpointError
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.prefix_store import Origin, PrefixStore
from dflash_core.prefixes import Prefixes, Snapshot
from dflash_core.request import RowId, RowRequest
from dflash_core.text import TextStream, Tokenizer
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy
from tests.core.engine_fixtures import alone, eager, local, progress_of, prompt, row, tiny_lane
from tests.deployments.http_stub import StubBackend
from tests.deployments.local_link import LocalLink, W
from tests.deployments.test_desk import LocalStage

ORIGIN = Origin("target", "drafter", "float32")
THINKING = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{%- else %}{{ m.content }}{%- endif %}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{%- endif %}"
)


def with_template(folder: Path, template: str) -> Tokenizer:
    shutil.copy(TARGET / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# Where to save


def test_places_are_whole_messages_and_the_last_is_before_the_generation_prompt() -> None:
    tokenizer = Tokenizer.load(TARGET)
    opener = find_opener(tokenizer)
    chat = [{"role": "system", "content": "Be kind."}, user("One"), said("Two"), user("Three"), said("Four")]
    chat.append(user("Five"))
    ids = tokenizer.apply_chat(chat)
    whole = [tokenizer.apply_chat(chat[:count], add_generation_prompt=False) for count in (1, 5, 6)]
    places = places_to_save(ids, opener)
    assert places == tuple(map(len, whole))
    assert [ids[:place] for place in places] == whole
    assert places_to_save(tokenizer.apply_chat(chat[1:2]), opener) == (
        len(tokenizer.apply_chat(chat[1:2], add_generation_prompt=False)),
    )
    assert places_to_save(tokenizer.encode("no message at all"), opener) == ()


def test_a_look_alike_in_a_message_is_no_place() -> None:
    tokenizer = Tokenizer.load(TARGET)
    ids = tokenizer.apply_chat([user("say <|im_start|> twice: <|im_start|>user")])
    assert len(places_to_save(ids, find_opener(tokenizer))) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "plain",
        "{{ messages[0].content }}{% if add_generation_prompt %}A:{% endif %}",
    ],
)
def test_a_template_without_an_opener_has_no_places(tmp_path: Path, template: str) -> None:
    opener = find_opener(with_template(tmp_path, template))
    assert opener is None
    assert places_to_save((1, 2, 1), opener) == ()


# The exchange


@pytest.fixture
def _eager() -> Iterator[None]:
    with eager():
        yield


class InlineDrafter(RemoteDrafter):
    """Calls are carried out where they are made: MLX arrays belong to the thread that made them."""

    def _start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        answer: Future[Any] = Future()
        try:
            answer.set_result(asyncio.run(work))
        except Exception as error:
            answer.set_exception(error)
        return answer


class NotedLink(LocalLink):
    """Keeps what was drafted."""

    def __init__(self) -> None:
        super().__init__()
        self.drafted: list[Any] = []

    async def draft(self, call: DraftCall, by_reference: bool) -> DraftReply:
        reply = await super().draft(call, by_reference)
        self.drafted.append(reply.ids.tolist())
        return reply


@pytest.mark.usefixtures("_eager")
def test_a_drafter_that_loses_a_row_begun_from_a_saved_state_is_given_all_of_it(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """Drafts are those of a row that was read whole, and tokens too when its context is made again."""
    lane = tiny_lane()
    store: PrefixStore[Snapshot] = PrefixStore(2**30)
    link = NotedLink()

    def sessions() -> Sessions:
        lane.drafter.close(W)
        return Sessions(lane.drafter, "tiny")

    def play(request: RowRequest, prefixes: PrefixStore[Snapshot], break_after: int = 10**6) -> list[Any]:
        link.sessions, link.calls, link.drafted = sessions(), [], []
        drafter = InlineDrafter(link, loop, Transport("value"), "tiny", 4, Patience(30.0, 30.0))
        policy = WindowPolicy(width=FixedWidth(4), max_rows=2)
        window = Window(W, lane.target, drafter, policy, Prefixes(prefixes, ORIGIN, drafter))
        window.admit(request)
        reports = []
        while window.has_work:
            if len(reports) == break_after:
                link.restart()
                link.sessions = sessions()
            reports.append(window.step())
        window.close()
        assert drafter.retention.num_bytes == 0
        return reports

    first = replace(row("first", prompt(1, 300), 8), save_at=(297,))
    play(first, store)
    tokens = (*first.tokens, *alone(lane, first), *prompt(2, 9))
    second = RowRequest(RowId("second"), tokens, 16, save_at=(len(tokens) - 3,))
    cold, cold_drafts = play(second, PrefixStore(2**30)), link.drafted
    warm, warm_drafts = play(second, store), link.drafted
    (features,) = link.calls[0].features
    assert (features.start, features.count) == (0, len(tokens))
    assert sum(p.cached_tokens for p in progress_of(warm, "second")) == 307
    assert warm_drafts == cold_drafts
    assert len(warm_drafts) > 8
    broken = play(second, store, break_after=4)
    again = [row.features[0].count for row in link.calls[1:] if row.features[0].start == 0]
    assert len(again) == 1
    assert again[0] > len(tokens)
    for reports in (cold, warm, broken):
        assert [t for p in progress_of(reports, "second") for t in p.tokens] == list(alone(lane, second))


# Over HTTP


class ReusingBackend(StubBackend):
    """A backend that plays the embedded pair for real and saves prefixes."""

    def __init__(self, lane: LoadedLane, tokenizer: Tokenizer, num_bytes: int = 2**28) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.model_card = replace(self.model_card, max_context=4096, message_opener=find_opener(tokenizer))
        self.store: PrefixStore[Snapshot] = PrefixStore(num_bytes)
        prefixes = Prefixes(self.store, ORIGIN, local(lane))
        policy = WindowPolicy(width=FixedWidth(8), max_rows=4)
        self.stage = LocalStage()
        self.stage.lane = Lane(
            lambda window_id: Window(window_id, lane.target, lane.drafter, policy, prefixes), max_windows=2
        )
        self.statistics = Statistics("demo", "0")
        self.desk = Desk(self.stage, self.statistics, self._new_text, tokenizer.eos_token_ids, max_rows=4)

    def _new_text(self, generation: Generation) -> TextStream:
        return TextStream(self.tokenizer, generation.stop_strings)

    def generate(self, generation: Generation) -> AsyncGenerator[Event, None]:
        return self.desk.play(generation)


@pytest.fixture(scope="module")
def lane() -> LoadedLane:
    return load_lane(TARGET, DRAFTER)


def ask(backend: ReusingBackend, *messages: Any, **wishes: Any) -> dict[str, Any]:
    async def post() -> dict[str, Any]:
        transport = httpx2.ASGITransport(app=create_app(backend))
        async with httpx2.AsyncClient(transport=transport, base_url="http://local", timeout=60) as client:
            body = {"model": "stub-model", "messages": messages, "max_tokens": 24, "temperature": 0}
            wishes.setdefault("return_token_ids", True)
            reply = await client.post("/v1/chat/completions", json=body | wishes)
        assert reply.status_code == 200, reply.text
        return reply.json()

    return asyncio.run(post())


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def told(answer: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    speculation = {name: answer["dflash"][name] for name in ("rounds", "drafted", "walked", "accepted")}
    return answer["choices"][0]["token_ids"], speculation


def test_the_second_turn_of_a_chat_reads_what_is_new_and_says_the_same(lane: LoadedLane) -> None:
    tokenizer = Tokenizer.load(TARGET)
    backend = ReusingBackend(lane, tokenizer)
    chat: list[dict[str, str]] = [{"role": "system", "content": "You answer briefly."}]
    chat.append(user("What is the capital of France?"))
    first = ask(backend, *chat)
    assert cached(first) == 0
    answer = first["choices"][0]["message"]["content"]
    chat += [said(answer), user("Write a Python function that adds two numbers.")]
    warm, cold = ask(backend, *chat), ask(ReusingBackend(lane, tokenizer), *chat)
    least = len(tokenizer.apply_chat(chat[:2], add_generation_prompt=False))
    assert least <= cached(warm) < warm["usage"]["prompt_tokens"]
    assert cached(cold) == 0
    assert told(warm) == told(cold)
    assert warm["dflash"]["accepted"] > 0
    values = backend.statistics.snapshot().values
    prompts = first["usage"]["prompt_tokens"] + warm["usage"]["prompt_tokens"]
    assert values["vllm:prefix_cache_queries_total"][()] == prompts
    assert values["vllm:prefix_cache_hits_total"][()] == cached(warm)
    assert values["dflash_prefix_bytes"][()] == backend.store.num_bytes > 0


def test_a_template_that_takes_thoughts_out_still_shares_what_came_before(
    lane: LoadedLane, tmp_path: Path
) -> None:
    tokenizer = with_template(tmp_path, THINKING)
    backend = ReusingBackend(lane, tokenizer)
    chat = [user("What is 12 + 30?")]
    first = ask(backend, *chat)
    before = len(tokenizer.apply_chat(chat, add_generation_prompt=False))
    chat += [said("<think>\nhm\n</think>42"), user("And what is 7 times 8?")]
    assert cached(first) == 0
    warm, cold = ask(backend, *chat), ask(ReusingBackend(lane, tokenizer), *chat)
    assert cached(warm) == before
    assert told(warm) == told(cold)


# Memory


def test_saved_prefixes_are_a_summand_and_by_themselves_no_reason_to_refuse() -> None:
    pair = read_pair(TARGET, DRAFTER, rows=4)
    bare = pair.need(1024).total
    roomy = Limit(2**40, "test")
    assert with_prefixes(pair, None, roomy).prefix_bytes == MOST_PREFIX_BYTES
    assert with_prefixes(pair, 0, roomy).need(1024).total == bare
    assert with_prefixes(pair, 1000, roomy).need(1024).total == bare + 1000
    tight = Limit(bare + 10, "test")
    require_room(with_prefixes(pair, None, tight), tight)
    with pytest.raises(CheckpointError, match=r"saved prefixes .* take less prefix_bytes"):
        require_room(with_prefixes(pair, 2**30, tight), tight)
