"""From a checked body to a generation: defaults, bounds, the seed, the template."""

from dataclasses import replace

import pytest

from deployments.generation import Delivery, Generation, SamplingDefaults
from deployments.openai.limits import Limits
from deployments.openai.parse import parse_document
from deployments.openai.prepare import prepare
from deployments.openai.schema import ChatRequest, CompletionRequest
from dflash_core.errors import ContextLengthExceeded, InvalidRequest
from dflash_core.request import Sampling
from tests.deployments.http_stub import CONTEXT, StubBackend, chat, tokenizer


@pytest.fixture
def backend() -> StubBackend:
    return StubBackend()


def prepared(backend: StubBackend, limits: Limits | None = None, **fields: object) -> Generation:
    return prepare(parse_document(chat(**fields), ChatRequest), backend, limits or Limits(), "request-1")


def completion(backend: StubBackend, **fields: object) -> Generation:
    document = {"model": "stub-model", "prompt": [5], **fields}
    return prepare(parse_document(document, CompletionRequest), backend, Limits(), "request-1")


def test_what_the_client_leaves_out_comes_from_the_generation_config(backend: StubBackend):
    sampling = prepared(backend, seed=7).sampling
    assert sampling == Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.0, seed=7)


def test_what_the_client_says_wins_zero_included(backend: StubBackend):
    sampling = prepared(backend, temperature=0, top_p=0.5, top_k=0, min_p=0.1, seed=0).sampling
    assert sampling == Sampling(temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, seed=0)


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({}, SamplingDefaults(1.0, 1.0, 0, 0.0)),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50}, SamplingDefaults(0.0, 1.0, 50, 0.0)),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.8}, SamplingDefaults(0.7, 0.8, 0, 0.0)),
        ({"temperature": None, "top_k": None}, SamplingDefaults(1.0, 1.0, 0, 0.0)),
    ],
)
def test_a_generation_config_gives_the_defaults(config: dict[str, object], defaults: SamplingDefaults):
    assert SamplingDefaults.of_generation_config(config) == defaults


def test_a_seed_is_drawn_if_none_is_given(backend: StubBackend):
    seeds = {prepared(backend).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(("given", "kept"), [(-1, 2**64 - 1), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)])
def test_a_seed_is_any_64_bit_number(backend: StubBackend, given: int, kept: int):
    assert prepared(backend, seed=given).sampling.seed == kept


def test_top_p_zero_leaves_the_likeliest_token(backend: StubBackend):
    sampling = prepared(backend, top_p=0).sampling
    assert (sampling.top_k, sampling.top_p) == (1, 1.0)


@pytest.mark.parametrize("top_k", [-1, 0, 8192, 2**31 - 1])
def test_a_top_k_that_cuts_nothing_is_off(backend: StubBackend, top_k: int):
    assert prepared(backend, top_k=top_k).sampling.top_k == 0


def test_the_models_end_tokens_stop_unless_ignored(backend: StubBackend):
    own = tokenizer().eos_token_ids
    assert own
    assert prepared(backend).stop_token_ids == own
    assert prepared(backend, stop_token_ids=[9]).stop_token_ids == own | {9}
    assert prepared(backend, stop_token_ids=[9], ignore_eos=True).stop_token_ids == {9}


def test_one_stop_string_is_a_list_of_one(backend: StubBackend):
    assert prepared(backend, stop="END").stop_strings == ("END",)
    assert prepared(backend, stop=["a", "b"]).stop_strings == ("a", "b")
    assert prepared(backend).stop_strings == ()


def test_without_a_maximum_the_answer_gets_the_room_up_to_the_default(backend: StubBackend):
    room = CONTEXT - len(prepared(backend).prompt_ids)
    assert prepared(backend, Limits(default_max_tokens=10_000)).max_tokens == room
    assert prepared(backend, Limits(default_max_tokens=12)).max_tokens == 12
    assert prepared(backend, max_tokens=room).max_tokens == room
    assert completion(backend, prompt=[5]).max_tokens == 16
    with pytest.raises(ContextLengthExceeded, match=f"at most {room}"):
        prepared(backend, max_tokens=room + 1)


def test_a_prompt_that_fills_all_but_one_token_is_accepted(backend: StubBackend):
    assert completion(backend, prompt=[5] * (CONTEXT - 1)).max_tokens == 1
    with pytest.raises(ContextLengthExceeded) as caught:
        completion(backend, prompt=[5] * CONTEXT)
    assert caught.value.param == "prompt"


def test_max_completion_tokens_wins(backend: StubBackend):
    assert prepared(backend, max_tokens=3, max_completion_tokens=5).max_tokens == 5


def test_token_ids_are_played_as_they_are(backend: StubBackend):
    assert completion(backend, prompt=[5, 6, 5]).prompt_ids == (5, 6, 5)
    assert completion(backend, prompt=[[5, 6]]).prompt_ids == (5, 6)
    assert completion(backend, prompt="hi").prompt_ids == tuple(tokenizer().encode("hi"))
    assert completion(backend, prompt=["hi"]).prompt_ids == tuple(tokenizer().encode("hi"))


