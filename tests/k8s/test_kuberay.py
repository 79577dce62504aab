"""RayService and RayJob hold to KubeRay's definitions, strictly: an unknown key is refused, not dropped."""

import copy
import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.k8s.kuberay import KINDS, RayService
from tests.k8s.kuberay_crds import CONDENSED, condense, validator
from tests.k8s.manifests import FOLDERS, SERVED, build, pod_templates, ray_service, serve_config

# A folder with ray.io_rayservices.yaml and ray.io_rayjobs.yaml of the operator's release, to compare with.
CRDS = os.environ.get("KUBERAY_CRDS", "")


def resources(folder: str) -> list[dict[str, Any]]:
    return [manifest for manifest in build(folder) if manifest["apiVersion"] == "ray.io/v1"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_custom_resources_have_only_known_keys_and_obey_the_operators_rules(folder: str) -> None:
    found = resources(folder)
    assert found
    for manifest in found:
        KINDS[manifest["kind"]].model_validate(manifest)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("spec",), "serveConfigV3", "x"),
        (("spec", "rayClusterConfig"), "authOption", {}),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0), "replica", 1),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0), "replicas", 9),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams"), "num-cpus", 0),
        (("spec", "upgradeStrategy"), "type", "Recreate"),
    ],
)
def test_a_wrong_key_or_value_is_refused(path: tuple[str | int, ...], key: str, value: object) -> None:
    manifest: Any = copy.deepcopy(ray_service("base"))
    place = manifest
    for step in path:
        place = place[step]
    place[key] = value
    with pytest.raises(ValidationError):
        RayService.model_validate(manifest)


@pytest.mark.skipif(not CRDS, reason="KUBERAY_CRDS names no folder with the operator's files")
def test_the_condensed_definitions_are_the_operators() -> None:
    assert json.loads(CONDENSED.read_text(encoding="utf-8")) == condense(Path(CRDS))


@pytest.mark.parametrize("folder", FOLDERS)
def test_custom_resources_fit_the_operators_own_definitions(folder: str) -> None:
    for manifest in resources(folder):
        validator(manifest["kind"]).validate(manifest)


@pytest.mark.parametrize(
    "path", [("spec",), ("spec", "rayClusterConfig", "headGroupSpec", "template", "spec")]
)
def test_the_operators_own_definitions_refuse_an_unknown_key(path: tuple[str, ...]) -> None:
    manifest = copy.deepcopy(ray_service("base"))
    place = manifest
    for step in path:
        place = place[step]
    place["unknown"] = 1
    assert not validator("RayService").is_valid(manifest)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_clusters_ray_is_the_installed_one(folder: str) -> None:
    for manifest in resources(folder):
        spec = manifest["spec"]
        cluster = spec.get("rayClusterConfig") or spec["rayClusterSpec"]
        assert cluster["rayVersion"] == version("ray")


@pytest.mark.parametrize("folder", SERVED)
def test_an_old_cluster_outlives_its_longest_row(folder: str) -> None:
    from deployments.settings import Settings

    (application,) = serve_config(folder)["applications"]
    grace = Settings.model_validate(application["args"]).grace_s
    assert ray_service(folder)["spec"]["rayClusterDeletionDelaySeconds"] > grace
    templates = {name: t for name, t in pod_templates(folder).items() if name.startswith("RayService")}
    assert len(templates) >= 2
    assert all(t["spec"]["terminationGracePeriodSeconds"] > grace for t in templates.values())
