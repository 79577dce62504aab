"""The application as Serve sees it: built from arguments, with limits far above the router's own."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as call_builder
from ray.serve._private.build_app import build_app

from deployments.app import build
from deployments.scaling import ROWS, WAITING, by_rows
from deployments.settings import Place, Placement, Settings, SettingsError
from deployments.up import ready_line

pytestmark = pytest.mark.filterwarnings("ignore")


def deployments(settings: Settings) -> dict:
    built = build_app(build(settings), name="dflash", default_runtime_env={})
    return {deployment.name: deployment for deployment in built.deployments}


def test_serve_run_may_give_arguments_as_text_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_rows: 2\nmax_queue: 7\n")
    app = call_builder(build, {"config": str(file), "max_rows": "4"})
    settings = app._bound_deployment.init_args[0]
    assert (settings.max_rows, settings.max_queue) == (4, 7)


def test_serve_run_refuses_what_it_does_not_know() -> None:
    with pytest.raises(SettingsError, match="max_row: there is no such setting"):
        call_builder(build, {"max_row": "4"})


def test_every_deployment_drains_longer_than_a_row_may_live() -> None:
    settings = Settings()
    for deployment in deployments(settings).values():
        config = deployment._deployment_config
        assert config.graceful_shutdown_timeout_s > settings.window_max_age_s + settings.request_timeout_s
        assert config.max_ongoing_requests > 100 * settings.max_rows


def test_without_a_drafter_there_is_no_drafter_deployment() -> None:
    assert set(deployments(Settings(drafter=None))) == {"Router", "Target"}
    assert set(deployments(Settings())) == {"Router", "Target", "Drafter"}


def test_each_deployment_asks_ray_for_what_its_place_says() -> None:
    placement = Placement(
        router=Place(num_cpus=0.25, resources={"node:__internal_head__": 0.01}),
        target=Place(num_cpus=2.0, resources={"apple_silicon": 0.01, "dflash_target": 1.0}),
        drafter=Place(num_cpus=1.0, resources={"dflash_drafter": 1.0}),
    )
    built = deployments(Settings(placement=placement))
    asked = {name: deployment.ray_actor_options for name, deployment in built.items()}
    for name, place in Settings(placement=placement).places.items():
        assert asked[name]["resources"] == place.resources
        assert asked[name]["num_cpus"] == place.num_cpus
    assert len(asked) == 3


def test_a_change_of_replica_counts_changes_no_replicas_arguments() -> None:
    more = Settings(placement=Placement(target=Place(replicas=3)))
    arguments = [deployments(s)["Target"].init_args[0] for s in (Settings(), more)]
    assert arguments[0] == arguments[1]
    assert deployments(more)["Target"].num_replicas == 3


def test_targets_scale_by_rows_and_drafters_by_the_time_that_they_compute() -> None:
    several = Place(replicas=2, max_replicas=5)
    placement = Placement(router=Place(max_replicas=6), target=several, drafter=several)
    built = deployments(Settings(max_rows=16, placement=placement))
    target = built["Target"]._deployment_config.autoscaling_config
    assert (target.min_replicas, target.max_replicas, target.target_ongoing_requests) == (2, 5, 12)
    assert target.policy.get_policy().__name__ == by_rows.__name__
    drafter = built["Drafter"]._deployment_config.autoscaling_config
    assert (drafter.min_replicas, drafter.max_replicas, drafter.target_ongoing_requests) == (2, 5, 0.6)
    assert drafter.policy.is_default_policy_function()
    assert built["Target"].init_args[0].max_windows == 12  # or the sixth router's queue would find no place


@pytest.mark.parametrize(
    ("rows", "waiting", "replicas"),
    [((), (), 2), ((0, 0), (0, 0), 0), ((12, 0), (0, 0), 1), ((16, 16), (7, 7), 4), ((16, 16), (7, 3), 4)],
)
def test_the_policy_counts_every_row_and_the_queue_once(
    rows: tuple[int, ...], waiting: tuple[int, ...], replicas: int
) -> None:
    told = {ROWS: dict(enumerate(rows)), WAITING: dict(enumerate(waiting))} if rows else {}
    context = SimpleNamespace(
        aggregated_metrics=told,
        target_num_replicas=2,
        config=SimpleNamespace(target_ongoing_requests=12.0),
    )
    assert by_rows(cast(Any, context)) == (replicas, {})


def test_a_router_without_lanes_of_its_own_needs_neither_target_nor_drafter() -> None:
    built = deployments(Settings(local_lanes=False, remote_lanes=("10.0.0.5:9000",)))
    assert set(built) == {"Router"}
    assert built["Router"].init_args[2] is None


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("fd00::7", "[fd00::7]")],
)
def test_the_ready_line_is_one_line_with_a_command_that_parses(host: str, reached: str) -> None:
    line = ready_line(Settings(host=host, http_port=8123, blas_threads=3))
    assert "\n" not in line
    assert " · BLAS threads a replica: 3 · " in line
    words = shlex.split(line.partition("try: ")[2])
    assert words[0] == "curl"
    assert f"http://{reached}:8123/v1/chat/completions" in words
