"""`pagewire up` with services without a model: start, failures, and stop."""

import os
import signal
import socket
import stat
import time
from pathlib import Path

import pytest

from pagewire.cli.launcher.processes import Quiet
from tests.pace import paced, patience
from tests.pagewire.alive import assert_gone, is_alive
from tests.pagewire.launcher.run_of_up import NAMES, PORT_OPTIONS


def test_once_starts_everything_prints_the_answer_and_leaves_nothing_behind(up):
    status, out, err = up.finish("--once", "--dtype", "float32", "--max-num-seqs", "8")
    assert status == 0, err
    assert "What is the capital of Japan?\nThe capital of Japan is Tokyo.\n" in out
    assert "making the model" in err
    assert_gone(up.pids())
    http, rpc, scheduler, worker = (str(port) for port in up.ports)
    model = str(up.folder / "model")
    token = str(up.folder / "pagewire" / "peers" / f"{scheduler}.token")
    assert not Path(token).exists()
    assert up.note("worker")["arguments"] == {
        "--peer-token-file": token,
        "--model": model,
        "--host": "127.0.0.1",
        "--port": worker,
        "--dtype": "float32",
        "--max-num-seqs": "8",
        "--drain-timeout-s": "60.0",
    }
    assert up.note("scheduler")["arguments"] == {
        "--worker": f"127.0.0.1:{worker}",
        "--host": "127.0.0.1",
        "--port": scheduler,
        "--max-num-seqs": "8",
        "--drain-timeout-s": "60.0",
        "--peer-token-file": token,
    }
    assert up.note("gateway")["arguments"] == {
        "--model": model,
        "--scheduler": f"127.0.0.1:{scheduler}",
        "--host": "127.0.0.1",
        "--http-port": http,
        "--grpc-port": rpc,
        "--drain-timeout-s": "60.0",
        "--peer-token-file": token,
    }


def test_the_sample_question_sends_the_key_that_the_gateway_requires(up):
    for options, environ in (
        (["--gateway-options=--api-key secret"], {}),
        (["--gateway-options=--api-key secret"], {"PAGEWIRE_API_KEY": "another"}),
        ([], {"PAGEWIRE_API_KEY": "secret"}),
    ):
        status, out, err = up.finish("--once", *options, **environ)
        assert status == 0, err
        assert "Japan is Tokyo." in out
        assert "secret" not in out + err


def test_without_a_key_of_the_file_there_is_no_sample_and_once_is_refused(up):
    keys = up.folder / "keys"
    keys.write_text("")
    status, _, err = up.finish("--once", "--api-keys", str(keys))
    assert status == 1
    assert "PAGEWIRE_API_KEY" in err
    run = up.start("--api-keys", str(keys))
    assert "capital of Japan" not in up.wait_for(run, "Ready.")
    assert up.note("scheduler")["arguments"]["--api-keys"] == str(keys)


@pytest.mark.parametrize("service", NAMES)
def test_certificates_for_one_service_alone_are_refused(service, up):
    status, _, err = up.finish(f"--{service}-options=--tls-cert=a --tls-key b")
    assert status == 1
    assert f"--{service}-options: --tls-cert is" in err


def test_without_openssl_there_are_no_test_certificates(up):
    status, _, err = up.finish("--tls", PATH="")
    assert status == 1
    assert "openssl" in err


def test_every_service_gets_the_options_that_are_meant_for_it(up):
    status, _, err = up.finish(
        "--once", "--tensor-parallel-size", "2", "--worker-options=--gemm-algorithms torch",
        "--scheduler-options=--policy 'fair'", "--gateway-options=--tool-call-parser hermes",
    )  # fmt: skip
    assert status == 0, err
    given = {name: up.note(name)["arguments"] for name in ("worker", "scheduler", "gateway")}
    assert (
        given["worker"].items()
        >= {"--tensor-parallel-size": "2", "--gemm-algorithms": "torch"}.items()
    )
    assert given["scheduler"]["--policy"] == "fair"
    assert given["gateway"]["--tool-call-parser"] == "hermes"
    assert not given["scheduler"].keys() & {"--tensor-parallel-size", "--gemm-algorithms"}


def test_an_open_quotation_is_refused_with_the_option(up):
    status, _, err = up.finish("--once", "--worker-options=--gemm-algorithms 'torch")
    assert status != 0
    assert "--worker-options" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_with_status_0(up, number):
    run = up.start("--model", str(up.folder / "model"))
    out = up.wait_for(run, "Chat")  # the last hint
    assert "is Tokyo." in out
    assert f"http://127.0.0.1:{up.ports[0]}/v1" in out
    assert all(is_alive(pid) for pid in up.pids())
    run.send_signal(number)
    assert run.wait(patience(20)) == 0
    assert_gone(up.pids(), within_s=patience(0.5))  # it waited for them, and nothing is left over


