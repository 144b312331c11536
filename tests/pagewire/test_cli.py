"""The commands that use a running server."""

import argparse
import io
import json
import queue
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from pagewire import Message, cli
from pagewire._terminal import Progress, Style
from pagewire.cli import checkout, explain
from pagewire.cli.interrupts import interrupts_close
from pagewire.cli.options import CommandError
from pagewire.testing import FakeServer
from pagewire.v1 import debug_pb2
from tests.pace import patience


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch):
    """Sets the lines of stdin."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_complete_streams_to_stdout(gateway, capsys):
    assert cli.main(["complete", "Q", "--target", gateway.target, "--max-tokens", "3"]) == 0
    assert capsys.readouterr() == ("The capital is\n", "")


def test_complete_passes_every_sampling_option_on(gateway):
    sampling = "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 7 --min-tokens 1"
    line = f"complete Q --target {gateway.target} {sampling} --stop X --stop Y --ignore-eos"
    assert cli.main([*line.split(), "--max-tokens", "4"]) == 0
    options = gateway.requests[0].options
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.seed, sampling.min_tokens) == (0.1, 7, 1)
    assert (sampling.max_tokens, sampling.ignore_eos, list(options.stop)) == (4, True, ["X", "Y"])


def test_complete_sends_nothing_that_was_not_given(gateway):
    cli.main(["complete", "Q", "--target", gateway.target])
    assert not gateway.requests[0].options.sampling.ListFields()


def test_complete_reads_stdin(gateway, typed, capsys):
    typed("from a pipe")
    assert cli.main(["complete", "-", "--target", gateway.target]) == 0
    assert gateway.requests[0].prompt.text == "from a pipe"


def test_a_failure_is_one_line_and_status_1(gateway, capsys):
    assert cli.main(["complete", "fail NOT_FOUND", "--target", gateway.target]) == 1
    assert capsys.readouterr().err == "pagewire: error: because the test wants it\n"
    assert cli.main(["complete", "Q", "--target", "127.0.0.1:1"]) == 1
    assert "nothing answers at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["", "fly", "complete", "complete Q --temprature 0", "complete Q --max-tokens many", "bench"],
)
def test_wrong_usage_is_status_2(line):
    with pytest.raises(SystemExit) as caught:
        cli.main(line.split())
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "line",
    [
        "complete Q --api-key K --target models.example:1",
        "complete Q --client-cert c.pem",
        "complete Q --timeout-s 0",
        "bench serve --concurrency 0",
        "bench serve --request-rate 0",
        "bench serve --url 127.0.0.1:8000",
        "up --once --no-sample",
    ],
)
def test_options_that_do_not_fit_together_are_status_2_in_one_line(line, capsys):
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_simulate_runs_the_simulator_of_a_checkout_and_returns_its_status(tmp_path, capfd):
    line = "simulate --rate 5 --requests 9 --step-time 0.01,0,0 --output-tokens 3:5 --json"
    assert cli.main(line.split()) == 0
    assert json.loads(capfd.readouterr().out)["summary"]["num_completed"] == 9
    assert cli.main([*line.split(), "--no-such-option"]) == 2
    assert "--no-such-option" in capfd.readouterr().err
    assert cli.main([*line.split(), "--checkout", str(tmp_path)]) == 1
    assert "holds no simulator" in capfd.readouterr().err


def test_keys_prints_a_key_and_the_line_for_the_file(tmp_path, capfd):
    line = "keys new --name alice --tenant acme --role user"
    assert cli.main(line.split()) == 0
    key, entry = capfd.readouterr().out.splitlines()
    assert key.startswith("pw_alice_")
    assert entry.startswith("alice acme user sha256:")
    assert cli.main([*line.split(), "--checkout", str(tmp_path)]) == 1
    assert "holds no services" in capfd.readouterr().err


def test_replay_runs_the_scheduler_of_a_checkout_and_returns_its_status(tmp_path, capfd):
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "holds no recording" in capfd.readouterr().err
    assert cli.main(["replay", str(tmp_path), "--checkout", str(tmp_path)]) == 1
    assert "holds no scheduler" in capfd.readouterr().err


def test_bench_runs_a_benchmark_of_a_checkout_and_returns_its_status(tmp_path, capfd):
    assert cli.main(["bench", "steps", "--in-runner", "--no-such-option"]) == 2
    assert "python -m bench.gpu_steps: error" in capfd.readouterr().err
    assert cli.main(["bench", "documented", "--checkout", str(tmp_path)]) == 1
    assert "holds no benchmarks" in capfd.readouterr().err


def test_a_library_that_a_benchmark_lacks_is_named():
    options = argparse.Namespace(checkout=checkout.HERE, rest=[])
    with pytest.raises(CommandError, match=r"bench\.steps needs no_such_library, which"):
        checkout.run_module(
            options, "bench.steps", "bench/steps.py", "benchmarks", ("json", "no_such_library")
        )


def test_an_explanation_is_a_table_of_parts_and_of_waits():
    answer = debug_pb2.ExplainResponse(
        request_id="r-1",
        state="length",
        wall_s=2.0,
        time_spent=debug_pb2.TimeSpent(queue_s=0.5, decode_s=1.5),
        waits=[debug_pb2.WaitingTime(reason="for KV blocks", seconds=0.5)],
    )
    lines = explain.as_text(answer, Style(io.StringIO())).splitlines()
    assert lines[0].startswith("r-1  length, 2.000 s")
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["queue", "0.500", "s"],
        ["decode", "1.500", "s"],
    ]
    assert "25.0%" in lines[1] and lines[-1].split() == ["0.500", "s", "for", "KV", "blocks"]


def test_the_key_comes_from_the_option_or_the_environment(gateway, monkeypatch):
    monkeypatch.setenv("PAGEWIRE_API_KEY", "of the environment")
    cli.main(["complete", "Q", "--target", gateway.target])
    cli.main(["complete", "Q", "--target", gateway.target, "--api-key", "given"])
    keys = [call["authorization"] for call in gateway.metadata]
    assert keys == ["Bearer of the environment", "Bearer given"]


def test_chat_keeps_the_conversation_and_obeys_commands(gateway, typed, capsys):
    typed(
        "first\nsecond\n/system be brief\nthird\n/clear\nfourth\n/nonsense\n/help\n/quit\nfifth\n"
    )
    assert cli.main(["chat", "--target", gateway.target]) == 0
    asked = [
        [(turn.role, turn.content) for turn in request.messages]
        for request in gateway.requests
        if hasattr(request, "messages")
    ]
    answer = ("assistant", "The capital is Paris.")
    assert asked == [
        [("user", "first")],
        [("user", "first"), answer, ("user", "second")],
        [("system", "be brief"), ("user", "third")],
        [("system", "be brief"), ("user", "fourth")],
    ]
    out = capsys.readouterr().out
    assert "tokens/s" in out
    assert "first after" in out
    assert "/nonsense: no such command" in out


def test_chat_shows_what_the_model_thinks_on_lines_of_its_own(typed, capsys):
    answer = Message("assistant", "It is Paris.", reasoning="France, then.")
    with FakeServer(answer) as server:
        typed("What is the capital of France?\n")
        assert cli.main(["chat", "--target", server.target]) == 0
    assert capsys.readouterr().out.startswith("France, then.\nIt is Paris.\n")


def test_chat_goes_on_after_a_failure_and_forgets_the_question(gateway, typed, capsys):
    typed("fail RESOURCE_EXHAUSTED\nhello\n")
    assert cli.main(["chat", "--target", gateway.target]) == 0
    assert [turn.content for turn in gateway.requests[-1].messages] == ["hello"]
    assert "error: because the test wants it" in capsys.readouterr().out


@pytest.fixture
def chat(gateway):
    """`pagewire chat` as a process of its own; killed if the test fails."""
    command = [sys.executable, "-m", "pagewire", "chat", "--target", gateway.target]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


def ask(chat, line):
    chat.stdin.write(line + "\n")
    chat.stdin.flush()


def test_ctrl_c_in_chat_stops_the_answer_only_and_cancels_it(gateway, chat):
    for _ in range(5):
        gateway.cancelled.clear()
        ask(chat, "endless")
        said = ""
        while not said.endswith("on on "):
            said += chat.stdout.read(1)
        chat.send_signal(signal.SIGINT)
        assert gateway.cancelled.wait(patience(5))
        while "stopped; " not in said:  # from then on Ctrl-C is the prompt's again
            said += chat.stdout.readline()
    rest, _ = chat.communicate("hello\n", timeout=patience(20))
    assert chat.returncode == 0
    assert "The capital is Paris." in rest


def test_interrupts_close_a_stream_once_and_raise_nothing():
    closed = queue.SimpleQueue()
    before = signal.getsignal(signal.SIGINT)
    with interrupts_close() as interrupts:
        signal.raise_signal(signal.SIGINT)  # before there is a stream
        interrupts.close(SimpleNamespace(close=lambda: closed.put("late")))
        assert closed.get_nowait() == "late"
    with interrupts_close() as interrupts:
        interrupts.close(SimpleNamespace(close=lambda: closed.put("running")))
        assert not interrupts.have_come
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert closed.get(timeout=patience(5)) == "running"
    assert closed.empty() and interrupts.have_come
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_ends_complete(gateway):
    command = [sys.executable, "-m", "pagewire", "complete", "endless", "--target", gateway.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as completing:
        try:
            assert completing.stdout is not None
            assert completing.stdout.read(6) == "on on "
            completing.send_signal(signal.SIGINT)
            assert gateway.cancelled.wait(patience(5))
            assert completing.wait(patience(20)) == cli.INTERRUPTED
        finally:
            completing.kill()


def test_status_tells_everything_and_is_0_when_ready(gateway, scheduler, capsys):
    line = ["status", "--target", gateway.target, "--scheduler", scheduler.target]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert out.count("ready") == 3
    for text in ("3 of 8 running", "1 waiting (20 tokens)", "25.0%, 50 of 200", "2 times", "tiny"):
        assert text in out
    assert "25.0% of 400 prompt tokens" in out
    assert "attention  decode: triton, prefill: flash-attn 3\n" in out
    assert "sums       peer memory, nccl above 4096 KiB\n" in out
    assert "sampling   temperature 0.6, top_k 20, where a request leaves them out\n" in out


def test_status_shows_sessions_and_the_host_tier(gateway, scheduler, capsys):
    line = ["status", "--target", gateway.target, "--scheduler", scheduler.target]
    cli.main(line)
    shown = capsys.readouterr().out
    assert "session" not in shown and "host tier" not in shown
    status = scheduler.status
    status.num_tier_blocks, status.num_tier_cached_blocks = 100, 40
    status.sessions.add(session_id="a", num_turns=1, num_cached_tokens=32, state="runs")
    status.sessions.add(
        num_turns=7,
        num_cached_tokens=640,
        num_prompt_tokens=1000,
        num_found_tokens=950,
        state="kept",
        idle_s=12.4,
    )
    cli.main(line)
    shown = capsys.readouterr().out
    assert "host tier  40 of 100 blocks in host memory hold prompts" in shown
    assert "session    a: 1 turn, 32 tokens cached, 0.0% of prompts found, runs\n" in shown
    kept = "without a name: 7 turns, 640 tokens cached, 95.0% of prompts found, kept for 12 s"
    assert f"session    {kept}\n" in shown


def test_status_as_json_is_one_line(gateway, scheduler, capsys):
    line = ["status", "--json", "--target", gateway.target, "--scheduler", scheduler.target]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report["ready"] is True
    assert report["services"]["worker"]["ready"] is True
    assert report["scheduler"]["num_running"] == 3
    assert report["scheduler"]["num_finished"] == 0
    assert report["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}


def test_status_is_1_and_says_who_is_missing(gateway, scheduler, capsys):
    scheduler.status.ready = False
    scheduler.status.reason = "no worker attached"
    line = ["status", "--target", gateway.target, "--scheduler", scheduler.target]
    assert cli.main(line) == 1
    assert "not ready  no worker attached" in capsys.readouterr().out
    assert cli.main(["status", "--target", gateway.target, "--scheduler", "127.0.0.1:1"]) == 1
    out = capsys.readouterr().out
    assert "nothing answers at 127.0.0.1:1" in out
    assert "gateway" in out


def test_status_watches_until_ctrl_c(gateway, scheduler):
    command = [sys.executable, "-m", "pagewire", "status", "--watch", "0.1", "--json"]
    command += ["--target", gateway.target, "--scheduler", scheduler.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        reports = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(patience(10)) == 130
    assert all(report["ready"] for report in reports)


def test_bench_prints_a_table(gateway, capsys):
    line = f"bench serve --target {gateway.target} --num-requests 6 --concurrency 3"
    assert cli.main([*line.split(), "--input-len", "4", "--output-len", "5"]) == 0
    out = capsys.readouterr().out
    assert "6 requests, 0 failed" in out
    assert all(word in out for word in ("TTFT", "TPOT", "ITL", "E2E", "p99", "good requests/s"))
    sent = [request for request in gateway.requests if hasattr(request, "prompt")]
    prompts = {tuple(request.prompt.token_ids.ids) for request in sent}
    assert len(sent) == len(prompts) == 6 + 2
    assert all(len(ids) == 4 and max(ids) < 1000 for ids in prompts)
    sampling = sent[0].options.sampling
    assert (sampling.temperature, sampling.ignore_eos, sampling.max_tokens) == (0.0, True, 5)


def test_bench_as_json_says_where_it_was_measured(gateway, capsys):
    line = f"bench serve --json --target {gateway.target} --num-requests 2 --prompt Q"
    assert cli.main([*line.split(), "--output-len", "7"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["result"]["num_finished"] == 2
    assert record["result"]["output_tokens_per_s"] > 0
    assert {"cpu", "num_cpus", "versions", "commit", "platform"} <= record["client"].keys()
    assert record["model"] == {"name": "tiny", "max_model_len": 512}


def test_bench_at_a_rate_appends_its_line_and_counts_what_was_good(gateway, tmp_path, capsys):
    path = tmp_path / "serve.jsonl"
    line = f"bench serve --target {gateway.target} --num-requests 3 --prompt Q --json {path}"
    line += " --request-rate 500 --goodput-ttft-ms 60000 --goodput-e2e-ms 0.0001"
    assert cli.main(line.split()) == 0
    assert "0.00 good requests/s" in capsys.readouterr().out
    record = json.loads(path.read_text())
    assert (record["settings"]["request_rate"], record["settings"]["concurrency"]) == (500, None)
    assert record["objective"] == {"ttft_ms": 60000, "tpot_ms": None, "e2e_ms": 0.0001}
    assert (record["result"]["num_finished"], record["result"]["num_good"]) == (3, 0)


def test_bench_fails_when_a_request_fails(gateway, capsys):
    line = f"bench serve --target {gateway.target} --num-requests 2 --num-warmups 0 --prompt"
    assert cli.main([*line.split(), "fail INTERNAL"]) == 1
    assert "2 requests failed; the first: because" in capsys.readouterr().err
    line = f"bench serve --target {gateway.target} --input-len 500 --output-len 100"
    assert cli.main(line.split()) == 1
    assert "600 tokens, tiny takes 512" in capsys.readouterr().err


def test_colour_is_for_terminals_without_no_color():
    assert Style(Terminal(), {}).red("x") == "\x1b[31mx\x1b[0m"
    assert Style(Terminal(), {"NO_COLOR": "1"}).red("x") == "x"
    assert Style(Terminal(), {"TERM": "dumb"}).red("x") == "x"
    assert Style(io.StringIO(), {}).red("x") == "x"


def test_a_progress_bar_counts_and_leaves_no_trace(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with Progress(2, "work", stream) as progress:
            progress.advance()
            progress.advance()
    assert "2/2" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert pipe.getvalue() == ""


def test_health_is_0_only_for_a_service_that_is_ready(gateway, capsys):
    assert cli.main(["health", gateway.target]) == 0
    assert capsys.readouterr().out == "ready\n"
    assert cli.main(["health", gateway.target, "--service", "no.such.Service"]) == 1
    assert cli.main(["health", "127.0.0.1:1"]) == 1
    assert "nothing answers at 127.0.0.1:1" in capsys.readouterr().out
