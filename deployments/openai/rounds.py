"""The extension ``dflash: {"rounds": true}``: what a round did for a choice, beside the text it gave."""

from typing import Any

from deployments.generation import TextTokens
from deployments.view import row_label

Json = dict[str, Any]


def round_json(event: TextTokens, row_id: str) -> Json | None:
    """Write an event's round, if the client asked for it.

    ``text`` holds what became certain in this round, each piece with the number of its token in the answer:
    text that was held back comes later, and still says whose it is. Together they are the answer before
    thoughts and calls are told apart.
    """
    detail = event.round
    if detail is None:
        return None
    played = {"width": detail.width, "drafted": detail.drafted}
    played |= {"walked": detail.walked, "accepted": detail.accepted}
    tokens = zip(event.token_ids, detail.sources, strict=True)
    return {
        "row": row_label(row_id),
        "round": played if detail.width else None,
        "tokens": [{"id": token_id, "source": source} for token_id, source in tokens],
        "text": [list(piece) for piece in detail.pieces],
    }
