"""The shared drafter context, which is there for measuring: it costs drafts, never tokens."""

from collections.abc import Iterator

import numpy as np
import pytest

from dflash_core.context import CONTEXT_POLICIES
from tests.core.engine_fixtures import (
    WINDOW,
    alone,
    eager,
    finish,
    local,
    opened,
    prompt,
    row,
    scripted,
    tiny_lane,
)

REQUESTS = [row("good", prompt(1, 9), 40), row("bad", prompt(2, 5), 40)]


@pytest.fixture(autouse=True, scope="module")
def _eager() -> Iterator[None]:
    with eager():
        yield


def test_policies_take_what_they_say_and_nothing_for_idle_slots() -> None:
    kept = np.array([4, 1, 0, 2], dtype=np.int32)
    assert CONTEXT_POLICIES["per_row"](kept).tolist() == [4, 1, 0, 2]
    assert CONTEXT_POLICIES["shared"](kept).tolist() == [4, 4, 0, 4]
    assert CONTEXT_POLICIES["shared"](np.zeros(2, dtype=np.int32)).tolist() == [0, 0]


@pytest.mark.parametrize(("context", "surplus"), [("per_row", 0), ("shared", 3)])
def test_under_a_shared_context_a_row_takes_features_of_tokens_that_it_never_kept(
    context: str, surplus: int
) -> None:
    lane = tiny_lane()
    drafter = scripted(lane, REQUESTS, lambda name, _: 3 if name == "good" else 0)
    with opened(lane, *REQUESTS, width=4, drafter=drafter, context=context) as window:
        while window.num_live < 2:
            window.step()
        slot = next(i for i, r in enumerate(window.rows) if r is not None and r.row_id == "bad")
        before = int(window.caches.lengths[slot])
        began = local(lane).context_lengths(WINDOW)[REQUESTS[1].row_id]
        num_rounds = 4
        for _ in range(num_rounds):
            window.step()
        assert window.caches.lengths[slot] == before + num_rounds  # nothing accepted, the bonus alone
        grown = local(lane).context_lengths(WINDOW)[REQUESTS[1].row_id] - began
        assert grown == num_rounds * (1 + surplus)


@pytest.mark.parametrize("accept", ["per_row", "clamp"])
def test_a_shared_context_changes_no_token(accept: str) -> None:
    lane = tiny_lane()
    drafter = scripted(lane, REQUESTS, lambda name, length: (length + len(name)) % 5)
    with opened(lane, *REQUESTS, width=8, drafter=drafter, context="shared", accept=accept) as window:
        reports = finish(window)
    said = {
        r.row_id: [t for report in reports for p in report.rows if p.row_id == r.row_id for t in p.tokens]
        for r in REQUESTS
    }
    assert said == {r.row_id: list(alone(lane, r)) for r in REQUESTS}
    assert max(report.live_rows for report in reports) == 2