def test_the_highest_token_id_is_valid_and_the_next_is_not(backend: StubBackend):
    last = backend.tokenizer.vocab_size - 1
    assert completion(backend, prompt=[last]).prompt_ids == (last,)
    with pytest.raises(InvalidRequest, match="beyond the vocabulary"):
        completion(backend, prompt=[last + 1])


def test_how_to_deliver_is_apart_from_what_to_generate(backend: StubBackend):
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = prepared(backend, stream=True, stream_options=options, return_token_ids=True, seed=1)
    assert streamed.delivery == Delivery(True, True, True, True)
    whole = prepared(backend, seed=1)
    assert whole.delivery == Delivery()
    assert replace(streamed, id=whole.id, delivery=whole.delivery) == whole


def test_every_generation_has_an_id_of_its_own_kind(backend: StubBackend):
    assert prepared(backend).id.startswith("chatcmpl-")
    assert completion(backend).id.startswith("cmpl-")
    assert prepared(backend).id != prepared(backend).id
    assert prepared(backend).request_id == "request-1"
    assert prepared(backend, Limits(request_timeout_s=9)).deadline_s == 9


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Say it", "parameters": {}}}


def test_tool_calls_and_tool_messages_reach_the_template(backend: StubBackend):
    messages = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "y?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    generation = prepared(backend, messages=messages, tools=[TOOL])
    text = tokenizer().decode(generation.prompt_ids, skip_special=False)
    for expected in ("Be brief", "Rainy?", "<function=weather>", "<parameter=city>\nBern", "sunny", "Say it"):
        assert expected in text
    assert text.endswith("<|im_start|>assistant\n")


def test_tools_stay_out_if_the_choice_is_none(backend: StubBackend):
    without = prepared(backend)
    assert prepared(backend, tools=[TOOL], tool_choice="none").prompt_ids == without.prompt_ids
    assert prepared(backend, tools=[], tool_choice="auto").prompt_ids == without.prompt_ids
    assert prepared(backend, tools=[TOOL], tool_choice="auto").prompt_ids != without.prompt_ids


def test_template_options_reach_the_template(backend: StubBackend, monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, object] = {}

    class Spy:
        vocab_size = 8192
        eos_token_ids = frozenset({1})

        def encode(self, text: str) -> list[int]:
            raise AssertionError("a chat is not plain text")

        def apply_chat(self, messages: object, **options: object) -> list[int]:
            seen.update(options)
            return [1]

    monkeypatch.setattr(backend, "tokenizer", Spy())
    prepared(backend, chat_template_kwargs={"enable_thinking": False})
    assert seen["template_kwargs"] == {"enable_thinking": False}
    assert seen["add_generation_prompt"] is True


def test_biases_penalties_and_a_least_length_reach_the_row(backend: StubBackend):
    generation = prepared(
        backend,
        seed=1,
        max_tokens=9,
        logit_bias={"5": 2, "6": -100, "7": 0},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        min_tokens=3,
        n=2,
        logprobs=True,
    )
    assert generation.sampling == Sampling(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        seed=1,
        logit_bias=((5, 2.0), (6, -100.0)),
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        min_tokens=3,
    )
    assert (generation.num_choices, generation.num_top_logprobs, generation.echo) == (2, 0, None)


def test_a_repetition_penalty_may_come_from_the_generation_config():
    defaults = SamplingDefaults.of_generation_config({"repetition_penalty": 1.05})
    assert defaults.repetition_penalty == 1.05


def test_choices_have_seeds_of_their_own_which_follow_from_the_requests():
    settings = Sampling(temperature=1.0, seed=-5, top_k=3)
    seeds = [settings.for_choice(index).seed for index in range(16)]
    assert seeds[0] == -5
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds[1:])
    assert seeds == [settings.for_choice(index).seed for index in range(16)]
    assert settings.for_choice(3).top_k == 3
    assert set(seeds[1:]).isdisjoint(Sampling(seed=-4).for_choice(index).seed for index in range(16))


def test_an_answer_may_not_carry_more_log_probabilities_than_the_limit(backend: StubBackend):
    limits = Limits(max_logprobs=4 * 2 * 6)
    fields: dict[str, object] = {"n": 2, "logprobs": True, "top_logprobs": 5, "temperature": 1.0}
    assert prepared(backend, limits, max_tokens=4, **fields).num_top_logprobs == 5
    with pytest.raises(InvalidRequest, match="told 60 log-probabilities; the most is 48") as caught:
        prepared(backend, limits, max_tokens=5, **fields)
    assert caught.value.param == "logprobs"
    assert prepared(backend, limits, max_tokens=5).max_tokens == 5
