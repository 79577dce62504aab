"""Whom a node of a cluster can host, by its resources."""

from deployments.nodes import hosted, is_one_machine
from deployments.settings import Place, Placement, Settings

MAC = {"CPU": 8.0, "apple_silicon": 1.0}


def test_a_node_hosts_the_roles_that_its_resources_let_it_have() -> None:
    placement = Placement(
        router=Place(resources={"node:__internal_head__": 0.01}),
        target=Place(num_cpus=2.0, resources={"apple_silicon": 0.1, "big": 1.0}),
        drafter=Place(resources={"small": 1.0}),
    )
    settings = Settings(placement=placement)
    assert hosted(settings, {**MAC, "big": 1.0}) == {"Target"}
    assert hosted(settings, {**MAC, "big": 1.0, "small": 1.0}) == {"Target", "Drafter"}
    assert hosted(settings, {**MAC, "big": 1.0, "CPU": 1.0}) == set()
    assert hosted(settings, {"CPU": 1.0, "node:__internal_head__": 1.0}) == {"Router"}
    elsewhere = Settings(local_lanes=False, remote_lanes=("there:1",))
    assert hosted(elsewhere, MAC) == {"Router"}
    assert hosted(Settings(drafter=None), MAC) == {"Router", "Target"}


def test_a_cluster_is_one_machine_if_no_other_node_has_a_cpu() -> None:
    here, without = {"Alive": True, "Resources": MAC}, {"Alive": True, "Resources": {"CPU": 0.0}}
    gone = {"Alive": False, "Resources": {}}
    assert is_one_machine([here, without, gone])
    assert not is_one_machine([here, here])
