"""What kustomize makes of each folder, and the tools to look at it. A missing tool skips, with its name."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
FOLDERS = ("base", "overlays/two-lanes", "overlays/cuda", "overlays/remote-lanes", "batch")
SERVED = FOLDERS[:4]

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """A program of the environment, of ``build/bin``, or of the machine."""
    places = (Path(sys.executable).parent, ROOT / "build" / "bin")
    found = next((str(p / name) for p in places if (p / name).is_file()), None) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@functools.cache
def build(folder: str) -> tuple[Manifest, ...]:
    """All manifests of a folder."""
    command = [tool("kubectl"), "kustomize", str(K8S / folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return tuple(yaml.safe_load_all(run.stdout))


def of_kind(folder: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in build(folder) if manifest["kind"] == kind]


def ray_service(folder: str) -> Manifest:
    (service,) = of_kind(folder, "RayService")
    return service


def serve_config(folder: str) -> Manifest:
    return yaml.safe_load(ray_service(folder)["spec"]["serveConfigV2"])


def pod_templates(folder: str) -> dict[str, Manifest]:
    """Every pod that a folder leads to, by a name for messages."""
    found: dict[str, Manifest] = {}
    for manifest in build(folder):
        spec = manifest.get("spec", {})
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        cluster = spec.get("rayClusterConfig") or spec.get("rayClusterSpec")
        if cluster is not None:
            found[f"{name} head"] = cluster["headGroupSpec"]["template"]
            for group in cluster.get("workerGroupSpecs", ()):
                found[f"{name} {group['groupName']}"] = group["template"]
        if "submitterPodTemplate" in spec:
            found[f"{name} submitter"] = spec["submitterPodTemplate"]
        if manifest["kind"] == "StatefulSet":
            found[name] = spec["template"]
    return found


def bytes_of(quantity: str) -> int:
    """``6Gi`` and its like as bytes."""
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    return int(quantity[:-2]) * units[quantity[-2:]]
