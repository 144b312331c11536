"""The two formats of a line.

What a client has a say in (an id, a name) cannot begin a new line of the log.
"""

import json
import logging
import traceback
from datetime import UTC, datetime
from math import isfinite

from wire.logs.request import CURRENT, LoggedRequest

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CODES = (*range(9), *range(10, 32), *range(127, 160), 0x2028, 0x2029)
_CONTROLS = {code: f"\\x{code:02x}" for code in _CODES} | {0x0A: "\\n", 0x0D: "\\r"}
# Of a record; what else it holds was given by `extra=`.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "request_id", "trace_id"}


def request_of(record: logging.LogRecord) -> LoggedRequest | None:
    """The request that a line is about: the one it names, else that of the task."""
    if (request_id := getattr(record, "request_id", None)) is not None:
        return LoggedRequest(str(request_id), str(getattr(record, "trace_id", "")))
    return CURRENT.get()


class TextLines(logging.Formatter):
    """For people: `TIME LEVEL LOGGER: MESSAGE [request ID trace ID]`, then a traceback, if any."""

    def __init__(self, who: str = "") -> None:
        level = "%(levelname)s"
        super().__init__(_TEXT.replace(level, f"{who} {level}") if who else _TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without its traceback."""
        line = _clean(super().formatMessage(record)).translate(_CONTROLS)
        if (request := request_of(record)) is None:
            return line
        request_id = _clean(request.request_id).translate(_CONTROLS)
        trace = f" trace {request.trace_id}" if request.trace_id else ""
        return f"{line} [request {request_id}{trace}]"


class JsonLines(logging.Formatter):
    """For programs: one JSON object a line, in ASCII, whatever the text."""

    def __init__(self, service: str, who: str = "") -> None:
        super().__init__()
        self._own = {"service": service} | ({"rank": who} if who else {})

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": when.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _clean(record.getMessage()),
            **self._own,
            "pid": record.process,
        }
        if (request := request_of(record)) is not None:
            line["request_id"] = _clean(request.request_id)
            if request.trace_id:
                line["trace_id"] = request.trace_id
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in line:
                line[name] = value if _is_plain(value) else _clean(str(value))
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = _clean("".join(traceback.format_exception(*record.exc_info)))
        if record.stack_info:
            line["stack"] = _clean(record.stack_info)
        return json.dumps(line, allow_nan=False)


def _is_plain(value: object) -> bool:
    """True if a value is written as it is, and not as text."""
    return value is None or isinstance(value, int) or (isinstance(value, float) and isfinite(value))


def _clean(text: str) -> str:
    """Without halves of characters, which no file in UTF-8 can hold and no JSON reader takes."""
    return text.encode("utf-8", "backslashreplace").decode()
