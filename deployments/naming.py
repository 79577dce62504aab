"""What a replica is called."""

from ray import serve
from ray.serve.exceptions import RayServeException


def replica_name(outside: str = "local") -> str:
    """This replica's id in its cluster; ``outside`` Serve, as in tests of a class alone, that word."""
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return outside
