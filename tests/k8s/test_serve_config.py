"""The Serve configurations: Ray's own schema, no key that it would ignore, settings of ours, room to run."""

import json
import shlex
import types
import typing
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from deployments import proxy
from deployments.jobs import batch
from deployments.rpc.options import grpc_options
from deployments.settings import Settings, load_settings
from tests.k8s.manifests import SERVED, of_kind, pod_templates, ray_service, serve_config


def unknown_keys(value: Any, annotation: Any, where: str) -> list[str]:
    """Keys that a schema would drop: Ray's ignores what it does not know."""
    models = [model for model in flat(annotation) if isinstance(model, type) and issubclass(model, BaseModel)]
    if isinstance(value, list):
        inner = [arg for model in flat(annotation) for arg in typing.get_args(model)]
        return [k for i, v in enumerate(value) for a in inner for k in unknown_keys(v, a, f"{where}[{i}]")]
    if not isinstance(value, dict) or not models:
        return []
    (model,) = models
    found = [f"{where}.{key}" for key in value if key not in model.model_fields]
    for key, field in model.model_fields.items():
        if key in value:
            found += unknown_keys(value[key], field.annotation, f"{where}.{key}")
    return found


def flat(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for arg in typing.get_args(annotation) for member in flat(arg)]
    return [annotation]


@pytest.mark.parametrize("folder", SERVED)
def test_the_configuration_fits_rays_schema_without_a_key_that_is_ignored(folder: str) -> None:
    config = serve_config(folder)
    ServeDeploySchema.model_validate(config)
    assert unknown_keys(config, ServeDeploySchema, "") == []


def test_a_key_that_ray_would_ignore_is_found() -> None:
    config = serve_config("overlays/two-lanes")
    config["applications"][0]["deployments"][0]["max_ongoing_reqs"] = 3
    config["http_options"]["ports"] = 1
    config["extra"] = {}
    ServeDeploySchema.model_validate(config)  # it does
    found = unknown_keys(config, ServeDeploySchema, "")
    assert found == [".extra", ".http_options.ports", ".applications[0].deployments[0].max_ongoing_reqs"]


@pytest.mark.parametrize("folder", SERVED)
def test_arguments_are_settings_and_deployments_are_ours(folder: str) -> None:
    from deployments.app import build

    (application,) = serve_config(folder)["applications"]
    assert application["import_path"] == "deployments.app:build"
    settings = load_settings(flags=application["args"], environment={})
    assert settings.api_keys_file is not None
    assert callable(build)
    assert {d["name"] for d in application.get("deployments", ())} <= {"Router", "Target", "Drafter"}


@pytest.mark.parametrize("folder", SERVED)
def test_grpc_is_served_as_up_serves_it(folder: str) -> None:
    wanted = grpc_options(Settings().grpc_port)
    ours = [name for name in wanted["grpc_servicer_functions"] if "mlx" not in name]  # an extra of its own
    assert serve_config(folder)["grpc_options"] == {**wanted, "grpc_servicer_functions": ours}


@pytest.mark.parametrize("folder", SERVED)
def test_proxies_have_the_environment_that_they_have_under_up(folder: str) -> None:
    pods = [pod for name, pod in pod_templates(folder).items() if name.startswith("RayService")]
    assert pods
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        given = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert proxy.VARIABLES.items() <= given.items()


@pytest.mark.parametrize("folder", SERVED)
def test_the_workers_have_room_for_all_replicas(folder: str) -> None:
    (application,) = serve_config(folder)["applications"]
    places = Settings.model_validate(application["args"]).placement
    asked: dict[str, float] = {}
    for place in (places.router, places.target, places.drafter):
        for name, amount in {"CPU": place.num_cpus, **place.resources}.items():
            asked[name] = asked.get(name, 0.0) + amount * place.replicas
    offered = dict.fromkeys(asked, 0.0)
    for group in ray_service(folder)["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        parameters = group["rayStartParams"]
        (shell_word,) = shlex.split(parameters.get("resources", "{}"))  # it is pasted into a command line
        custom = json.loads(shell_word)
        for name, amount in {"CPU": float(parameters["num-cpus"]), **custom}.items():
            offered[name] = offered.get(name, 0.0) + amount * group["replicas"]
    assert all(offered[name] >= amount for name, amount in asked.items()), (asked, offered)


@pytest.mark.parametrize("folder", SERVED)
def test_blas_threads_are_the_workers_cpus_where_mlx_computes_on_them(folder: str) -> None:
    (application,) = serve_config(folder)["applications"]
    settings = Settings.model_validate(application["args"])
    group = ray_service(folder)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    if settings.local_lanes and not settings.placement.target.resources:
        assert str(settings.blas_threads) == group["rayStartParams"]["num-cpus"]


def test_blas_threads_of_the_batch_are_its_nodes_cpus() -> None:
    (job,) = of_kind("batch", "RayJob")
    group = job["spec"]["rayClusterSpec"]["headGroupSpec"]
    (container,) = group["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    settings = load_settings(environment=environment)
    assert str(settings.blas_threads) == container["resources"]["limits"]["cpu"]
    assert group["rayStartParams"]["num-cpus"] == container["resources"]["limits"]["cpu"]


def test_the_batch_job_says_what_its_own_parser_takes() -> None:
    (job,) = of_kind("batch", "RayJob")
    python, flag, module, *words = shlex.split(job["spec"]["entrypoint"])
    assert (python, flag, module) == ("python", "-m", batch.__name__)
    given = batch_parser().make_context("batch", words).params  # an unknown flag or a bad value raises
    assert (given["standalone"], given["url"]) == (True, None)
    (container,) = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (given["input_"], given["output"]):
        assert any(path.startswith(f"{mount}/") for mount in mounts)
    with pytest.raises(Exception, match="No such option"):  # typer brings a click of its own
        batch_parser().make_context("batch", [*words, "--in-fligth", "4"])


def batch_parser() -> Any:
    """As ``python -m deployments.jobs.batch`` makes it."""
    app = typer.Typer()
    app.command()(batch.main)
    return typer.main.get_command(app)
