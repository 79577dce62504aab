"""Which address a job takes for the application, from Serve's account of itself."""

import inspect
from typing import Any

import pytest

from deployments.app import APP_NAME
from deployments.jobs import batch
from deployments.jobs.where import cluster_of, url_of
from dflash_core.errors import Unavailable


def details(host: str, proxies: dict[str, str], prefix: str = "/") -> dict[str, Any]:
    """Proxies by node: their address, with ! before those that are not healthy."""
    return {
        "applications": {"dflash": {"route_prefix": prefix}},
        "http_options": {"host": host, "port": 8123},
        "proxies": {
            node: {"node_ip": ip.lstrip("!"), "status": "STARTING" if ip.startswith("!") else "HEALTHY"}
            for node, ip in proxies.items()
        },
    }


@pytest.mark.parametrize(
    ("host", "proxies", "url"),
    [
        ("127.0.0.1", {"here": "10.0.0.1"}, "http://127.0.0.1:8123"),
        ("0.0.0.0", {"head": "10.0.0.9", "here": "10.0.0.1"}, "http://127.0.0.1:8123"),
        ("0.0.0.0", {"head": "10.0.0.9", "here": "!10.0.0.1"}, "http://10.0.0.9:8123"),
        ("0.0.0.0", {"head": "10.0.0.9"}, "http://10.0.0.9:8123"),
        ("::", {"here": "fd00::1"}, "http://[::1]:8123"),
        ("::", {"head": "fd00::9"}, "http://[fd00::9]:8123"),
    ],
)
def test_a_job_takes_its_own_nodes_proxy_or_else_another_that_it_can_reach(
    host: str, proxies: dict[str, str], url: str
) -> None:
    assert url_of("dflash", details(host, proxies), "here") == url


def test_an_application_beside_others_is_under_its_prefix() -> None:
    url = url_of("dflash", details("127.0.0.1", {"here": "10.0.0.1"}, "/chat"), "here")
    assert url == "http://127.0.0.1:8123/chat"


def test_a_proxy_on_another_nodes_loopback_is_out_of_reach_and_the_ways_out_are_named() -> None:
    with pytest.raises(Unavailable, match=r"--host 0\.0\.0\.0.*--url"):
        url_of("dflash", details("127.0.0.1", {"head": "10.0.0.9"}), "here")


def test_an_application_that_is_not_there_is_named_beside_those_that_are() -> None:
    with pytest.raises(Unavailable, match=r'no application "other".*found: dflash'):
        url_of("other", details("127.0.0.1", {"here": "10.0.0.1"}), "here")


def test_a_job_belongs_to_the_cluster_that_ray_names() -> None:
    assert cluster_of({"RAY_ADDRESS": "10.0.0.9:6379"}) == "10.0.0.9:6379"
    assert cluster_of({"RAY_ADDRESS": ""}) is None


def test_a_batch_looks_for_the_name_that_the_application_has() -> None:
    assert inspect.signature(batch.main).parameters["app"].default == APP_NAME
