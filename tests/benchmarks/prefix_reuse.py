"""Time to the first token of a long chat's second turn, with and without a saved first turn.

    python -m tests.benchmarks.prefix_reuse --prompts FILE [--tokens 2000] [--repeat 5]
    dflash-serve up &
    python -m tests.benchmarks.prefix_reuse --prompts FILE --url http://127.0.0.1:8000

Each repetition plays both arms on chats of their own: *cold* asks the second turn of a chat that nobody has
asked before, *warm* asks its first turn and then the second. The first repetition is not counted. With
--plain, in this process, also what saving costs: a first turn without a store, beside the one with it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflash_core  # loads the BLAS that MLX is to find, so it comes first

# isort: split
import httpx2

from deployments.bench import machine
from deployments.boundaries import find_opener, places_to_save
from dflash_core.loading import load_lane
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.prefix_store import Origin, PrefixStore
from dflash_core.prefixes import Prefixes, Snapshot
from dflash_core.request import RowId, RowRequest, WindowId
from dflash_core.text import Tokenizer
from dflash_core.width import FixedWidth
from dflash_core.window import Window, WindowPolicy

Chat = list[dict[str, str]]


class Result:
    """One answered turn."""

    def __init__(self) -> None:
        self.first_s = self.rest_s = 0.0
        self.text = ""
        self.cached = self.prompt = self.accepted = 0


class Here:
    """The embedded pair in this process, one row at a time."""

    def __init__(self, target: Path, drafter: Path, width: int):
        self.tokenizer = Tokenizer.load(target)
        self._lane = load_lane(target, drafter)
        self._opener = find_opener(self.tokenizer)
        self._policy = WindowPolicy(width=FixedWidth(width), max_rows=1)
        self._store: PrefixStore[Snapshot] = PrefixStore(2**30)
        self._number = 0

    def ask(self, chat: Chat, max_tokens: int, *, saves: bool = True) -> Result:
        """Play one turn to its end."""
        self._number += 1
        ids, result = tuple(self.tokenizer.apply_chat(chat)), Result()
        origin = Origin(self._lane.target_spec.fingerprint, self._lane.drafter_spec.fingerprint, "float32")
        prefixes = Prefixes(self._store, origin, self._lane.drafter) if saves else None
        window = Window(
            WindowId(str(self._number)), self._lane.target, self._lane.drafter, self._policy, prefixes
        )
        began = time.perf_counter()
        window.admit(
            RowRequest(
                RowId("row"),
                ids,
                max_tokens,
                stop_token_ids=self.tokenizer.eos_token_ids,
                save_at=places_to_save(ids, self._opener),
            )
        )
        tokens: list[int] = []
        while window.has_work:
            report = window.step()
            for row in report.rows:
                if not tokens:
                    result.first_s = time.perf_counter() - began - _round_seconds(report.seconds)
                tokens += row.tokens
                result.cached += row.cached_tokens
                result.accepted += row.accepted
        result.rest_s = time.perf_counter() - began - result.first_s
        window.close()
        result.text, result.prompt = self.tokenizer.decode(tokens), len(ids)
        return result


def _round_seconds(seconds: dict[str, float]) -> float:
    """Of a step, what came after the prompt was read: its first round."""
    return sum(value for phase, value in seconds.items() if phase != "prefill")


class There:
    """A running server."""

    def __init__(self, url: str):
        self._client = httpx2.Client(base_url=url, timeout=300)

    def ask(self, chat: Chat, max_tokens: int, *, saves: bool = True) -> Result:
        """Stream one turn."""
        body = {
            "model": "demo",
            "messages": chat,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        result, began = Result(), time.perf_counter()
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")), result, began)
        result.rest_s = time.perf_counter() - began - result.first_s
        return result

    def _take(self, chunk: dict[str, Any], result: Result, began: float) -> None:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and not result.first_s:
                result.first_s = time.perf_counter() - began
            result.text += text
        if chunk.get("usage"):
            result.prompt = chunk["usage"]["prompt_tokens"]
            result.cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            result.accepted = chunk["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


def long_chat(tokenizer: Tokenizer, questions: Sequence[str], tokens: int, name: str) -> Chat:
    """A chat of about ``tokens`` that begins like no other and ends with a question."""
    chat: Chat = [{"role": "system", "content": f"This is chat {name}."}]
    number = 0
    while len(tokenizer.apply_chat(chat)) < tokens - 30:
        chat.append({"role": "user", "content": questions[number % len(questions)]})
        chat.append({"role": "assistant", "content": " ".join(questions[number : number + 4])})
        number += 1
    return [*chat, {"role": "user", "content": questions[number % len(questions)]}]


def spread(values: Sequence[float]) -> str:
    """Least, median and most, in ms."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{1e3 * low:8.1f} {1e3 * middle:8.1f} {1e3 * high:8.1f} ms"


def main() -> None:
    """Play, interleaved, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--url", default=None)
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--drafter", type=Path, default=DRAFTER)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="also a first turn that saves nothing")
    options = parser.parse_args()
    lines = options.prompts.read_text(encoding="utf-8").split("\n")
    questions = [json.loads(line)["body"]["messages"][-1]["content"] for line in lines if line]
    tokenizer = Tokenizer.load(options.target)
    print(json.dumps(machine()))
    assert dflash_core.blas.prepare() is not None
    player = There(options.url) if options.url else Here(options.target, options.drafter, options.width)
    arms: dict[str, list[Result]] = {
        "first turn, nothing saved": [],
        "first turn, saving": [],
        "cold": [],
        "warm": [],
    }
    for repetition in range(options.repeat + 1):
        played = _play(player, tokenizer, questions, options, f"{time.time_ns()}")
        line = {name: round(1e3 * result.first_s, 1) for name, result in played.items()}
        print(f"repetition {repetition}, ms to the first token: {line}", flush=True)
        if repetition:
            for name, result in played.items():
                arms[name].append(result)
    for name, results in arms.items():
        if results:
            first, rest = spread([r.first_s for r in results]), spread([r.rest_s for r in results])
            last = results[-1]
            print(
                f"{name:26s} first token {first}, rest {rest}; prompt {last.prompt}, cached {last.cached}, "
                f"accepted {sorted(r.accepted for r in results)}"
            )
    ratio = statistics.median(r.first_s for r in arms["warm"]) / statistics.median(
        r.first_s for r in arms["cold"]
    )
    print(f"warm over cold: {ratio:.3f} (medians)")


def _play(
    player: Here | There,
    tokenizer: Tokenizer,
    questions: Sequence[str],
    options: argparse.Namespace,
    name: str,
) -> dict[str, Result]:
    question = {"role": "user", "content": questions[-1]}
    played: dict[str, Result] = {}
    if isinstance(player, Here) and options.plain:
        chat = long_chat(tokenizer, questions, options.tokens, f"{name} b")
        played["first turn, nothing saved"] = player.ask(chat, options.answer, saves=False)
    chat = long_chat(tokenizer, questions, options.tokens, f"{name} a")
    played["first turn, saving"] = first = player.ask(chat, options.answer)
    second = [*chat, {"role": "assistant", "content": first.text}, question]
    other = [{"role": "system", "content": f"This is chat {name} c."}, *second[1:]]
    played["cold"] = player.ask(other, options.answer)
    played["warm"] = player.ask(second, options.answer)
    return played


if __name__ == "__main__":
    main()
