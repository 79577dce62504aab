"""Keeps what schemathesis makes up playable, and counts the answers."""

import collections
import json
import os

import schemathesis

COUNTS = collections.Counter()


@schemathesis.hook
def before_call(context, case, kwargs):
    """Most bodies name the model and ask for little: otherwise all would end at 404, or run for minutes."""
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("model"), str) and len(body["model"]) % 4:
            body["model"] = os.environ["CONFORMANCE_MODEL"]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and not isinstance(body[name], bool):
                body[name] = min(body[name], 8)
        if isinstance(body.get("n"), int) and not isinstance(body["n"], bool):
            body["n"] = min(body["n"], 2)
        if case.path.startswith("/v1/"):
            body.setdefault("max_output_tokens" if case.path == "/v1/responses" else "max_tokens", 4)


@schemathesis.hook
def after_call(context, case, response):
    """Write the counts now and then: there is no hook for the end."""
    COUNTS[f"{case.method} {case.path} {response.status_code}"] += 1
    if sum(COUNTS.values()) % 20 == 0:
        with open("counts.json", "w") as file:
            json.dump(COUNTS, file)
