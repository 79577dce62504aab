"""Every folder builds, its core kinds are valid, and what must match does: ports, labels, secrets, sizes."""

import json
import subprocess
from typing import Any

import pytest
import yaml

from deployments import __version__
from tests.k8s.manifests import (
    FOLDERS,
    K8S,
    SERVED,
    build,
    bytes_of,
    of_kind,
    pod_templates,
    ray_service,
    serve_config,
    tool,
)

KUBERNETES = "1.33"
CORE = ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1")
SECRETS = {
    "dflash-ray-token": {"auth_token"},
    "dflash-api-keys": {"keys", "metrics"},
    "dflash-redis": {"password"},
    "dflash-remote-key": {"key"},
}


def core_manifests(folder: str) -> list[dict[str, Any]]:
    """Manifests of core kinds, with pods and services of other kinds brought out of them."""
    found = [manifest for manifest in build(folder) if manifest["apiVersion"] in CORE]
    for template in pod_templates(folder).values():
        found.append(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        )
    for manifest in of_kind(folder, "RayService"):
        found.append({"apiVersion": "v1", "kind": "Service", **manifest["spec"]["serveService"]})
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_core_kinds_are_valid_strictly(folder: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for manifest in core_manifests(folder):
        validate(manifest, KUBERNETES, strict=True)


def test_a_misspelt_key_in_a_pod_is_refused() -> None:
    checker = pytest.importorskip("kubernetes_validate")
    template = json.loads(json.dumps(next(iter(pod_templates("base").values()))))
    template["spec"]["containers"][0]["resource"] = {}
    pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
    with pytest.raises(checker.ValidationError):
        checker.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_pod_runs_as_root_or_gains_rights(folder: str) -> None:
    templates = pod_templates(folder)
    assert templates
    for name, template in templates.items():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert set(container["resources"]["limits"]) >= {"cpu", "memory"}, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_image_has_a_fixed_tag_and_ours_is_this_version(folder: str) -> None:
    for template in pod_templates(folder).values():
        for container in template["spec"]["containers"]:
            name, _, tag = container["image"].partition(":")
            assert tag not in ("", "latest")
            if name == "dflash-serve":
                assert tag.split("-")[0] == __version__


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_the_secrets_of_the_readme_are_used_and_none_is_in_the_manifests(folder: str) -> None:
    readme = (K8S / "README.md").read_text(encoding="utf-8")
    assert of_kind(folder, "Secret") == []
    used = list(secret_keys(build(folder)))
    assert used
    for name, key in used:
        assert key in SECRETS[name]
        assert f"create secret generic {name} " in readme
        assert f"{key}=" in readme


def secret_keys(value: Any) -> Any:
    """Every (name, key) of a secret in a manifest."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from secret_keys(item)
    elif isinstance(value, dict):
        for kind in ("secretKeyRef", "credentials"):
            if kind in value:
                yield value[kind]["name"], value[kind]["key"]
        if "secretName" in value:
            keys = [item["key"] for item in value.get("items", ())] or ["auth_token"]
            yield from ((value["secretName"], key) for key in keys)
        for item in value.values():
            yield from secret_keys(item)


@pytest.mark.parametrize("folder", SERVED)
def test_ports_of_the_configuration_the_containers_and_the_service_agree(folder: str) -> None:
    from deployments.settings import Settings

    service = {p["name"]: p for p in ray_service(folder)["spec"]["serveService"]["spec"]["ports"]}
    assert serve_config(folder)["http_options"]["port"] == service["serve"]["port"]
    assert Settings().grpc_port == service["serve-grpc"]["port"]
    assert service["serve-grpc"]["appProtocol"] == "kubernetes.io/h2c"
    for name, template in pod_templates(folder).items():
        if name.startswith("RayService"):
            ports = {p["name"]: p["containerPort"] for p in template["spec"]["containers"][0]["ports"]}
            assert {n: ports[n] for n in service} == {n: p["targetPort"] for n, p in service.items()}


@pytest.mark.parametrize("folder", SERVED)
def test_every_selector_of_ours_selects_a_pod(folder: str) -> None:
    labels = [template.get("metadata", {}).get("labels", {}) for template in pod_templates(folder).values()]
    checked = set()
    for manifest in build(folder):
        spec = manifest.get("spec", {})
        wanted = {
            "Service": {"matchLabels": spec.get("selector")},
            "PodDisruptionBudget": spec.get("selector"),
            "NetworkPolicy": spec.get("podSelector"),
        }.get(manifest["kind"])
        if wanted is not None:
            assert any(selects(wanted, label) for label in labels), manifest["metadata"]["name"]
            checked.add((manifest["kind"], manifest["metadata"]["name"]))
    assert checked >= {("NetworkPolicy", "dflash-ray"), ("PodDisruptionBudget", "dflash-workers")}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Kubernetes' rule: all of both kinds of condition. KeyError for an operator that is not in use here."""
    answers = {
        "In": lambda key, values: labels.get(key) in values,
        "Exists": lambda key, _: key in labels,
        "DoesNotExist": lambda key, _: key not in labels,
    }
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        answers[rule["operator"]](rule["key"], rule.get("values", ()))
        for rule in selector.get("matchExpressions", ())
    )


