"""The doctor against a running cluster: nodes answer, and what listens is seen."""

import pytest
import ray

from deployments.doctor import cluster, ports
from deployments.doctor.node_memory import check_nodes, describe_memory
from deployments.doctor.software import versions
from deployments.memory import read_pair
from deployments.settings import Settings
from dflash_core.pair import DRAFTER, TARGET

pytestmark = pytest.mark.ray


def test_a_node_of_a_running_cluster_tells_its_versions(ray_cluster: int) -> None:
    answers = cluster.ask_nodes(cluster.describe_node)
    assert list(answers.values()) == [versions()]
    assert [finding.level for finding in cluster.check_agreement(answers)] == ["ok"]
    placement = list(cluster.check_placement(Settings(), ray.cluster_resources()))
    assert [finding.level for finding in placement] == ["ok"]


def test_a_node_of_a_running_cluster_tells_its_memory(ray_cluster: int) -> None:
    (answer,) = cluster.ask_nodes(describe_memory).values()
    assert not isinstance(answer, Exception), answer
    assert answer.limit.bytes > 0
    pair = read_pair(TARGET, DRAFTER, rows=16)
    nodes = cluster.name_nodes(ray.nodes())
    (finding,) = check_nodes(Settings(), pair, nodes, cluster.ask_nodes(describe_memory))
    assert finding.message.startswith(f"{next(iter(nodes))}, for target and drafter: ")


def test_ports_of_ray_and_of_its_proxy_are_listed(ray_cluster: int) -> None:
    found = ports.listeners()
    assert {"gcs_server", "raylet"} <= {listener.process for listener in found}
    assert [listener.owner for listener in found if listener.port == ray_cluster] == ["ray"]
