"""The activity of a service, read from its log: the reason for a wait."""

from pagewire.cli.launcher.processes import last_message

LOG = """\
2026-11-22 23:36:04,243 INFO worker_svc.startup.lifecycle: worker is LOADING
2026-11-22 23:36:04,246 INFO kernels.cpu.build: compiling layer.c for this machine: once
"""


def test_the_last_message_is_without_time_and_logger():
    assert last_message(LOG) == "compiling layer.c for this machine: once"
    assert last_message(f"{LOG}Traceback (most recent call last):\n") == last_message(LOG)


def test_a_log_of_json_says_the_same():
    lines = '{"level": "info", "message": "reading weights"}\n{"odd": 1}\nTraceback:\n'
    assert last_message(lines) == "reading weights"
    assert last_message(lines[5:]) == ""  # the half of a line that a tail begins with


def test_a_log_without_messages_says_nothing():
    assert last_message("") == ""
    assert last_message("the worker speaks\n") == ""
