"""NVIDIA's AIPerf: a small load, with our own metrics read beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import MODEL, TARGET, URL, check

OUTPUT = Path("artifacts")
QUESTIONS = ("What is the capital of France?", "What is 12 + 30?", "What is the capital of Japan?")


@check("a profile of 12 streamed chats")
def _():
    Path("input.jsonl").write_text("".join(json.dumps({"text": question}) + "\n" for question in QUESTIONS))
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL, "--url", URL]
    command += ["--endpoint-type", "chat", "--streaming", "--input-file", "input.jsonl"]
    command += ["--custom-dataset-type", "single_turn", "--use-server-token-count", "--tokenizer", TARGET]
    command += ["--concurrency", "2", "--request-count", "12", "--ui", "simple", "--no-gpu-telemetry"]
    command += ["--output-artifact-dir", str(OUTPUT)]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(run.stdout[-8000:], run.stderr[-8000:], file=sys.stderr)
    assert run.returncode == 0, f"exit code {run.returncode}"
    report = json.loads(next(OUTPUT.rglob("profile_export_aiperf.json")).read_text())
    assert report["request_count"]["avg"] == 12, report["request_count"]
    return f"{report['output_token_throughput']['avg']:.0f} tok/s"


@check("it reads our metrics")
def _():
    files = list(OUTPUT.rglob("*server_metrics*"))
    assert files, "no server metrics in its artifacts"
    names = [name for name in ("vllm:generation_tokens", "dflash_") for f in files if name in f.read_text()]
    assert names, f"none of our series in {[file.name for file in files]}"
    return ", ".join(file.name for file in files)
