"""``dflash-serve generate`` on the embedded pair: what is streamed, and what the figures say."""

import io
import sys

import pytest

from deployments import cli, measuring
from deployments.generate import GenerateOptions, SamplingFlags, Summary, generate
from deployments.generation import SamplingDefaults
from dflash_core.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from dflash_core.pair import TARGET
from dflash_core.text import Tokenizer

PROMPT = "Write a Python function that adds two numbers."


def play(**options) -> tuple[str, Summary]:
    out = io.StringIO()
    summary = generate(GenerateOptions(**{"prompt": PROMPT, "width": 16, **options}), out)
    return out.getvalue(), summary


@pytest.fixture(scope="module")
def speculated() -> tuple[str, Summary]:
    return play()


def test_answer_is_the_same_without_drafts(speculated):
    text, summary = speculated
    classic_text, classic = play(drafter=None)
    assert "def add" in text
    assert classic_text == text
    assert (classic.tokens, classic.accepted) == (summary.tokens, 0)
    assert classic.rounds == classic.tokens - 1


def test_drafts_save_rounds_and_every_token_is_counted(speculated):
    _, summary = speculated
    assert summary.rounds < summary.tokens / 4
    # One token from the prefill, then each round's drafts and its bonus; the last bonus may be cut off.
    assert 0 <= 1 + summary.accepted + summary.rounds - summary.tokens <= 1


def test_width_1_does_not_draft(speculated):
    text, summary = play(width=1, max_tokens=8)
    assert speculated[0].startswith(text.removesuffix("\n"))
    assert (summary.tokens, summary.rounds, summary.accepted) == (8, 7, 0)


def test_answer_is_the_same_when_the_width_is_chosen_per_round(speculated):
    text, summary = play(width=None)
    assert (text, summary.tokens) == (speculated[0], speculated[1].tokens)


def test_costs_of_widths_are_measured_once(tmp_path, monkeypatch):
    first = play(width=None, cache_dir=tmp_path, max_tokens=8)
    assert [file.name.startswith("costs-") for file in tmp_path.iterdir()] == [True]
    known = []

    def measure_nothing(*_, **options):
        known.append(options["known"])
        return options["known"]

    monkeypatch.setattr(measuring, "measure_costs", measure_nothing)
    assert play(width=None, cache_dir=tmp_path, max_tokens=8)[0] == first[0]
    assert (1, 16) in known[0].table


def test_stop_string_ends_the_answer_and_is_not_part_of_it(speculated):
    text, summary = play(stop=("def add",))
    assert text == speculated[0].partition("def add")[0] + "\n"
    assert summary.tokens < speculated[1].tokens


def test_drafts_behind_a_stop_string_are_not_counted(speculated):
    _, summary = play(stop=(speculated[0][8:12],))
    assert 0 < summary.accepted == summary.tokens - 1  # the prefill gave the first token


def test_seed_repeats_a_sampled_answer():
    flags = SamplingFlags(temperature=1.0, seed=7)
    first, again = play(sampling=flags, max_tokens=24), play(sampling=flags, max_tokens=24)
    assert first[0] == again[0]
    assert str(first[1]).endswith("seed 7")


def test_raw_prompt_goes_in_as_it_is(speculated):
    tokenizer = Tokenizer.load(TARGET)
    chat = tokenizer.decode(tokenizer.apply_chat([{"role": "user", "content": PROMPT}]), skip_special=False)
    assert play(prompt=chat, is_raw=True)[0] == speculated[0]


def test_flags_left_out_are_the_models_own():
    defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1)
    sampling = SamplingFlags(top_k=0, seed=1).resolve(defaults)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.95, 0, 0.1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"prompt": "", "is_raw": True}, InvalidRequest),
        ({"max_tokens": 10**6}, ContextLengthExceeded),
        ({"target": "/no/such/folder"}, CheckpointError),
        ({"drafter": "/no/such/folder"}, CheckpointError),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_is_written(options, error):
    out = io.StringIO()
    with pytest.raises(error):
        generate(GenerateOptions(**{"prompt": PROMPT, **options}), out)
    assert out.getvalue() == ""


def test_command_writes_the_answer_to_stdout_and_the_figures_to_stderr(monkeypatch, capsys, cache_dir):
    arguments = ["generate", "What is the capital of France?", "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", ["dflash-serve", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    captured = capsys.readouterr()
    assert not stop.value.code
    assert captured.out == "The capital of France is Paris.\n"
    for word in ("tokens", "rounds", "accepted per round", "tok/s"):
        assert word in captured.err
    assert list(cache_dir.glob("costs-*.json")), "measured costs were not kept"


def test_prompt_comes_from_standard_input(monkeypatch, capsys):
    stdin = io.TextIOWrapper(io.BytesIO(b"What is the capital of France?\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "argv", ["dflash-serve", "generate", "-", "--temperature", "0"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == "The capital of France is Paris.\n"
