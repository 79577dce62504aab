"""What a check found, and what to do about it."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]
_SIGNS: Mapping[Level, str] = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. Whatever is not well names its remedy."""

    check: str  # a stable word: the subject
    level: Level
    message: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # plain data, for --json

    def __post_init__(self):
        if (self.level == "ok") == bool(self.remedy):
            raise ValueError(f"{self.check}: a finding has a remedy exactly if it is not ok")

    def lines(self) -> list[str]:
        """Write it for a terminal; further lines are indented."""
        first, *rest = self.message.splitlines()
        shown = [f"{_SIGNS[self.level]}  {self.check}: {first}", *(f"           {line}" for line in rest)]
        return shown if not self.remedy else [*shown, f"           → {self.remedy}"]


def ok(check: str, message: str, **facts: Any) -> Finding:
    """All is well."""
    return Finding(check, "ok", message, facts=facts)


def warning(check: str, message: str, remedy: str, **facts: Any) -> Finding:
    """It works, but not as it could."""
    return Finding(check, "warning", message, remedy, facts)


def error(check: str, message: str, remedy: str, **facts: Any) -> Finding:
    """It cannot work."""
    return Finding(check, "error", message, remedy, facts)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings of one examination."""

    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> "Report":
        """Collect."""
        return cls(tuple(findings))

    def count(self, level: Level) -> int:
        """How many findings of a level there are."""
        return sum(finding.level == level for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 on an error; warnings are 0."""
        return int(self.count("error") > 0)

    @property
    def summary(self) -> str:
        """One line."""
        return f"{self._many('error')}, {self._many('warning')}, {self.count('ok')} ok"

    def _many(self, level: Level) -> str:
        count = self.count(level)
        return f"{count} {level}{'' if count == 1 else 's'}"

    def as_json(self) -> dict[str, Any]:
        """Plain data, the same that ``lines`` shows."""
        return {"summary": self.summary, "findings": [asdict(finding) for finding in self.findings]}