def test_killing_up_itself_takes_the_services_along(up):
    run = up.start("--no-sample")
    up.wait_for(run, "Chat")
    run.kill()
    assert_gone(up.pids())


def guard_of(up, name: str) -> int:
    """The process between `pagewire up` and a service."""
    stat = Path(f"/proc/{up.note(name)['pids'][0]}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_guard_keeps_no_service(up, number):
    """A worker that lives on would keep its GPU's memory."""
    run = up.start("--no-sample")
    up.wait_for(run, "Ctrl-C")
    for name in NAMES:
        os.kill(guard_of(up, name), signal.SIGSTOP)
    run.send_signal(number)
    run.wait(patience(30))
    assert_gone(up.pids())


def test_a_stopped_service_does_not_hold_up_the_end(up):
    run = up.start("--no-sample", "--drain-timeout-s", "0", "--hang-timeout-s", "1")
    up.wait_for(run, "Ctrl-C")
    os.kill(up.note("worker")["pids"][0], signal.SIGSTOP)
    run.terminate()
    run.wait(patience(40))
    assert_gone(up.pids())


def test_logs_are_for_the_user_alone(up):
    before = os.umask(0o022)
    try:
        status, _, err = up.finish("--once")
    finally:
        os.umask(before)
    assert status == 0, err
    logs = up.folder / "logs"
    files = [logs / f"{name}.log" for name in NAMES]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (logs, *files)]
    assert modes == [0o700, 0o600, 0o600, 0o600]


def test_a_service_that_cannot_start_is_named_with_its_last_words(up):
    status, _, err = up.finish(fake="worker=die")
    assert status == 1
    assert "the worker ended with status 1" in err
    assert "the worker speaks\nout of memory, for example" in err
    assert "Traceback" not in err
    assert up.note("worker")["pids"]
    assert_gone(up.pids())


def wait_until_back(up, run, name: str, before: dict[str, list[int]]) -> None:
    """Waits for the line that says it; then only this service's process is another one."""
    up.wait_for(run, f"the {name} {before['why']}, is back after ")
    after = {name: up.note(name)["pids"][0] for name in NAMES}
    assert {other for other in NAMES if after[other] != before[other][0]} == {name}
    assert_gone(before[name])  # and what it had started


DEATHS = [
    ("worker", signal.SIGKILL, "ended with status 137 (SIGKILL)"),
    ("scheduler", signal.SIGUSR1, "ended with status 71"),
    ("gateway", signal.SIGTERM, "ended with status 0"),
]


@pytest.mark.parametrize(("name", "number", "why"), DEATHS)
def test_a_service_that_dies_is_started_again_on_its_port(up, name, number, why):
    run = up.start("--no-sample")
    up.wait_for(run, "Chat")
    before = {name: up.note(name)["pids"] for name in NAMES} | {"why": why}
    arguments = up.note(name)["arguments"]
    os.kill(before[name][0], number)
    wait_until_back(up, run, name, before)
    assert up.note(name)["arguments"] == arguments
    assert (up.folder / "logs" / f"{name}.log").read_text().count(f"the {name} speaks") == 2
    run.send_signal(signal.SIGTERM)
    assert run.wait(patience(20)) == 0
    assert_gone(up.pids())


def test_a_service_that_hangs_is_killed_and_started_again(up):
    name = "worker"
    limit_s = paced(3.0)
    run = up.start("--no-sample", "--hang-timeout-s", str(limit_s))
    up.wait_for(run, "Chat")
    before = {name: up.note(name)["pids"] for name in NAMES}
    os.kill(before[name][0], signal.SIGSTOP)
    seen = up.wait_for(run, f"the {name} gave no answer for ")
    silent_s = float(seen.rpartition("answer for ")[2].split()[0])
    assert limit_s - 0.05 <= silent_s < 6 * limit_s + patience(2.0)  # said to a tenth
    before["why"] = f"gave no answer for {silent_s:.1f} s and was killed"
    wait_until_back(up, run, name, before)


def test_all_three_that_die_at_once_come_back(up):
    run = up.start("--no-sample")
    up.wait_for(run, "Chat")
    before = {name: up.note(name)["pids"] for name in NAMES}
    for name in NAMES:
        os.kill(before[name][0], signal.SIGKILL)
    backs = set()
    for line in run.stdout:
        backs |= {name for name in NAMES if f"the {name} " in line and "is back" in line}
        if len(backs) == 3:
            break
    assert not {up.note(name)["pids"][0] for name in NAMES} & {before[n][0] for n in NAMES}
    for name in NAMES:
        assert_gone(before[name])


