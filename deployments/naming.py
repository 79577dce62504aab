"""What a replica and its cluster are called."""

import hashlib
import uuid

import ray
from ray import serve
from ray.serve.exceptions import RayServeException


def replica_name(outside: str = "local") -> str:
    """This replica's id in its cluster; ``outside`` Serve, as in tests of a class alone, that word."""
    try:
        return serve.get_replica_context().replica_id.unique_id
    except RayServeException:
        return outside


def cluster_id() -> str:
    """This application's id among those that call each other: the same on all its replicas.

    Outside Serve, as in tests of a class alone, a new one each time.
    """
    try:
        app = serve.get_replica_context().app_name
    except RayServeException:
        return uuid.uuid4().hex[:16]
    words = f"{ray.get_runtime_context().get_session_name()}/{app}"
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
