"""The clients, and the table of what they did."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conformance.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody else's program: what it is installed from, and the script that drives it."""

    name: str
    script: str  # in ``clients``
    python: tuple[str, ...] = ()  # requirements
    npm: tuple[str, ...] = ()


_ALL = (
    Client("openai-python", "openai_python.py", python=("openai>=3,<4",)),
    Client("openai-node", "openai_node.mjs", npm=("openai@7", "zod@4")),
    Client("ai-sdk", "ai_sdk.mjs", npm=("ai@7", "@ai-sdk/openai-compatible@3", "@ai-sdk/openai@4", "zod@4")),
    Client("litellm", "litellm_sdk.py", python=("litellm>=1.110,<2",)),
    Client("schemathesis", "schemathesis_run.py", python=("schemathesis>=4.32,<5",)),
    Client("smg", "smg_http.py", python=("smg>=1.13,<2", "openai>=3,<4")),
    Client("lm-eval", "lm_eval_run.py", python=("lm-eval[api]==0.4.13", "transformers>=5.7")),
    Client("aiperf", "aiperf_run.py", python=("aiperf>=0.13,<0.14",)),
    Client("locust", "locust_run.py", python=("locust>=2.47,<3",)),
)
CLIENTS = {client.name: client for client in _ALL}


def write(outcomes: "Iterable[Outcome]") -> str:
    """The table, as Markdown."""
    lines = ["", "| client | passed | failed, and why |", "|---|---|---|"]
    for outcome in outcomes:
        if outcome.missing is not None:
            lines.append(f"| {outcome.name} | not run | not installed: {_cell(outcome.missing)} |")
            continue
        passed = [f"{c.name} ({c.detail})" if c.detail else c.name for c in outcome.checks if c.is_good]
        failed = [f"{check.name}: {check.detail}" for check in outcome.checks if not check.is_good]
        lines.append(f"| {outcome.name} | {_cell('; '.join(passed))} | {_cell('; '.join(failed)) or '–'} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
