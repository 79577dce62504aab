"""``make faults`` stops what it started when it is told to end in the middle."""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from tests.deployments.conftest import ROOT

pytestmark = [pytest.mark.timeout(400), pytest.mark.ray]


def marked(mark: str) -> list[psutil.Process]:
    """Live processes that have inherited a variable."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("FAULTS_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_run_that_is_told_to_end_leaves_no_process() -> None:
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAULTS_TEST_MARK": mark}
    command = [sys.executable, "-m", "tests.faults", "--only", "control"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        try:
            assert run.stdout is not None
            assert any("the application is up" in line for line in run.stdout)
            assert len(marked(mark)) > 5  # replicas, proxy and Ray's own
            run.send_signal(signal.SIGTERM)
            assert run.wait(120) == 130
            until = time.monotonic() + 60
            while (left := marked(mark)) and time.monotonic() < until:
                time.sleep(0.2)
            assert not left
        finally:
            for process in marked(mark):
                process.kill()
