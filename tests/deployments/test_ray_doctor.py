"""The doctor against a running cluster: nodes answer, and what listens is seen."""

import pytest
import ray

from deployments.doctor import cluster, ports
from deployments.doctor.software import versions
from deployments.settings import Settings

pytestmark = pytest.mark.ray


def test_a_node_of_a_running_cluster_tells_its_versions(ray_cluster: int) -> None:
    answers = cluster.ask_nodes()
    assert list(answers.values()) == [versions()]
    assert [finding.level for finding in cluster.check_agreement(answers)] == ["ok"]
    placement = list(cluster.check_placement(Settings(), ray.cluster_resources()))
    assert [finding.level for finding in placement] == ["ok"]


def test_ports_of_ray_and_of_its_proxy_are_listed(ray_cluster: int) -> None:
    found = ports.listeners()
    assert {"gcs_server", "raylet"} <= {listener.process for listener in found}
    assert [listener.owner for listener in found if listener.port == ray_cluster] == ["ray"]
