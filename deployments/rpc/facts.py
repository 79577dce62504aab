"""What is served and how it goes, as messages."""

from collections.abc import Iterable, Mapping

from deployments import __version__
from deployments.generation import ModelCard
from deployments.openai.prepare import effective_defaults
from deployments.remote.route import Route
from deployments.rpc.dflash.v1 import dflash_pb2 as pb
from deployments.rpc.spec_fields import known_fields
from deployments.telemetry import Snapshot

_STATES: Mapping[object, pb.ServerState] = {
    "ok": pb.SERVER_STATE_OK,
    "loading": pb.SERVER_STATE_LOADING,
    "draining": pb.SERVER_STATE_DRAINING,
}


def models(card: ModelCard, vocab_size: int) -> pb.ListModelsResponse:
    """One entry for each served name."""
    return pb.ListModelsResponse(models=[_model(name, card, vocab_size) for name in card.names])


def _model(name: str, card: ModelCard, vocab_size: int) -> pb.Model:
    defaults = effective_defaults(card)
    model = pb.Model(
        name=name,
        root=card.names[0],
        max_context=card.max_context,
        vocabulary_size=vocab_size,
        drafter=card.drafter,
        block_size=card.block_size,
        defaults=pb.Sampling(
            temperature=defaults["temperature"],
            top_p=defaults["top_p"],
            top_k=int(defaults["top_k"]),
            min_p=defaults["min_p"],
        ),
        obeyed_fields=sorted(known_fields()),
    )
    model.created.FromSeconds(card.created)
    return model


def stats(
    card: ModelCard, health: Mapping[str, object], snapshots: Iterable[Snapshot]
) -> pb.GetStatsResponse:
    """Sums over the engines of a router."""
    snapshots = tuple(snapshots)

    def total(name: str) -> int:
        return int(sum(sum(snapshot.values[name].values()) for snapshot in snapshots))

    finished: dict[str, int] = {}
    for snapshot in snapshots:
        for (reason,), count in snapshot.values["vllm:request_success_total"].items():
            finished[reason] = finished.get(reason, 0) + int(count)
    return pb.GetStatsResponse(
        state=_STATES.get(health.get("status"), pb.SERVER_STATE_UNSPECIFIED),
        model=card.names[0],
        running=total("vllm:num_requests_running"),
        waiting=total("vllm:num_requests_waiting"),
        windows=_count(health, "windows"),
        prompt_tokens=total("vllm:prompt_tokens_total"),
        generated_tokens=total("vllm:generation_tokens_total"),
        rounds=total("dflash_rounds_total"),
        speculation=pb.Speculation(
            rounds=total("dflash_row_rounds_total"),
            drafted=total("vllm:spec_decode_num_draft_tokens_total"),
            walked=total("dflash_walked_tokens_total"),
            accepted=total("vllm:spec_decode_num_accepted_tokens_total"),
        ),
        finished=finished,
        version=__version__,
        room=_count(health, "room") if "room" in health else None,
    )


def routes(cluster: str, ways: Iterable[Route]) -> pb.GetStatsResponse:
    """The part that tells where rows may be played."""
    told = [pb.Route(clusters=way.clusters, room=way.room) for way in ways]
    return pb.GetStatsResponse(cluster=cluster, routes=told)


def _count(health: Mapping[str, object], name: str) -> int:
    value = health.get(name)
    return value if isinstance(value, int) else 0
