"""The doctor: each finding has a level and a remedy, the exit code follows the worst, nothing is hidden."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_core import blas  # before MLX

# isort: split
from deployments import cli
from deployments.doctor import DoctorOptions, cluster, examine, models, ports, remote, software, token, trial
from deployments.doctor.chats import EXPECTED_WALK
from deployments.doctor.finding import Finding, Report, error, ok, warning
from deployments.doctor.node_memory import NodeMemory, check_nodes, loaded_by
from deployments.memory import Pair, read_pair
from deployments.memory_limit import Limit
from deployments.settings import Place, Placement, Settings
from dflash_core.checkpoints import read_drafter_spec
from dflash_core.pair import DRAFTER, TARGET
from dflash_core.workload import Totals
from tests.deployments.other_cluster import other_cluster

AGREED = {"dflash-serve": "0.1.0", "python": "3.11.7", "ray": "2.60.0", "mlx": "0.32.4", "platform": "linux"}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return read_pair(TARGET, DRAFTER, rows=16)


def levels(findings: Iterator[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_a_finding_has_a_remedy_exactly_if_it_is_not_well() -> None:
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "error", "broken")
    with pytest.raises(ValueError, match="remedy"):
        Finding("x", "ok", "fine", "do something")


def test_warnings_alone_exit_with_0_and_an_error_with_1() -> None:
    assert Report.of([ok("a", "fine"), warning("b", "slow", "hurry")]).exit_code == 0
    assert Report.of([ok("a", "fine"), error("b", "broken", "mend")]).exit_code == 1


def test_two_backends_of_mlx_in_one_environment_are_an_error() -> None:
    finding = software.check_backends({"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"})
    assert finding.level == "error"
    assert "mlx-cpu 0.32.4, mlx-cuda-13 0.32.4" in finding.message
    assert "BACKEND=cuda13" in finding.remedy
    assert software.check_backends({"mlx-cpu": "0.32.4"}).level == "ok"
    assert software.check_backends({}).level == "error"


def test_what_is_installed_meets_our_own_requirements() -> None:
    assert software.check_versions().level == "ok"


def test_an_unmet_requirement_is_an_error_that_names_both_versions() -> None:
    lines = ["numpy>=999", "no-such-distribution>=1", "ray>=2", "pytest>=999; extra == 'test'"]
    finding = software.check_versions(lines)
    assert finding.level == "error"
    assert finding.message.count("is needed") == 2
    assert "no-such-distribution is not installed" in finding.message


def test_a_compiler_without_headers_is_a_warning(tmp_path: Path) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: cmath: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    finding = software.check_compiler(blas.BlasReport(is_needed=True, compiler=str(broken)))
    assert (finding.level, "cmath" in finding.message) == ("warning", True)
    assert software.check_compiler(blas.BlasReport(is_needed=True)).level == "warning"
    assert software.check_compiler(blas.BlasReport(is_needed=False)).level == "ok"


def test_a_missing_blas_names_the_package_to_install() -> None:
    finding = software.check_blas(blas.BlasReport(is_needed=True, loader_error="no such file"))
    assert finding.level == "warning"
    assert blas.PACKAGE in finding.remedy


@pytest.mark.parametrize(
    ("environment", "content", "mode", "level"),
    [
        ({"RAY_AUTH_MODE": "token"}, "secret", 0o600, "ok"),
        ({}, "secret", 0o600, "warning"),  # serve deploy and ray job would get a 401
        ({"RAY_AUTH_MODE": "token"}, "secret", 0o644, "warning"),
        ({"RAY_AUTH_MODE": "token"}, "", 0o600, "error"),
        ({"RAY_AUTH_MODE": "token"}, None, 0, "warning"),
        ({"RAY_AUTH_MODE": "disabled"}, "secret", 0o600, "warning"),
        ({"RAY_AUTH_MODE": "tokens"}, "secret", 0o600, "error"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret"}, None, 0, "ok"),
    ],
)
def test_mode_and_token_must_agree(
    tmp_path: Path, environment: dict[str, str], content: str | None, mode: int, level: str
) -> None:
    if content is not None:
        (tmp_path / ".ray").mkdir()
        file = tmp_path / ".ray" / "auth_token"
        file.write_text(content)
        file.chmod(mode)
    finding = token.check_token(environment, tmp_path)
    assert finding.level == level
    assert "secret" not in json.dumps(finding.facts) + finding.message + finding.remedy


@pytest.mark.parametrize(
    ("command", "owner"),
    [
        (["/x/site-packages/ray/core/src/ray/raylet/raylet", "--node"], "ray"),
        (["/x/bin/python", "-u", "/x/site-packages/ray/dashboard/agent.py"], "ray"),
        (["ray::ServeReplica:dflash:Target"], "ray"),
        (["/x/bin/python", "/x/bin/dflash-serve", "up"], "dflash-serve"),
        (["/usr/bin/sshd", "-D"], None),
        (["vim", "notes/ray/dashboard.txt"], None),
        ([], None),
    ],
)
def test_processes_are_told_apart_by_their_command_lines(command: list[str], owner: str | None) -> None:
    assert ports.owner_of(command) == owner


@pytest.fixture
def listening_process(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A process that looks like Ray's dashboard and listens; gives pid and port."""
    folder = tmp_path / "ray" / "dashboard"
    folder.mkdir(parents=True)
    script = folder / "agent.py"
    script.write_text(
        "import socket, sys\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\n"
        "print(s.getsockname()[1], flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.kill()


def test_every_listening_port_of_ray_is_found(listening_process: tuple[int, int]) -> None:
    pid, port = listening_process
    (mine,) = [listener for listener in ports.listeners() if listener.pid == pid]
    assert (mine.port, mine.owner, mine.process, mine.is_local) == (port, "ray", "agent.py", True)


@pytest.fixture
def servers() -> Iterator[dict[str, int]]:
    """Processes that were started in each mode; gives their pids."""
    with contextlib.ExitStack() as stack:
        found: dict[str, int] = {}
        for mode in ("token", "disabled", ""):
            environment = {"RAY_AUTH_MODE": mode} if mode else {}
            process = subprocess.Popen(["sleep", "600"], env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
            found[mode] = process.pid
        yield found


def listening(pid: int, address: str = "0.0.0.0", process: str = "gcs_server") -> ports.Listener:
    return ports.Listener(address, 6379, pid, process, "ray")


def test_a_cluster_is_open_by_its_own_mode_whatever_this_shell_says(
    servers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    proxy = ports.Listener("127.0.0.1", 8000, 8, "ray::ProxyActor", "ray")
    for mode, level in (("token", "ok"), ("disabled", "warning"), ("", "warning")):
        found = [listening(servers[mode]), proxy]
        finding = ports.check_listeners(found)
        assert finding.level == level, mode
        assert all(str(listener) in finding.message for listener in found)
    assert f"ask for no token: gcs_server ({servers['']})" in finding.message
    assert ports.check_listeners([listening(servers[""], "127.0.0.1")]).level == "ok"
    beside = [listening(servers["token"]), listening(servers[""], "127.0.0.1")]
    assert ports.check_listeners(beside).level == "ok"


def test_a_cluster_whose_mode_cannot_be_seen_is_a_warning_that_says_so() -> None:
    finding = ports.check_listeners([listening(7, process="raylet")], asks=lambda pid: None)
    assert (finding.level, "cannot be seen: raylet (7)" in finding.message) == ("warning", True)
    assert "as the user who started Ray" in finding.remedy
    assert token.asks_for_token(2**22 + 1) is None  # there is no such process


def test_a_port_that_another_process_holds_is_an_error() -> None:
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        settings = Settings(http_port=other.getsockname()[1])
        findings = {finding.check: finding for finding in ports.check_wanted(settings, [])}
    assert findings["http_port"].level == "error"
    assert "--http-port" in findings["http_port"].remedy


@pytest.mark.parametrize(
    ("process", "level"),
    [
        ("ray::ProxyActor", "ok"),
        ("ray::ProxyActor.is_drained", "ok"),
        ("ray::ServeController", "error"),
        ("gcs_server", "error"),
    ],
)
def test_a_port_is_held_by_serve_only_if_its_proxy_holds_it(process: str, level: str) -> None:
    found = [ports.Listener("0.0.0.0", 8000, 7, process, "ray")]
    findings = {finding.check: finding for finding in ports.check_wanted(Settings(), found)}
    assert findings["http_port"].level == level
    assert ("held by Serve" in findings["http_port"].message) == (level == "ok")
    assert level == "ok" or process in findings["http_port"].message


def test_without_keys_only_http_beyond_this_machine_is_a_warning() -> None:
    """Ray's gRPC proxy takes all interfaces, but without keys our methods refuse callers from elsewhere."""
    alone = key_finding(Settings())
    assert (alone.level, alone.message) == ("ok", "none: only callers of this machine are let in")
    open_ = key_finding(Settings(host="0.0.0.0"))
    assert (open_.level, open_.message) == ("warning", "HTTP will be open to the network, without keys")


def test_a_file_of_keys_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert key_finding(Settings(api_keys_file=file)).level == "error"
    file.write_text("# none yet\n")
    assert key_finding(Settings(api_keys_file=file)).level == "error"
    file.write_text("secret\n")
    found = key_finding(Settings(api_keys_file=file))
    assert (found.level, "secret" in found.message) == ("ok", False)


def key_finding(settings: Settings) -> Finding:
    return {finding.check: finding for finding in ports.check_wanted(settings, [])}["api_keys"]


def test_nodes_that_run_the_same_agree_although_their_platforms_differ() -> None:
    mac = {**AGREED, "platform": "darwin arm64", "mlx-metal": "0.32.4"}
    (finding,) = cluster.check_agreement({"10.0.0.1": AGREED, "10.0.0.2": mac})
    assert (finding.level, "10.0.0.2" in finding.message) == ("ok", True)


def test_nodes_on_one_machine_are_told_apart_and_dead_ones_left_out() -> None:
    nodes = [
        {"NodeManagerAddress": address, "NodeID": node_id, "Alive": alive}
        for address, node_id, alive in [
            ("10.0.0.1", "aaaaaaaa", True),
            ("10.0.0.1", "bbbbbbbb", True),
            ("10.0.0.2", "cccccccc", True),
            ("10.0.0.2", "dddddddd", False),
        ]
    ]
    assert {name: node["NodeID"] for name, node in cluster.name_nodes(nodes).items()} == {
        "10.0.0.1 (aaaaaa)": "aaaaaaaa",
        "10.0.0.1 (bbbbbb)": "bbbbbbbb",
        "10.0.0.2": "cccccccc",
    }


def test_another_version_of_ray_is_an_error_and_of_mlx_a_warning() -> None:
    other = {**AGREED, "ray": "2.59.0", "mlx": "0.32.3"}
    found = {
        f.message.split()[0]: f for f in cluster.check_agreement({"10.0.0.1": AGREED, "10.0.0.2": other})
    }
    assert {name: finding.level for name, finding in found.items()} == {"ray": "error", "mlx": "warning"}
    assert "2.59.0 on 10.0.0.2" in found["ray"].message


def test_a_node_that_does_not_answer_is_an_error_with_its_last_words() -> None:
    silent = RuntimeError("traceback\nModuleNotFoundError: No module named 'deployments'")
    answers: dict[str, cluster.Versions | Exception] = {"10.0.0.1": AGREED, "10.0.0.2": silent}
    first, second = cluster.check_agreement(answers)
    assert (first.level, second.level) == ("error", "ok")
    assert "10.0.0.2" in first.message
    assert "No module named 'deployments'" in first.message


def test_a_resource_that_no_node_offers_is_an_error() -> None:
    target = Place(replicas=2, resources={"apple_silicon": 1})
    settings = Settings(placement=Placement(target=target))
    (finding,) = cluster.check_placement(settings, {"CPU": 8.0, "apple_silicon": 1.0})
    assert (finding.level, "apple_silicon: 2 asked for" in finding.message) == ("error", True)
    assert '{"apple_silicon": 2}' in finding.remedy
    assert levels(cluster.check_placement(settings, {"CPU": 8.0, "apple_silicon": 2.0})) == ["ok"]


def test_the_embedded_pair_is_well() -> None:
    assert levels(models.check_files(Settings())) == ["ok", "ok", "ok"]


def test_files_that_do_not_fit_are_errors_in_the_readers_words(tmp_path: Path) -> None:
    (finding,) = models.check_files(Settings(target=str(tmp_path / "none")))
    assert (finding.check, finding.level) == ("target", "error")
    swapped = list(models.check_files(Settings(target=str(TARGET), drafter=str(TARGET))))
    assert [(f.check, f.level) for f in swapped][-1] == ("pair", "error")
    assert levels(models.check_files(Settings(drafter=None)))[-1] == "warning"


def test_the_memory_sum_is_shown_and_adds_up(pair: Pair) -> None:
    need = pair.need(8192)
    assert need.total == sum(part.bytes for part in need.parts)
    # float32 on the CPU: 12.4 M and 2.6 M parameters of four bytes, and the embedding again.
    sizes = {part.name: part.bytes for part in need.parts}
    if blas.prepare().is_needed:
        assert sizes["target weights"] == pytest.approx(4 * 12.4e6, rel=0.01)
        assert sizes["its copy of embedding and head"] == 4 * 8192 * 256
    finding = models.check_memory(pair, Limit(1 << 40, "test"))
    assert finding.level == "ok"
    assert all(part.name in finding.message for part in need.parts)


def test_weights_that_do_not_fit_are_an_error_and_long_rows_a_warning_that_names_what_fits(
    pair: Pair,
) -> None:
    full, least = pair.need(pair.max_context).total, pair.need(1024).total
    between = models.check_memory(pair, Limit((full + least) // 2, "test"))
    assert between.level == "warning"
    fitting = pair.longest((full + least) // 2)
    assert f"max_context: {fitting}" in between.remedy
    assert pair.need(fitting).total <= (full + least) // 2 < pair.need(fitting + 1024).total
    small = models.check_memory(pair, Limit(least - 1, "test"))
    assert (small.level, "max_rows: 15" in small.remedy) == ("error", True)
    assert "smaller" in models.check_memory(pair, Limit(2**20, "test")).remedy


def test_a_walk_far_below_the_model_card_is_a_warning() -> None:
    fingerprint, expected = next(iter(EXPECTED_WALK.items()))
    played = Totals(seconds=1.0, tokens=10, rounds=100, row_rounds=100, walked=round(100 * expected))
    whole = trial.Trial(played, played, is_whole=True)
    assert levels(trial.check_trial(whole, fingerprint)) == ["ok", "ok"]
    poor = replace(whole, walk=replace(played, walked=round(50 * expected)))
    first, _ = trial.check_trial(poor, fingerprint)
    assert (first.level, f"{expected:.2f} expected" in first.message) == ("warning", True)
    assert levels(trial.check_trial(poor, "another drafter")) == ["ok", "ok"]
    assert levels(trial.check_trial(replace(whole, is_whole=False), fingerprint))[0] == "warning"


def test_a_drafter_that_nobody_knows_is_warned_of_only_if_its_drafts_do_not_pay() -> None:
    for walked, level in ((0, "warning"), (49, "warning"), (60, "ok")):
        played = Totals(seconds=1.0, tokens=10, rounds=100, row_rounds=100, walked=walked)
        first, _ = trial.check_trial(trial.Trial(played, played, is_whole=True), "another drafter")
        assert (first.check, first.level) == ("acceptance", level), walked


def test_without_a_drafter_the_speed_is_told_alone() -> None:
    played, fingerprint = trial.run_trial(TARGET, None, seconds=0.5)
    (speed,) = trial.check_trial(played, fingerprint)
    assert (speed.check, speed.facts["tokens_per_second"] > 0) == ("speed", True)
    options = DoctorOptions(trial_s=0.5)
    assert list(examine(Settings(drafter=None), options, {}))[-1].check == "speed"


def test_the_model_card_of_the_embedded_drafter_says_the_same() -> None:
    fingerprint = read_drafter_spec(DRAFTER, None).fingerprint
    card = (DRAFTER.parent / "README.md").read_text(encoding="utf-8")
    assert f"{EXPECTED_WALK[fingerprint]:.2f} drafts a row-round" in card


def test_a_slow_product_is_a_warning() -> None:
    assert trial.check_product(1.2).level == "ok"
    assert trial.check_product(33.0).level == "warning"


def test_the_pair_walks_as_its_card_says() -> None:
    played, fingerprint = trial.run_trial(TARGET, DRAFTER, seconds=0.5)
    assert fingerprint is not None
    acceptance, speed = trial.check_trial(played, fingerprint)
    assert acceptance.level == "ok", acceptance.message
    assert acceptance.facts["walked"] == pytest.approx(EXPECTED_WALK[fingerprint], rel=0.02)
    assert speed.facts["tokens_per_second"] > 0


def test_the_command_prints_json_and_exits_with_1_on_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--json", "--target", str(tmp_path / "none")])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    faults = [finding for finding in report["findings"] if finding["level"] == "error"]
    assert [fault["check"] for fault in faults if fault["check"] == "target"] == ["target"]
    assert all(finding["remedy"] for finding in report["findings"] if finding["level"] != "ok")


def test_the_command_without_a_trial_shows_each_finding_and_a_summary() -> None:
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}
    result = CliRunner().invoke(cli.app, ["doctor", "--no-trial"], env={**os.environ, **environment})
    shown = {line.split(":")[0].split()[-1] for line in result.stdout.splitlines() if ": " in line}
    expected = {
        "versions",
        "backend",
        "blas",
        "compiler",
        "token",
        "ports",
        "target",
        "pair",
        "device",
        "memory",
    }
    assert expected <= shown
    assert " error" in result.stdout.splitlines()[-1]


def test_each_nodes_memory_is_held_against_the_roles_that_it_can_have(pair: Pair) -> None:
    placement = Placement(
        target=Place(resources={"dflash_target": 1}), drafter=Place(resources={"dflash_drafter": 1})
    )
    settings = Settings(placement=placement, prefix_bytes=0)
    drafter_alone = pair.need(pair.max_context, frozenset({"Drafter"})).total
    small, big = Limit(drafter_alone, "test"), Limit(1 << 40, "test")
    offered = {
        "big": {"dflash_target": 1.0},
        "small": {"dflash_drafter": 1.0},
        "wrong": {"dflash_target": 1.0},
        "both": {"dflash_target": 1.0, "dflash_drafter": 1.0},
        "busy": {"dflash_target": 1.0},
        "silent": {"dflash_target": 1.0},
        "spare": {},
    }
    limits: dict[str, NodeMemory | Exception] = {
        "big": NodeMemory(big, frozenset()),
        "small": NodeMemory(small, frozenset()),
        "wrong": NodeMemory(Limit(2**20, "test"), frozenset()),
        "both": NodeMemory(small, frozenset({"Target"})),
        "busy": NodeMemory(Limit(0, "test"), frozenset({"Target"})),
        "silent": RuntimeError("trace\nNo module named mlx"),
    }
    nodes = {name: {"Resources": {"CPU": 4.0, **resources}} for name, resources in offered.items()}
    found = list(check_nodes(settings, pair, nodes, limits))
    assert [finding.level for finding in found] == ["ok", "ok", "error", "ok", "ok", "warning"]
    told = {finding.message.partition(",")[0]: finding.message for finding in found}
    assert "for target: fits" in told["big"]
    assert "drafter weights" not in told["big"]
    assert "target weights" not in told["small"]
    assert "for target and drafter: fits" in told["both"]  # what is loaded is not counted again
    assert "loaded already" in told["busy"]
    assert "No module named mlx" in told["silent"]


def test_replicas_are_known_by_the_titles_of_their_processes() -> None:
    titles = ["ray::ServeReplica:dflash:Target.play", "ray::ServeReplica:dflash:Router", "grep Drafter"]
    assert loaded_by(titles) == {"Target"}


@pytest.fixture
def broken_mlx(tmp_path: Path) -> Path:
    """A folder whose MLX cannot be imported: its CUDA backend, on a machine without NVIDIA's driver."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text('raise ImportError("libcuda.so.1: cannot open")\n')
    return tmp_path


def run_doctor(first_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    program = "from deployments.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "doctor", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(first_path), str(root)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_mlx_that_cannot_be_imported_is_a_finding_with_its_remedy(broken_mlx: Path) -> None:
    run = run_doctor(broken_mlx)
    assert (run.returncode, run.stderr) == (1, "")
    assert "ERROR    device: MLX does not work here: libcuda.so.1: cannot open" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("1 error, ")
    as_json = run_doctor(broken_mlx, "--json")
    findings = {finding["check"]: finding for finding in json.loads(as_json.stdout)["findings"]}
    assert (as_json.returncode, findings["device"]["level"]) == (1, "error")
    assert "libcuda.so.1" in findings["device"]["remedy"]


def test_several_backends_are_found_although_mlx_cannot_be_imported(broken_mlx: Path) -> None:
    for name in ("mlx_cpu", "mlx_cuda_13"):
        folder = broken_mlx / f"{name}-0.32.4.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.4\n")
    run = run_doctor(broken_mlx, "--json")
    findings = {finding["check"]: finding for finding in json.loads(run.stdout)["findings"]}
    assert (run.returncode, findings["backend"]["level"]) == (1, "error")
    assert "mlx-cpu 0.32.4, mlx-cuda-13 0.32.4" in findings["backend"]["message"]
    assert "device" not in findings  # nobody imports what may be either of them


def elsewhere(*addresses: str, **changed: object) -> Settings:
    """A router and nothing else."""
    return Settings.model_validate({"local_lanes": False, "remote_lanes": addresses, **changed})


def test_a_router_without_lanes_of_its_own_asks_for_a_routers_place_alone() -> None:
    (finding,) = cluster.check_placement(elsewhere("there:1"), {"CPU": 0.5})
    assert (finding.level, finding.message) == ("ok", "CPU 0.5")
    assert levels(cluster.check_placement(Settings(), {"CPU": 0.5})) == ["error"]


def test_it_is_not_asked_for_weights_memory_or_a_trial() -> None:
    findings = list(examine(elsewhere("127.0.0.1:1"), DoctorOptions(), {}))
    checks = [finding.check for finding in findings]
    assert not {"chat", "pair", "device", "memory", "acceptance"} & set(checks)
    assert checks[-1] == "remote_lanes"
    assert (findings[-1].level, "127.0.0.1:1: away" in findings[-1].message) == ("error", True)


async def lane_findings(settings: Settings) -> list[Finding]:
    return await asyncio.to_thread(lambda: list(remote.check_lanes(settings)))


async def test_remote_lanes_are_asked_for_health_key_and_model() -> None:
    names = ("dflash-embedded",)
    async with other_cluster(names=names, keys=("right",)) as there, other_cluster(names=("x",)) as another:
        addresses = [f"127.0.0.1:{other.port}" for other in (there, another)]
        found = await lane_findings(elsewhere(*addresses, max_context=2048, remote_key="right"))
        assert [finding.facts["state"] for finding in found] == ["ok", "another model"]
        assert [finding.level for finding in found] == ["ok", "warning"]  # rows have a lane
        assert found[0].message.endswith("ok, room for 16 rows")
        (locked,) = await lane_findings(elsewhere(addresses[0], max_context=2048, remote_key="wrong"))
        assert (locked.level, "remote_key_file" in locked.remedy) == ("error", True)
        assert "wrong" not in locked.message + locked.remedy
        (short,) = await lane_findings(elsewhere(addresses[0], remote_key="right"))
        assert "4096 tokens there" in short.message
        (beside,) = await lane_findings(elsewhere(addresses[0], local_lanes=True))
        assert beside.level == "warning"


async def test_a_router_that_could_not_start_is_an_error(tmp_path: Path) -> None:
    (finding,) = await lane_findings(elsewhere("there:1", remote_key_file=tmp_path / "none"))
    assert (finding.level, str(tmp_path / "none") in finding.message) == ("error", True)
