"""Options of other engines: those that ask for nothing are taken, the others get an answer."""

import argparse

import pytest

from pagewire.cli import main
from pagewire.settings import known, sources
from pagewire.settings.other_engines import OPTIONS, VARIABLES, answers, without_neutral

OWN = frozenset(name for options in known.OPTIONS.values() for name in options)


@pytest.mark.parametrize(
    ("typed", "kept", "names"),
    [
        ("--trust-remote-code --dtype auto", "--dtype auto", ["trust-remote-code"]),
        ("--tokenizer-mode auto --once", "--once", ["tokenizer-mode"]),
        ("--tokenizer-mode=slow", "--tokenizer-mode=slow", []),
        ("--tokenizer-mode slow --once", "--tokenizer-mode slow --once", []),
        ("--distributed-executor-backend mp", "", ["distributed-executor-backend"]),
        ("--pipeline-parallel-size=2", "--pipeline-parallel-size=2", []),
        ("--enable-lora --enable-chunked-prefill", "", ["enable-lora", "enable-chunked-prefill"]),
        ("--seed", "--seed", []),  # its value is missing
        ("--model --seed", "--model --seed", []),
        ("a --no-sample b", "a --no-sample b", []),
    ],
)
def test_what_asks_for_nothing_is_taken_with_a_line(
    typed: str, kept: str, names: list[str]
) -> None:
    words, lines = without_neutral(typed.split(), OWN)
    assert words == kept.split()
    assert [line.partition(" ")[0] for line in lines] == [f"--{name}" for name in names]


def test_a_commands_own_option_is_never_another_engines() -> None:
    assert without_neutral(["--port", "1", "--seed=0"], frozenset({"port", "seed"}))[1] == []
    assert OPTIONS.keys() & set(known.OPTIONS["up"]) == set()


def test_every_answer_names_options_that_there_are() -> None:
    for name, other in OPTIONS.items():
        written = {word.strip(":;,.") for word in other.answer.split() if word.startswith("--")}
        assert {word.removeprefix("--") for word in written} <= OWN, name
    for answer in VARIABLES.values():
        written = {word.strip(":;,.'") for word in answer.split() if word.startswith("--")}
        assert {word.removeprefix("--") for word in written} <= OWN, answer


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_up_refuses_each_with_its_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["up", f"--{name}=something else"])
    assert ended.value.code == 2
    assert f"--{name}: {OPTIONS[name].answer}" in capsys.readouterr().err


def test_a_service_refuses_each_but_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m service", allow_abbrev=False)
    sources.add_config(parser)
    parser.add_argument("--port", type=int)
    asked = ["--port", "5", "--trust-remote-code", "--tokenizer-mode=auto"]
    assert sources.parse(parser, asked, "worker", {}) == {"port": 5}
    assert "--trust-remote-code asks for nothing: no code of" in capsys.readouterr().err
    for words, said in (
        (["--distributed-executor-backend", "ray"], "choices are mp and uni"),
        (["--distributed-executor-backend=magic"], "choices are mp and uni"),
        (["--revision", "main"], "--model ORG/NAME@REVISION"),
        (["--zzz", "1"], "unrecognized arguments: --zzz 1"),
    ):
        with pytest.raises(SystemExit):
            sources.parse(parser, words, "worker", {})
        assert said in capsys.readouterr().err


def test_a_variable_of_another_engine_is_named_in_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A key that protects nothing is the worst of them."""
    parser = argparse.ArgumentParser(prog="python -m service")
    sources.add_config(parser)
    sources.parse(parser, [], "gateway", {"VLLM_API_KEY": "secret", "VLLM_TRACE_FUNCTION": "1"})
    said = capsys.readouterr().err
    assert "VLLM_API_KEY sets nothing here: PAGEWIRE_API_KEY" in said and "secret" not in said
    assert "VLLM_TRACE_FUNCTION sets nothing here: no calls are traced" in said


def test_leftover_words_that_are_values_have_no_answer() -> None:
    assert list(answers(["tokenizer", "--tokenizer=x", "-O3"])) == [
        f"--tokenizer: {OPTIONS['tokenizer'].answer}"
    ]
