"""Device and tokens per second of `pagewire status`."""

import json
import subprocess
import sys

from pagewire import cli
from pagewire.cli.token_rate import TokenRate, rate_between, rate_now
from pagewire.v1.scheduler_pb2 import GetStatusResponse as Status
from tests.pace import patience


def line(gateway, scheduler) -> list[str]:
    return ["status", "--target", gateway.target, "--scheduler", scheduler.target]


def advancing(scheduler) -> None:
    """From one message to the next two seconds pass, with 30 tokens."""

    def advance() -> None:
        scheduler.status.uptime_s += 2.0
        scheduler.status.num_output_tokens += 30
        scheduler.status.num_prefill_tokens += 100

    scheduler.before_status = advance


def test_status_names_the_device_and_the_rate(gateway, scheduler, capsys):
    scheduler.status.device = "cpu"
    advancing(scheduler)
    assert cli.main(line(gateway, scheduler)) == 0
    out = capsys.readouterr().out
    assert "device     float32 on cpu\n" in out
    assert "tokens/s   15.0 delivered, 50.0 prefilled now\n" in out
    assert cli.main([*line(gateway, scheduler), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_per_s"] == {"output": 15.0, "prefill": 50.0}
    assert report["scheduler"]["device"] == "cpu"


def test_an_idle_scheduler_is_asked_once(gateway, scheduler, capsys):
    scheduler.status.num_running = scheduler.status.num_waiting = 0
    advancing(scheduler)
    assert cli.main(line(gateway, scheduler)) == 0
    assert "tokens/s   0.0 delivered" in capsys.readouterr().out
    assert scheduler.status.uptime_s == 2.0


def test_a_rate_is_between_two_messages_of_one_scheduler():
    one, two = Status(uptime_s=5, num_output_tokens=10), Status(uptime_s=6, num_output_tokens=30)
    assert rate_between(one, two) == TokenRate(20.0, 0.0)
    assert rate_between(two, one) is None  # it has restarted
    assert rate_between(one, one) is None
    pauses: list[float] = []
    assert rate_now(two, lambda: one, one, pauses.append) == (two, TokenRate(20.0, 0.0))
    assert not pauses


def test_python_m_pagewire_is_the_command():
    command = [sys.executable, "-m", "pagewire", "--version"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=patience(30), check=True)
    assert out.stdout.startswith("pagewire 0.")