def test_a_selector_whose_expressions_no_pod_meets_is_found() -> None:
    (policy,) = (m for m in of_kind("base", "NetworkPolicy") if m["metadata"]["name"] == "dflash-ray")
    selector = policy["spec"]["podSelector"]
    assert selects(selector, {"dflash-serve/role": "head"})
    assert not selects(selector, {"dflash-serve/role": "batch"})
    assert not selects(selector, {})


@pytest.mark.parametrize("folder", SERVED)
def test_what_ray_hands_out_is_what_the_pods_have(folder: str) -> None:
    for group in ray_service(folder)["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert group["rayStartParams"]["num-cpus"] == limits["cpu"]


def test_the_embedded_pair_and_ray_fit_a_cpu_worker() -> None:
    from deployments.memory import read_pair
    from dflash_core.pair import DRAFTER, TARGET

    (group,) = ray_service("base")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limit = bytes_of(group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"])
    (application,) = serve_config("base")["applications"]
    pair = read_pair(TARGET, DRAFTER, rows=application["args"]["max_rows"])
    object_store = 0.3 * limit  # Ray's own share
    assert pair.need(pair.max_context).total + object_store + 3 * 2**30 < limit


def test_the_image_has_a_clean_dockerfile() -> None:
    run = subprocess.run(
        [tool("hadolint"), str(K8S / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_the_image_holds_what_mlx_and_the_probes_need() -> None:
    from dflash_core.blas import COMPILER, PACKAGE

    text = (K8S / "Dockerfile").read_text(encoding="utf-8")
    final = text.partition(" AS run\n")[2].partition("\nFROM ")[0]
    for package in (PACKAGE, COMPILER, "wget"):
        assert f" {package}" in final
    assert "USER 10001" in final
    users = {
        t["spec"]["securityContext"]["runAsUser"] for n, t in pod_templates("base").items() if "Ray" in n
    }
    assert users == {10001}
    assert f"dflash-serve:{__version__} " in text


def test_only_the_cuda_image_asks_for_gpus() -> None:
    _, *stages = (K8S / "Dockerfile").read_text(encoding="utf-8").split("\nFROM ")
    asking = [stage.split("\n")[0] for stage in stages if "NVIDIA_VISIBLE_DEVICES" in stage]
    assert asking == ["run AS run-cuda13"]
    assert stages[-1] == "run-${BACKEND}\n"


LOOSE = ("batch/claim.yaml", "batch/files.yaml")


@pytest.mark.parametrize("name", LOOSE)
def test_what_is_applied_by_itself_is_valid_strictly_and_in_the_readme(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    manifest = yaml.safe_load((K8S / name).read_text(encoding="utf-8"))
    validate(manifest, KUBERNETES, strict=True)
    assert f"-f k8s/{name}" in (K8S / "README.md").read_text(encoding="utf-8")
    for container in manifest["spec"].get("containers", ()):
        assert container["image"] == f"dflash-serve:{__version__}"


def test_the_batchs_claim_is_made_before_its_job_and_outlives_it() -> None:
    claim, files = (yaml.safe_load((K8S / name).read_text(encoding="utf-8")) for name in LOOSE)
    assert of_kind("batch", "PersistentVolumeClaim") == []
    (job,) = of_kind("batch", "RayJob")
    for pod in (files, job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]):
        (volume,) = pod["spec"]["volumes"]
        assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert pod["spec"]["securityContext"]["fsGroup"] == 10001
