"""The embedded pair behind HTTP, on real Ray Serve: what a client gets does not depend on company or luck."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Coroutine, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from ray import serve

import dflash_core.pair
from deployments.app import APP_NAME, build
from deployments.settings import Settings
from dflash_core.events import TokenLogprobs
from dflash_core.loading import LoadedLane, load_lane
from dflash_core.request import RowId, RowRequest, Sampling
from dflash_core.text import Tokenizer
from tests.core.engine_fixtures import SilentDrafter, finish, opened
from tests.deployments.ray_client import call, kill_replica, wait_until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900), pytest.mark.ray]

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "What is 12 + 30?",
    "Write an SQL query that counts all users.",
    "Name the capital of Japan, please.",
    "What is 7 times 8?",
    "Give me a JSON object with a name and an age.",
    "Write a Python function that reverses a string.",
)
CHATS = Path(__file__).parents[1] / "benchmarks" / "chats.jsonl"
Answers = list[tuple[int, ...]]
PAIR_PATH = Path(dflash_core.pair.__file__).parent


@pytest.fixture(scope="module")
def base_url(ray_cluster: int, cache_dir: Path) -> str:
    """The pair under default settings, but for the time that measuring takes."""
    serve.run(
        build(Settings(calibration_s=3, probe_s=1, cache_dir=cache_dir)), name=APP_NAME, route_prefix="/"
    )
    return f"http://127.0.0.1:{ray_cluster}"


async def ask(
    client: AsyncOpenAI,
    question: str,
    max_tokens: int = 64,
    ignore_eos: bool = False,
    history: Sequence[Any] = (),
    **options: Any,
) -> tuple[int, ...]:
    answer = await client.chat.completions.create(
        model="demo",
        messages=[*history, {"role": "user", "content": question}],
        max_tokens=max_tokens,
        extra_body={"return_token_ids": True, "ignore_eos": ignore_eos},
        **{"temperature": 0, **options},
    )
    extra: Any = answer.choices[0].model_extra
    return tuple(extra["token_ids"])


def with_client(base_url: str, work: Any) -> Any:
    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
            return await work(client)

    return asyncio.run(run())


def one_by_one(base_url: str) -> Answers:
    async def work(client: AsyncOpenAI) -> Answers:
        return [await ask(client, question) for question in QUESTIONS]

    return with_client(base_url, work)


def together(base_url: str) -> Answers:
    async def work(client: AsyncOpenAI) -> Answers:
        asked: list[Coroutine[Any, Any, tuple[int, ...]]] = [ask(client, q) for q in QUESTIONS]
        return list(await asyncio.gather(*asked))

    return with_client(base_url, work)


def metric(base_url: str, name: str) -> float:
    with urllib.request.urlopen(f"{base_url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@pytest.fixture(scope="module")
def alone(base_url: str) -> Answers:
    return one_by_one(base_url)


def test_two_concurrent_requests_share_a_window_and_get_the_tokens_of_sequential_ones(base_url: str) -> None:
    async def work(client: AsyncOpenAI) -> None:
        def two() -> list[Coroutine[Any, Any, tuple[int, ...]]]:  # long enough to meet
            return [ask(client, question, 80, ignore_eos=True) for question in QUESTIONS[:2]]

        sequential = [await answer for answer in two()]
        assert metric(base_url, "dflash_window_rows_max") == 1
        assert await asyncio.gather(*two()) == sequential
        assert metric(base_url, "dflash_window_rows_max") == 2

    with_client(base_url, work)


def test_sixteen_concurrent_chats_in_one_window_get_the_tokens_of_sequential_ones(base_url: str) -> None:
    lines = CHATS.read_text().splitlines()[44:60]  # prompts of 15 to 91 tokens
    chats: list[list[Any]] = [json.loads(line)["body"]["messages"] for line in lines]

    def ask_all(client: AsyncOpenAI) -> list[Coroutine[Any, Any, tuple[int, ...]]]:
        return [
            ask(client, question["content"], 96 + 4 * number, ignore_eos=True, history=history)
            for number, (*history, question) in enumerate(chats)
        ]

    async def work(client: AsyncOpenAI) -> None:
        sequential = [await answer for answer in ask_all(client)]
        assert [len(ids) for ids in sequential] == [96 + 4 * number for number in range(16)]
        for _ in range(3):  # on a busy machine the first may be over before the last comes
            assert await asyncio.gather(*ask_all(client)) == sequential
            if metric(base_url, "dflash_window_rows_max") == 16:
                return
        pytest.fail("no round had all sixteen rows")

    with_client(base_url, work)


def test_a_seed_gives_the_same_sample_in_any_company(base_url: str) -> None:
    async def work(client: AsyncOpenAI) -> None:
        sampled = {"temperature": 1.0, "seed": 7}
        first = await ask(client, QUESTIONS[1], **sampled)
        crowd = [ask(client, question) for question in QUESTIONS]
        second, *_ = await asyncio.gather(ask(client, QUESTIONS[1], **sampled), *crowd)
        assert second == first

    with_client(base_url, work)


def test_drafts_are_accepted(base_url: str, alone: Answers) -> None:
    assert metric(base_url, "vllm:spec_decode_num_accepted_tokens_total") > 100
    assert call("Router", "health")["exchange"]["calls"]["value"] > 0


def test_a_killed_drafter_changes_no_token(base_url: str, alone: Answers) -> None:
    async def work(client: AsyncOpenAI) -> Answers:
        asked = [asyncio.ensure_future(ask(client, question)) for question in QUESTIONS]
        await asyncio.sleep(0.1)
        kill_replica("Drafter")
        return list(await asyncio.gather(*asked))

    assert with_client(base_url, work) == alone
    accepted = metric(base_url, "vllm:spec_decode_num_accepted_tokens_total")
    wait_until(lambda: _is_running("Drafter"), 60)
    wait_until(
        lambda: (
            together(base_url) == alone
            and metric(base_url, "vllm:spec_decode_num_accepted_tokens_total") > accepted + 50
        ),
        60,
    )


NAMES: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "names",
        "schema": {
            "type": "array",
            "items": {"type": "string", "maxLength": 9},
            "minItems": 9,
            "maxItems": 9,
        },
    },
}


def test_a_killed_target_changes_no_token(base_url: str, alone: Answers) -> None:
    """Nor one of a row that follows a grammar: it goes on where it was in it."""

    async def listed(client: AsyncOpenAI) -> tuple[int, ...]:
        return await ask(client, QUESTIONS[6], 400, response_format=NAMES)

    async def work(client: AsyncOpenAI) -> Answers:
        asked = [asyncio.ensure_future(ask(client, question)) for question in QUESTIONS]
        asked.append(asyncio.ensure_future(listed(client)))
        await asyncio.sleep(0.2)
        kill_replica("Target")
        return list(await asyncio.gather(*asked))

    names = with_client(base_url, listed)
    assert len(json.loads(Tokenizer.load(PAIR_PATH / "target").decode(names))) == 9
    assert with_client(base_url, work) == [*alone, names]


def test_health_tells_the_essentials(base_url: str) -> None:
    with urllib.request.urlopen(f"{base_url}/health") as answer:
        health = json.load(answer)
    assert (health["status"], health["model"]) == ("ok", "dflash-embedded")
    assert (health["drafter"], health["drafter_state"]) == ("embedded", "ok")
    assert health["windows"] >= 0
    assert (health["running"], health["waiting"]) == (0, 0)
    assert health["width"] == "auto, up to 16"
    assert health["exactness"]["mode"] == "near_ties"
    assert health["exactness"]["shapes"]["1x1"] == {"verdict": "equal", "gap": 0.0}
    assert health["device"] in ("cpu", "metal", "cuda")
    assert health["processor"]
    assert set(health["versions"]) == {"dflash-serve", "mlx", "ray"}
    assert all(health["versions"].values())
    with urllib.request.urlopen(f"{base_url}/metrics") as answer:
        page = answer.read().decode()
    series = r'dflash_probe_gap_logits\{engine="(\w+)",model_name="dflash-embedded",slots="1",'
    engine = re.search(series, page)
    assert engine is not None
    assert engine[1] != "0"  # the replica's own id


def _is_running(deployment: str) -> bool:
    states = serve.status().applications[APP_NAME].deployments[deployment].replica_states
    return "RUNNING" in {str(state) for state in states}


TIMER: Any = {
    "type": "function",
    "function": {
        "name": "set_timer",
        "description": "Set a timer in minutes.",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer"}},
            "required": ["minutes"],
        },
    },
}


def test_the_pair_calls_a_tool_whole_and_streamed(base_url: str):
    async def work(client: AsyncOpenAI) -> tuple[Any, list[Any]]:
        body: Any = {
            "model": "demo",
            "messages": [{"role": "user", "content": "Set a timer for 45 minutes."}],
            "tools": [TIMER],
            "temperature": 0,
            "max_tokens": 160,
        }
        whole = await client.chat.completions.create(**body)
        return whole, [chunk async for chunk in await client.chat.completions.create(**body, stream=True)]

    whole, chunks = with_client(base_url, work)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call_,) = choice.message.tool_calls
    assert (call_.function.name, json.loads(call_.function.arguments)) == ("set_timer", {"minutes": 45})
    (streamed,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (streamed.function.name, streamed.function.arguments) == ("set_timer", call_.function.arguments)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_second_turn_goes_on_from_the_first_and_still_speculates(base_url: str) -> None:
    """The drafter gets saved features with the first draft; the tokens are those of a prompt read whole."""
    chat: list[Any] = [
        {"role": "system", "content": "You answer in one short sentence, and name no other place."},
        {"role": "user", "content": "Name the capital of Japan, please."},
    ]
    body = {"model": "demo", "temperature": 0, "max_tokens": 48, "extra_body": {"return_token_ids": True}}

    async def work(client: AsyncOpenAI) -> Any:
        first = await client.chat.completions.create(messages=chat, **body)
        chat.append({"role": "assistant", "content": first.choices[0].message.content})
        chat.append({"role": "user", "content": "What is the capital of France?"})
        return await client.chat.completions.create(messages=chat, **body)

    before = metric(base_url, "vllm:prefix_cache_hits_total")
    second = with_client(base_url, work)
    tokenizer = Tokenizer.load(PAIR_PATH / "target")
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= len(tokenizer.apply_chat(chat[:2], add_generation_prompt=False))
    assert metric(base_url, "vllm:prefix_cache_hits_total") - before == cached
    assert second.usage.completion_tokens_details.accepted_prediction_tokens > 0
    ids = tuple(tokenizer.apply_chat(chat))
    tokens, _ = spoken_alone(RowRequest(RowId("alone"), ids, 48, Sampling(), tokenizer.eos_token_ids))
    assert tuple(second.choices[0].model_extra["token_ids"]) == tokens


def test_choices_tell_what_one_row_at_a_time_would(base_url: str) -> None:
    """Penalties, biases, numbers and the echo against the same target, classic and alone."""
    prompt = "Name the capital of Japan, please. And the one of France?"
    settings: dict[str, Any] = {
        "temperature": 0.8,
        "seed": 5,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.3,
        "logit_bias": {"300": 4, "12": -100},
    }
    wishes = {"repetition_penalty": 1.2, "min_tokens": 20, "return_token_ids": True}

    async def work(client: AsyncOpenAI) -> Any:
        spoken = client.completions.create(
            model="demo",
            prompt=prompt,
            n=3,
            logprobs=5,
            echo=True,
            max_tokens=24,
            extra_body=wishes,
            **settings,
        )
        company = [ask(client, question) for question in QUESTIONS[:3]]
        return (await asyncio.gather(spoken, *company))[0]

    answer = with_client(base_url, work)
    tokenizer = Tokenizer.load(PAIR_PATH / "target")
    ids = tuple(tokenizer.encode(prompt))
    sampling = Sampling(
        **{**settings, "logit_bias": ((300, 4.0), (12, -100.0))}, repetition_penalty=1.2, min_tokens=20
    )
    told = [
        RowRequest(
            RowId(str(index)),
            ids,
            24,
            sampling.for_choice(index),
            tokenizer.eos_token_ids,
            num_top_logprobs=5,
            wants_prompt_logprobs=True,
        )
        for index in range(3)
    ]
    seen: set[tuple[int, ...]] = set()
    for choice, request in zip(answer.choices, told, strict=True):
        tokens, numbers = spoken_alone(request)
        assert tuple(choice.model_extra["token_ids"]) == tokens
        logprobs = choice.logprobs.token_logprobs
        assert logprobs[0] is None
        assert logprobs[1:] == pytest.approx([number.logprob for number in numbers], abs=1e-4)
        assert len(choice.logprobs.tokens) == len(ids) + len(tokens)
        assert choice.text.startswith(prompt)
        seen.add(tokens)
    assert len(seen) == 3
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def spoken_alone(request: RowRequest) -> tuple[tuple[int, ...], list[TokenLogprobs]]:
    """Tokens and numbers, the prompt's first, of a row played alone without drafts in this process."""
    with opened(pair_lane(), request, width=1, drafter=SilentDrafter()) as window:
        progress = [row for report in finish(window) for row in report.rows]
    before = [number for row in progress for number in row.prompt_logprobs]
    return tuple(t for row in progress for t in row.tokens), before + [
        n for row in progress for n in row.logprobs
    ]


@cache
def pair_lane() -> LoadedLane:
    return load_lane(PAIR_PATH / "target", PAIR_PATH / "drafter")
