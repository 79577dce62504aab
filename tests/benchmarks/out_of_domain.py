"""Chats that the embedded drafter never saw the like of: its drafts fail, and widths must not cost anything.

    python -m tests.benchmarks.out_of_domain > ood.jsonl
    dflash-serve bench --prompts ood.jsonl --limit 24 --rows 4 --width auto --arms classic,per_row

Words drawn at random from other languages, numbers and noise, answered hot (temperature 1.6): what the target
says is then close to random as well. An OpenAI batch file, the same at every run.
"""

import json
import random
from typing import Any

SEED = 7
NUM_CHATS = 64
WORDS = [
    "Wanderung",
    "Fensterbank",
    "niemals",
    "Zwischenraum",
    "überall",
    "Brücke",
    "kalt",
    "łódka",
    "źdźbło",
    "zażółć",
    "szczęście",
    "ogród",
    "quizás",
    "ventana",
    "jamás",
    "lluvia",
    "tornillo",
    "ñandú",
    "forêt",
    "brûler",
    "néanmoins",
    "crépuscule",
    "vinaigre",
    "œuvre",
    "qzx",
    "vvrk",
    "0x7f3a",
    "9e-12",
    "%%$",
    "~~",
    ";;",
    "::=",
    "<<>>",
    "4711",
    "3.14159",
    "NaN",
    "λx.x",
    "∮",
    "≠",
    "⊕",
    "жизнь",
    "дождь",
    "тихо",
    "月",
    "雨",
    "山",
    "川",
]


def chats() -> list[dict[str, Any]]:
    """Lines of the file."""
    draw = random.Random(SEED)
    return [
        {
            "custom_id": f"ood{number:03d}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "demo",
                "messages": [{"role": "user", "content": " ".join(draw.choices(WORDS, k=12))}],
                "max_tokens": 96,
                "temperature": 1.6,
                "seed": number,
                "ignore_eos": True,
            },
        }
        for number in range(NUM_CHATS)
    ]


if __name__ == "__main__":
    for chat in chats():
        print(json.dumps(chat, ensure_ascii=False))
