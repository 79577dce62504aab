"""The form of the log: text, or one JSON object a line. Both carry request id, window and replica.

An exception of somebody else's may quote a prompt or an answer in its message; of the kinds that do, only
the type and the trace are written.
"""

import json
import logging
import logging.handlers
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal

from deployments.naming import replica_name
from deployments.observing.account import current
from dflash_core.errors import DFlashError

Format = Literal["text", "json"]

_LOGGERS = ("dflash", "deployments")
_QUOTING = (ValueError, TypeError, LookupError)  # KeyError('...'), pydantic's, json's, unicode's
_CARRIED = ("replica", "request_id", "window")
_FILE_BYTES, _NUM_FILES = 20 * 2**20, 5


class Line(logging.Formatter):
    """Writes a record."""

    def __init__(self, form: Format, replica: str):
        super().__init__()
        self._form = form
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        facts = self._carried(record) | getattr(record, "facts", {})
        message = record.getMessage()
        trace = _told(record.exc_info[1]) if record.exc_info and record.exc_info[1] else ""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        moment = f"{moment}.{int(record.msecs):03d}Z"
        if self._form == "json":
            head = {"time": moment, "level": record.levelname, "logger": record.name, "message": message}
            more = {"trace": trace} if trace else {}
            return json.dumps(head | facts | more, default=str, ensure_ascii=False)
        said = getattr(record, "said", {name for name in _CARRIED if str(facts.get(name)) in message})
        words = [f"{name}={value}" for name, value in facts.items() if name not in said]
        line = " ".join([moment, record.levelname, record.name, message, *words])
        return f"{line}\n{trace}" if trace else line

    def _carried(self, record: logging.LogRecord) -> dict[str, Any]:
        account = current()
        known = {
            "replica": self._replica,
            "request_id": account.request_id if account else None,
            "window": account.window if account else None,
        }
        found = {name: getattr(record, name, None) or known[name] for name in _CARRIED}
        return {name: value for name, value in found.items() if value}


def _told(error: BaseException) -> str:
    """The traces of an error and of those it came from, the first one first."""
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
        is_quoting = isinstance(cause, _QUOTING) and not isinstance(cause, DFlashError)
        said = "(not written: it may quote a request)" if is_quoting else str(cause)
        parts.append("".join(traceback.format_tb(cause.__traceback__)) + f"{kind}: {said}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n".join(reversed(parts))


def write_logs(form: Format, folder: Path | None, deployment: str) -> None:
    """Write this process's lines to standard error, or to files of its own in ``folder``."""
    replica = replica_name(outside=deployment)  # there is one of each then
    handler: logging.Handler
    if folder is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            folder / f"{deployment}-{replica}.log",
            maxBytes=_FILE_BYTES,
            backupCount=_NUM_FILES,
            encoding="utf-8",
        )
    handler.setFormatter(Line(form, replica))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if isinstance(h.formatter, Line)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