def test_a_crash_loop_ends_everything_with_the_services_last_words(up):
    run = up.start("--no-sample", fake="scheduler=die-again")
    up.wait_for(run, "Chat")
    os.kill(up.note("scheduler")["pids"][0], signal.SIGKILL)
    out, err = run.communicate(timeout=patience(40))
    assert run.returncode == 1
    assert "restarting in 0.5 s" in out and "restarting in 1 s" in out
    assert "the scheduler died 5 times in a row before it was ready, the last time it" in err
    assert "ended with status 1; its log" in err
    assert "the scheduler speaks\nout of memory, for example" in err
    assert "Traceback" not in err
    assert_gone(up.pids())


def test_services_end_one_after_the_other(up):
    run = up.start("--no-sample")
    up.wait_for(run, "Chat")
    run.send_signal(signal.SIGTERM)
    assert run.wait(patience(20)) == 0
    assert (up.folder / "ends").read_text().splitlines() == [
        f"{name} {what}" for name in reversed(NAMES) for what in ("is asked to end", "ends")
    ]


def test_while_one_drains_the_others_are_kept_alive_and_a_second_signal_ends_all(up):
    run = up.start("--no-sample", fake="gateway=busy")
    up.wait_for(run, "Chat")
    run.send_signal(signal.SIGTERM)
    up.wait_for(run, "stopping: running requests have 60 s to end; a second signal ends them")
    os.kill(up.note("worker")["pids"][0], signal.SIGKILL)
    up.wait_for(run, "the worker ended with status 137 (SIGKILL), is back after ")
    run.send_signal(signal.SIGTERM)
    assert run.wait(patience(10)) == 0
    asked = (up.folder / "ends").read_text().splitlines()
    assert asked == ["gateway is asked to end"] * 2
    assert_gone(up.pids())


def test_an_empty_answer_is_a_failure(up):
    status, _, err = up.finish("--once", fake="gateway=mute")
    assert status == 1
    assert "empty answer" in err
    assert_gone(up.pids())


@pytest.mark.parametrize("option", PORT_OPTIONS)
def test_a_port_in_use_is_found_before_anything_starts(up, option):
    port = up.ports[PORT_OPTIONS.index(option)]
    with socket.create_server(("127.0.0.1", port)):
        status, out, err = up.finish("--once")
    assert status == 1
    assert f"port {port} on 127.0.0.1 is in use; choose another with {option}" in err
    assert out == ""
    assert not list(up.folder.glob("*.json"))


def test_the_same_port_twice_is_refused(up):
    status, _, err = up.finish("--once", "--http-port", "9000", "--grpc-port", "9000")
    assert status == 1
    assert "--http-port and --grpc-port are both 9000" in err


def test_without_the_services_it_says_where_they_are(up, tmp_path_factory):
    status, _, err = up.finish("--checkout", str(tmp_path_factory.mktemp("empty")))
    assert status == 1
    assert "no worker_svc and no scheduler_svc and no gateway" in err
    assert "checkout" in err


def test_a_missing_model_and_a_failed_default_model_are_said(up):
    status, _, err = up.finish("--model", str(up.folder / "nowhere"))
    assert (status, "--model: " in err) == (1, True)
    status, _, err = up.finish(fake="default_model=die")
    assert status == 1
    assert "no room on the disk" in err
    assert "--model" in err


@pytest.mark.parametrize(("options", "expected"), [([], 0), (["--once"], 1)])
def test_a_signal_while_starting_stops_what_has_started(up, options, expected):
    run = up.start(*options, fake="worker=hang")
    up.wait_for(run, "logs")
    deadline = time.monotonic() + patience(20)
    while not all((up.folder / f"{name}.json").exists() for name in NAMES):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.terminate()
    assert run.wait(patience(20)) == expected
    assert_gone(up.pids())


def test_a_start_that_takes_too_long_is_given_up(up):
    status, _, err = up.finish("--once", "--startup-timeout-s", "2", fake="worker=hang")
    assert status == 1
    assert "the worker is not ready, and has logged nothing for 2 s" in err


def test_a_start_is_slow_and_not_stuck_as_long_as_its_log_grows():
    quiet = Quiet(100.0)
    assert quiet.seconds(0, 160.0) == 60.0
    assert quiet.seconds(80, 900.0) == 0.0
    assert quiet.seconds(80, 1000.0) == 100.0
    assert quiet.seconds(120, 5000.0) == 0.0
