"""The source of an option that counts, of several, and what each may hold."""

import argparse
from pathlib import Path

import pytest

from gateway.process.config import make_parser
from pagewire.settings import config_file, environment, sources
from pagewire.settings.config_file import BadConfigFile
from pagewire.settings.sources import BadSetting
from scheduler_svc.config import make_parser as make_scheduler_parser

NEEDED = ("--model", "m", "--scheduler", "s:1")


def parsed(*typed: str, file: Path | None = None, **environ: str) -> argparse.Namespace:
    """The gateway's options from a command line, an environment and a file."""
    parser = make_parser()
    words = [*NEEDED, *typed, *(() if file is None else ("--config", str(file)))]
    return parser.parse_args([*sources.words(parser, words, "gateway", environ), *words])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pagewire.yaml"
    path.write_text("gateway:\n  gather-ms: 1\n  max_headers: 11\n")
    return path


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(file: Path) -> None:
    assert parsed().gather_ms == 30.0
    assert parsed(file=file).gather_ms == 1.0
    assert parsed(file=file, PAGEWIRE_GATHER_MS="2").gather_ms == 2.0
    assert parsed(file=file, PAGEWIRE_GATHER_MS="2", PAGEWIRE_GATEWAY_GATHER_MS="3").gather_ms == 3
    assert parsed("--gather-ms=4", file=file, PAGEWIRE_GATHER_MS="2").gather_ms == 4.0
    assert parsed("--gather-ms", "4", file=file).max_headers == 11
    assert parsed(file=file, PAGEWIRE_GATHER_MS="").gather_ms == 1.0  # empty: not set


def test_a_file_may_be_named_by_a_variable_and_be_of_one_command_alone(tmp_path: Path) -> None:
    (tmp_path / "flat.yaml").write_text("gather-ms: 5  # no section\nhost: '0.0.0.0'\n")
    found = parsed(PAGEWIRE_CONFIG=str(tmp_path / "flat.yaml"))
    assert (found.gather_ms, found.host) == (5.0, "0.0.0.0")


def test_values_are_the_text_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("api-key: 0123\nserved-model-name: on\n")
    found = parsed(file=path)
    assert (found.api_key, found.served_model_name) == ("0123", "on")


def test_switches_and_lists(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("cors-origins: [https://a.example, https://b.example]\n")
    found = parsed(file=path)
    assert found.cors_origins == ("https://a.example", "https://b.example")
    parser = make_scheduler_parser()
    path.write_text("worker: [a:1, b:2]\nno-prefix-caching: true\n")
    options = ["--config", str(path)]
    for environ, is_on in (({}, False), ({"PAGEWIRE_NO_PREFIX_CACHING": "no"}, True)):
        words = sources.words(parser, options, "scheduler", environ)
        assert parser.parse_args([*words, *options]).enable_prefix_caching is is_on
    for environ, workers in (
        ({}, ["a:1", "b:2"]),
        ({"PAGEWIRE_WORKER": "c:3, d:4"}, ["c:3", "d:4"]),
    ):
        words = sources.words(parser, options, "scheduler", environ)
        assert parser.parse_args([*words, *options]).workers == workers
    words = sources.words(parser, ["--worker", "e:5", *options], "scheduler", {})
    assert not any(word.startswith("--worker") for word in words)


def test_a_path_of_a_file_is_relative_to_it_and_a_models_name_stays(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("gateway:\n  model: ORG/NAME\n  api-keys: keys\n")
    parser = make_parser()
    words = sources.words(parser, ["--config", str(path)], "gateway", {})
    assert set(words) == {"--model=ORG/NAME", f"--api-keys={tmp_path / 'keys'}"}
    (tmp_path / "ORG" / "NAME").mkdir(parents=True)
    words = sources.words(parser, ["--config", str(path)], "gateway", {})
    assert f"--model={tmp_path / 'ORG' / 'NAME'}" in words


def test_a_clients_key_of_the_environment_yields_to_a_file_of_keys(tmp_path: Path) -> None:
    found = parsed("--api-keys", "keys", PAGEWIRE_API_KEY="mine")
    assert (found.api_key, found.api_keys) == (None, Path("keys"))
    assert parsed(PAGEWIRE_API_KEY="mine").api_key == "mine"
    assert parsed(PAGEWIRE_API_KEY="mine", PAGEWIRE_API_KEYS="keys").api_key is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "gateway:\n  gather_mss: 1\n",
            "gather-mss is no option of gateway; did you mean gather-ms",
        ),
        ("gateway:\n  dtype: x\n", "dtype is no option of gateway; it is one of up and worker"),
        ("gatewy:\n  gather-ms: 1\n", "gatewy is no section: these are .*; did you mean gateway"),
        ("gather-ms: 1\ngateway:\n  host: x\n", "gather-ms: in a file with sections each option"),
        ("gather-ms: 1\ngather-ms: 2\n", "gather-ms stands there twice"),
        ("gather-ms: 1\ngather_ms: 2\n", "gather-ms stands there twice"),
        ("gather-ms: {a: [}\n", "line 1: "),
        ("- gather-ms\n", "holds no options"),
        ("config: other.yaml\n", "config is no option of gateway"),
        ("gather-ms:\n", "gather-ms: it has no value"),
        ("gather-ms: much\n", "gather-ms: 'much' is no valid float"),
        ("gather-ms: [1, 2]\n", "gather-ms: --gather-ms takes one value, not a list"),
        ("share-ports: true\n", "share-ports is no option of gateway"),
        ("log-format: x\n", "log-format: 'x' is none of text"),
    ],
)
def test_what_a_file_must_not_hold_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises((BadConfigFile, BadSetting), match=rf"--config: {path}.*{said}"):
        parsed(file=path)


def test_a_file_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(BadConfigFile, match="cannot be read"):
        parsed(file=tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing yet\n")
    assert config_file.read(tmp_path / "empty").of("gateway") == {}


def test_a_bad_variable_is_refused_by_its_name() -> None:
    with pytest.raises(BadSetting, match=r"^PAGEWIRE_HTTP_PORT: 'web' is no valid int$"):
        parsed(PAGEWIRE_HTTP_PORT="web")


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(BadSetting, match="'perhaps' is neither true nor false"):
        sources.words(
            make_scheduler_parser(), [], "scheduler", {"PAGEWIRE_NO_PREFIX_CACHING": "perhaps"}
        )


def test_an_unknown_variable_is_named_and_one_of_another_command_is_not() -> None:
    environ = {
        "PAGEWIRE_DTPE": "float32",
        "PAGEWIRE_DTYPE": "float32",
        "PAGEWIRE_WORKER_THREADS": "2",
        "PAGEWIRE_CACHE": "/c",
        "PAGEWIRE_PORT": "tcp://10.0.0.1:8000",
        "PATH": "/bin",
    }
    lines = list(environment.strangers(environ))
    assert [line.partition(" ")[0] for line in lines] == ["PAGEWIRE_DTPE", "PAGEWIRE_PORT"]
    assert "did you mean PAGEWIRE_DTYPE" in lines[0] and "service link" in lines[1]
    assert environment.found("port", "worker", environ) is None
