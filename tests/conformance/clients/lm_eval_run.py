"""lm-eval's two clients of OpenAI servers, on tasks of our own: data sets are not always in reach."""

import json
import subprocess
import sys
from pathlib import Path

from checks import MODEL, TARGET, URL, check

TASKS = Path("tasks")
CAPITALS = (("France", "Paris"), ("Japan", "Tokyo"), ("Italy", "Rome"), ("Spain", "Madrid"))
GENERATE = """\
task: dflash_generate
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "What is the capital of {{{{country}}}}?"
doc_to_target: "{{{{capital}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 40
  temperature: 0
filter_list:
  - name: word
    filter:
      - function: regex
        regex_pattern: " is ([A-Z][a-z]+)"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOOSE = """\
task: dflash_choose
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: "{{{{capitals.index(capital)}}}}"
doc_to_choice: "{{{{capitals}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def prepare() -> None:
    TASKS.mkdir(exist_ok=True)
    data = (TASKS / "capitals.jsonl").absolute()
    words = [capital for _, capital in CAPITALS]
    lines = [json.dumps({"country": c, "capital": w, "capitals": words}) for c, w in CAPITALS]
    data.write_text("\n".join(lines) + "\n")
    (TASKS / "generate.yaml").write_text(GENERATE.format(data=data))
    (TASKS / "choose.yaml").write_text(CHOOSE.format(data=data))


def run(model: str, arguments: str, task: str, *more: str) -> dict:
    output = Path(f"results-{task}")
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments]
    command += ["--tasks", task, "--include_path", str(TASKS), "--output_path", str(output), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-4000:], done.stderr[-8000:], file=sys.stderr)
    assert done.returncode == 0, " ".join(done.stderr.strip().splitlines()[-1:])
    newest = max(output.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    return json.loads(newest.read_text())["results"][task]


prepare()


@check("local-chat-completions: generate_until")
def _():
    arguments = f"model={MODEL},base_url={URL}/v1/chat/completions,num_concurrent=2,tokenized_requests=False"
    results = run("local-chat-completions", arguments, "dflash_generate", "--apply_chat_template")
    (score,) = [value for name, value in results.items() if name.startswith("exact_match,")]
    assert score > 0, results
    return f"exact match {score:g}"


@check("local-completions: loglikelihood by echo")
def _():
    arguments = f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=1,tokenizer={TARGET}"
    results = run("local-completions", arguments, "dflash_choose")
    return f"accuracy {results['acc,none']:g}"


@check("local-completions: generate_until")
def _():
    arguments = f"model={MODEL},base_url={URL}/v1/completions,num_concurrent=2,tokenizer={TARGET}"
    run("local-completions", arguments, "dflash_generate")
