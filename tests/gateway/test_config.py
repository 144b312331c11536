"""Invalid command lines are refused with the option's name."""

from pathlib import Path

import pytest

from gateway.process.config import parse_args


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--model", "/nowhere"], "--model"),
        (["--scheduler", "nonsense"], "--scheduler"),
        (["--http-port", "70000"], "--http-port"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "ключ"], "--api-key"),
        (["--processes", "0"], "--processes"),
        (["--scheduler-timeout-s", "-1"], "--scheduler-timeout-s"),
        (["--drain-timeout-s", "-1"], "--drain-timeout-s"),
        (["--gather-ms", "-1"], "--gather-ms"),
        (["--http", "80"], "--http"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_names_it(
    options: list[str], problem: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = ["--model", str(model_folder), "--scheduler", "127.0.0.1:50052"]
    with pytest.raises(SystemExit) as end:
        parse_args([*good, *options])
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_folder_with_tokenizer_model_alone_is_told_how_to_make_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "tokenizer.model"):
        (tmp_path / name).touch()
    with pytest.raises(SystemExit):
        parse_args(["--model", str(tmp_path), "--scheduler", "127.0.0.1:50052"])
    said = capsys.readouterr().err
    assert f"{tmp_path} holds tokenizer.model and no tokenizer.json" in said
    assert "save_pretrained writes tokenizer.json" in said


def test_defaults_are_the_documented_ones(model_folder: Path) -> None:
    config = parse_args(["--model", str(model_folder), "--scheduler", "127.0.0.1:50052"])
    assert (config.host, config.http_port, config.grpc_port) == ("127.0.0.1", 8000, 50051)
    assert config.api_key is None


def test_a_scheduler_may_be_gone_for_longer_where_processes_start_slowly(
    model_folder: Path,
) -> None:
    required = ["--model", str(model_folder), "--scheduler", "127.0.0.1:50052"]
    assert parse_args(required, own_start_s=1.2).scheduler_timeout_s == 30.0
    assert parse_args(required, own_start_s=12.0).scheduler_timeout_s == 240.0
    given = [*required, "--scheduler-timeout-s", "7"]
    assert parse_args(given, own_start_s=12.0).scheduler_timeout_s == 7.0
