"""Ending an application so that its clients see their answers, or a 503, and never a route that is gone."""

import logging
import time
from collections.abc import Callable

from ray import serve
from ray.serve.exceptions import RayServeException

POLL_PERIOD_S = 0.2
CALL_TIMEOUT_S = 5.0

logger = logging.getLogger("dflash.draining")


def drain(app_name: str, timeout_s: float, say: Callable[[str], None] = logger.info) -> bool:
    """Let every router refuse new requests, and wait until those it has are over; False if time ran out.

    Serve takes the routes away before its replicas drain: whoever comes then gets the proxy's 404. A router
    that is gone holds nothing back.
    """
    end = time.monotonic() + timeout_s
    has_said = False
    while unfinished := _unfinished(app_name):
        if not has_said:
            say(f"waiting for running requests ({unfinished})")
            has_said = True
        if time.monotonic() >= end:
            logger.warning("%d requests were not over after %g s", unfinished, timeout_s)
            return False
        time.sleep(POLL_PERIOD_S)
    return True


def _unfinished(app_name: str) -> int:
    try:
        response = serve.get_app_handle(app_name).broadcast("drain")
        answers = response.results(timeout_s=CALL_TIMEOUT_S, return_exceptions=True)
    except (RayServeException, TimeoutError) as error:
        logger.debug("no router answers: %s", error)
        return 0
    # One that is too busy to answer still has requests; one that is gone has none.
    return sum(answer if isinstance(answer, int) else isinstance(answer, TimeoutError) for answer in answers)
