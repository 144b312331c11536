"""The logging options of every service, and the one handler through which all its lines go."""

import argparse
import logging
import os
import sys
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from wire.logs.formats import JsonLines, TextLines

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# At the level debug these would write lines about bytes, and some of them about prompts.
_QUIET = ("asyncio", "grpc", "grpc._cython", "hpack", "httpcore", "httpx", "urllib3", "uvicorn")


@dataclass(frozen=True, slots=True)
class LoggingOptions:
    """The form of the log, and the least level of its lines."""

    log_format: str = "text"
    log_level: str = "info"


def add_logging_options(parser: argparse.ArgumentParser) -> None:
    """Options of every service."""
    add = parser.add_argument
    add("--log-format", choices=FORMATS, default="text", help="lines of text, or of JSON")
    add("--log-level", choices=LEVELS, default="info", help="least level of the lines in the log")


def take_logging(options: dict[str, Any]) -> LoggingOptions:
    """Removes the logging options from `options`; returns them as one value."""
    return LoggingOptions(options.pop("log_format"), options.pop("log_level"))


def set_up_logging(options: LoggingOptions, service: str, who: str = "") -> None:
    """Sends all lines of this process to stderr; `who` tells a rank from others.

    Those of libraries, Python's warnings, and exceptions that end a thread or the process have the
    same form. A second call replaces the first.
    """
    handler = logging.StreamHandler()
    is_json = options.log_format == "json"
    handler.setFormatter(JsonLines(service, who) if is_json else TextLines(who))
    level = options.log_level.upper()
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLevelName(level)))
    if is_json:
        logging.captureWarnings(True)
        sys.excepthook = _on_exception
        threading.excepthook = _on_thread_exception
        # What gRPC's C part writes goes past Python; its errors reach us as statuses.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("process").critical("uncaught exception", exc_info=(kind, error, trace))


def _on_thread_exception(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not issubclass(failed.exc_type, SystemExit):
        name = failed.thread.name if failed.thread else "?"
        told = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        logging.getLogger("process").critical(
            "uncaught exception in thread %s", name, exc_info=told
        )
