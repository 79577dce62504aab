"""Serve's routing for targets: a call that names a lane goes to that replica."""

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class LaneRouter(ConsistentHashRouter):
    """Takes a call's session id for the name of a replica.

    Where there is none of that name, any other is as good: a window is opened on it, or it says that it is
    full. Serve's other routers hand replicas to calls in the order in which they came, so that one call may
    get what was chosen for another; this one's parent does not.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that the call names; else whichever its parent takes."""
        lane = pending_request.metadata.session_id if pending_request is not None else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == lane]
        if pending_request is not None and named:
            pending_request.routing_context.should_backoff = True
            return [named]
        return await super().choose_replicas(candidate_replicas, pending_request)
