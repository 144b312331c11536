"""Options of `pagewire up` from the environment and a file, and what it passes on."""

import os
from pathlib import Path

import pytest

NAMES = ("worker", "scheduler", "gateway")


def arguments(up) -> dict[str, dict[str, str]]:
    return {name: up.note(name)["arguments"] for name in NAMES}


def test_common_options_reach_the_service_that_they_belong_to(up):
    status, _out, err = up.finish(
        *("--once", "--served-model-name", "mine", "--max-model-len", "99", "--policy", "fair"),
        *("--no-prefix-caching", "--tool-call-parser", "hermes", "--threads", "1"),
        *("--cors-origins", "https://a.example", "--record", "records"),
    )
    assert status == 0, err
    worker, scheduler, gateway = arguments(up).values()
    assert worker.items() >= {"--served-model-name": "mine", "--max-model-len": "99"}.items()
    assert worker["--threads"] == "1"
    assert scheduler["--policy"] == "fair" and scheduler["--no-prefix-caching"] == ""
    assert scheduler["--record"].endswith("/records") and scheduler["--record"].startswith("/")
    assert gateway["--tool-call-parser"] == "hermes"
    assert gateway["--cors-origins"] == "https://a.example"
    assert not {"--policy", "--tool-call-parser"} & worker.keys()


@pytest.mark.parametrize("is_here", [True, False])
def test_a_draft_model_is_told_to_worker_and_scheduler(up, is_here):
    model = "org/small"
    if is_here:
        (up.folder / "small").mkdir()
        model = os.path.relpath(up.folder / "small")
    config = f'{{"method": "draft_model", "model": "{model}"}}'
    status, _out, err = up.finish("--once", "--speculative-config", config)
    assert status == 0, err
    worker, scheduler, _ = arguments(up).values()
    assert scheduler["--speculative-config"] == config
    assert worker["--draft-model"] == (str(Path(model).absolute()) if is_here else model)


def test_drafts_of_other_methods_are_told_to_the_scheduler_alone(up):
    status, _out, err = up.finish("--once", "--speculative-config", '{"method": "ngram"}')
    assert status == 0, err
    assert "--draft-model" not in arguments(up)["worker"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--gather-ms 5", "--gather-ms is an option of the gateway: write --gateway-options='"),
        ("--lookahead=2", "of the scheduler: write --scheduler-options='--lookahead ...'"),
        ("--health-port 1", "an option of the worker and the scheduler and the gateway"),
        ("--max-num-seq 5", "--max-num-seq is no option of `pagewire up`; did you mean --max-num-"),
        ("--gathr-ms 5", "no option of `pagewire up`; --gather-ms is an option of the gateway"),
        ("--zzz", "--zzz is no option of `pagewire up` or of a service"),
        ("serve", "unrecognized arguments: serve"),
    ],
)
def test_an_option_of_a_service_is_refused_with_the_way_to_write_it(up, words, hint):
    status, _, err = up.finish(*words.split())
    assert status == 2
    assert hint in err
    assert "Traceback" not in err


def test_environment_and_file_set_options_and_the_command_line_goes_first(up):
    file = up.folder / "pagewire.yaml"
    file.write_text(
        "up: {dtype: float16, device: cpu, max-num-seqs: 5}\n"
        "scheduler: {lookahead: 2}\ngateway: {gather-ms: 3}\n"
    )
    status, out, err = up.finish(
        *("--once", "--config", str(file), "--max-num-seqs", "7"), PAGEWIRE_DTYPE="float32"
    )
    assert status == 0, err
    worker, scheduler, gateway = arguments(up).values()
    assert (worker["--dtype"], worker["--device"], worker["--max-num-seqs"]) == (
        "float32", "cpu", "7",
    )  # fmt: skip
    assert scheduler["--config"] == gateway["--config"] == str(file)  # they read their sections
    assert "settings" in out and f"PAGEWIRE_DTYPE, {file}" in out


