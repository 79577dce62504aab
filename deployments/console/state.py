"""What the page asks for twice a second: all routers, their windows, and the last rounds of each."""

from typing import Any

from deployments.generation import ModelCard
from deployments.view import Overview, RoundTrace, RouterView, RowTrace, WindowView

Json = dict[str, Any]

# Counters that the page makes rates of, by their names there.
_COUNTERS = {
    "tokens": "vllm:generation_tokens_total",
    "row_rounds": "dflash_row_rounds_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
_GAUGES = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}


def state_json(overview: Overview, card: ModelCard) -> Json:
    """Write an overview. Numbers and labels only: a viewer learns nothing of what others ask and are told."""
    return {
        "model": card.names[0],
        "drafter": card.drafter,
        "block_size": card.block_size,
        "asked": overview.asked,
        "missing": overview.num_missing,
        "routers": [_router(router) for router in overview.routers],
    }


def _router(router: RouterView) -> Json:
    values = router.snapshot.values
    numbers = {key: values[name].get((), 0.0) for key, name in (_COUNTERS | _GAUGES).items()}
    return {
        "engine": router.engine,
        "at": router.at,
        **{key: int(number) for key, number in numbers.items()},
        "windows": [_window(window) for window in router.windows],
    }


def _window(window: WindowView) -> Json:
    return {
        "id": window.window_id,
        "lane": window.lane,
        "takes_rows": window.is_joinable,
        "rows": window.num_rows,
        "rounds": [_round(played) for played in window.rounds],
    }


def _round(played: RoundTrace) -> Json:
    return {
        "number": played.number,
        "width": played.width,
        "ms": round(1000 * played.seconds, 1),
        "rows": [_row(row) for row in played.rows],  # bare lists: there may be hundreds
    }


def _row(row: RowTrace) -> list[str | int | None]:
    """Label, drafted, walked, accepted, the target's own, how it ended."""
    return [row.label, row.drafted, row.walked, row.accepted, row.own, row.finish]
