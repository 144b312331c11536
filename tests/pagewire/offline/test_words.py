"""Keyword arguments of pagewire.LLM as the options of `pagewire up`."""

from pathlib import Path

import pytest

from pagewire.offline.words import DECIDED, neutral_environment, to_words
from pagewire.settings.known import OPTIONS


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "float32", "max_model_len": 4096}, ["--dtype=float32", "--max-model-len=4096"]),
        ({"target_itl_ms": -1.5}, ["--target-itl-ms=-1.5"]),
        ({"log_steps": True, "text_contents": False, "threads": None}, ["--log-steps"]),
        ({"enable_prefix_caching": False}, ["--no-prefix-caching"]),
        ({"enable_prefix_caching": True}, []),
        ({"lora_modules": ["a=/x", "b=/y z"]}, ["--lora-modules=a=/x", "--lora-modules=b=/y z"]),
        ({"chat_template": Path("/a b/t.jinja")}, ["--chat-template=/a b/t.jinja"]),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
            ['--speculative-config={"method": "ngram", "num_speculative_tokens": 4}'],
        ),
        ({"gather_ms": 0}, ["--gateway-options=--gather-ms=0"]),
        (
            {"max_grant": 4, "scheduler_options": "--lookahead 2 --tenant-weight 'a b=2'"},
            ["--scheduler-options=--max-grant=4 --lookahead 2 --tenant-weight 'a b=2'"],
        ),
    ],
)
def test_a_keyword_becomes_the_option_of_the_process_that_has_it(
    given: dict[str, object], words: list[str]
) -> None:
    assert to_words(given) == words


@pytest.mark.parametrize(
    ("keyword", "said"),
    [
        ("max_modl_len", "--max-model-len"),  # a hint
        ("write_timeout_s", "the scheduler and the gateway"),
        ("enable_magic", "--enable-magic"),
        *((name.replace("-", "_"), "decides") for name in DECIDED),
    ],
)
def test_an_unknown_keyword_is_refused_as_that_of_any_function(keyword: str, said: str) -> None:
    with pytest.raises(TypeError, match=keyword) as refused:
        to_words({keyword: "1"})
    assert said in str(refused.value)


def test_variables_for_servers_do_not_reach_an_engine_of_a_program() -> None:
    assert set(DECIDED) <= set(OPTIONS["up"])
    emptied = neutral_environment()
    assert {"PAGEWIRE_TLS", "PAGEWIRE_UP_HTTP_PORT", "PAGEWIRE_HOST"} <= emptied.keys()
    assert set(emptied.values()) == {""}