def test_a_flat_file_is_of_up_alone(up):
    file = up.folder / "pagewire.yaml"
    file.write_text("once: true\nmax-num-seqs: 5\n")
    status, _, err = up.finish(PAGEWIRE_CONFIG=str(file))
    assert status == 0, err
    assert arguments(up)["worker"]["--max-num-seqs"] == "5"
    assert "--config" not in arguments(up)["worker"]
    assert up.note("worker")["environ"]["PAGEWIRE_CONFIG"] == ""


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("max-num-seq: 5", 2, "max-num-seq is no option of up; did you mean max-num-seqs"),
        ("gather-ms: 5", 2, "gather-ms is no option of up; it is one of gateway"),
        ("max-num-seqs: many", 2, "max-num-seqs: 'many' is no valid int"),
        ("worker: {port: 5}", 1, "worker: port: `pagewire up` decides this for its services"),
        ("gateway: {tls-cert: x}", 1, "gateway: tls-cert: is for services that are started one"),
        ("gateway: {gathr-ms: 5}", 2, "gathr-ms is no option of gateway; did you mean gather-ms"),
    ],
)
def test_what_a_file_must_not_hold_is_said_before_anything_starts(up, text, status, said):
    file = up.folder / "c.yaml"
    file.write_text(text + "\n")
    found, _out, err = up.finish("--config", str(file))
    assert found == status, err
    assert said in err and str(file) in err
    assert not list(up.folder.glob("*.json"))


def test_variables_that_nothing_reads_or_that_up_decides_are_named(up):
    status, _, err = up.finish("--once", PAGEWIRE_MAX_NUM_SEQ="5")
    assert status == 0
    assert "warning: PAGEWIRE_MAX_NUM_SEQ is ignored" in err and "PAGEWIRE_MAX_NUM_SEQS" in err
    status, _, err = up.finish("--once", PAGEWIRE_SCHEDULER_HOST="0.0.0.0")
    assert status == 1
    assert "PAGEWIRE_SCHEDULER_HOST: `pagewire up` decides this" in err


@pytest.mark.parametrize(
    ("options", "environ", "file"),
    [
        (["--api-key", "secret"], {}, ""),
        (["--api-key", "secret"], {"PAGEWIRE_API_KEY": "another"}, ""),
        ([], {"PAGEWIRE_GATEWAY_API_KEY": "secret"}, ""),
        ([], {"PAGEWIRE_UP_API_KEY": "secret"}, ""),
        ([], {"PAGEWIRE_UP_API_KEY": "secret", "PAGEWIRE_API_KEY": "another"}, ""),
        (["--config", "{file}"], {}, "api-key: secret"),
        (["--config", "{file}"], {}, "up: {api-key: secret}"),
        (["--gateway-options=--api-key secret"], {"PAGEWIRE_API_KEY": "another"}, ""),
    ],
)
def test_the_key_reaches_the_gateway_from_every_place_and_is_asked_with(up, options, environ, file):
    path = up.folder / "c.yaml"
    path.write_text(file)
    words = [option.format(file=path) for option in options]
    run = up.start(*words, **environ)
    out = up.wait_for(run, "Chat")
    assert "Japan is Tokyo." in out and "secret" not in out
    if "--gateway-options=--api-key secret" not in options:
        assert "--api-key" not in arguments(up)["gateway"]  # others on this machine would see it
    (line,) = (line.strip() for line in out.splitlines() if "export PAGEWIRE_API_KEY" in line)
    file_of_key = up.folder / "pagewire" / "peers" / f"{up.ports[2]}.key"
    assert line == f"export PAGEWIRE_API_KEY=$(cat {file_of_key})"
    assert file_of_key.read_text() == "secret\n"
    assert file_of_key.stat().st_mode & 0o777 == 0o600
    run.terminate()
    run.wait()
    assert not file_of_key.exists()


def test_one_key_and_a_file_of_keys_exclude_each_other(up):
    status, _, err = up.finish("--api-key", "x", "--api-keys", "keys")
    assert (status, "--api-key and --api-keys exclude each other" in err) == (2, True)


@pytest.mark.parametrize(
    ("fake", "said", "steps"),
    [
        ("gateway=mute", "the server stays up: the model gave an empty answer", "pagewire chat"),
        ("gateway=broken", "the server stays up: it broke", "pagewire chat"),
        ("gateway=plain", "The capital of Japan is Tokyo.", "pagewire complete 'Once upon"),
    ],
)
def test_a_sample_question_that_fails_is_explained_and_the_server_stays(up, fake, said, steps):
    run = up.start(fake=fake)
    out = up.wait_for(run, "pagewire.v1.InferenceService/")
    assert said in out.replace("\n", " ") and steps in out
    assert ("chat/completions" in out) == ("chat" in steps)
    run.terminate()
    assert run.wait() == 0
