"""--speculative-config: what is there is read by vLLM's names, what is not is refused by name."""

import pytest

from scheduler_svc.speculation.options import Method, SpeculationOptions, parse_speculation


def test_what_is_given_is_read() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5}'
    options = parse_speculation(text)
    assert options == SpeculationOptions(Method.NGRAM, 3, prompt_lookup_max=5)
    suffix = parse_speculation('{"method": "suffix", "suffix_decoding_min_token_prob": 0.2}')
    assert suffix.suffix_decoding_min_token_prob == 0.2


def test_a_draft_model_may_be_named() -> None:
    options = parse_speculation('{"method": "draft_model", "model": "org/small"}')
    assert options == SpeculationOptions(Method.DRAFT_MODEL, model="org/small")
    assert parse_speculation('{"method": "draft_model"}').model == ""


def test_a_maximum_below_the_default_minimum_lowers_it() -> None:
    options = parse_speculation('{"method": "ngram", "prompt_lookup_max": 1}')
    assert (options.prompt_lookup_min, options.prompt_lookup_max) == (1, 1)


def test_what_asks_for_nothing_is_accepted() -> None:
    asks_nothing = '"model": null, "speculative_token_tree": null'
    no_others = '"suffix_decoding_max_cached_requests": 0'
    parse_speculation(f'{{"method": "suffix", {asks_nothing}, {no_others}}}')


@pytest.mark.parametrize("method", ["draft_models", "eagle3", "medusa", "mtp", "ngram_gpu"])
def test_other_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(
        ValueError, match=f"method '{method}' is not there; there are ngram, suffix"
    ):
        parse_speculation(f'{{"method": "{method}", "num_speculative_tokens": 2}}')


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "method is missing"),
        ('{"method": "ngram", "model": "small"}', "'model' is not there"),
        ('{"method": "ngram", "speculative_token_tree": "[(0,)]"}', "'speculative_token_tree'"),
        ('{"method": "suffix", "prompt_lookup_max": 4}', "'prompt_lookup_max' is not there with"),
        ('{"method": "ngram", "suffix_decoding_max_cached_requests": 9}', "is not there"),
        ('{"method": "suffix", "suffix_decoding_max_cached_requests": -1}', "must not be neg"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "must be 1 to 32"),
        ('{"method": "ngram", "num_speculative_tokens": "4"}', "must be a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "must be a whole number"),
        ('{"method": "ngram", "prompt_lookup_min": 9}', "must be 1 to prompt_lookup_max"),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "must be 0 to 1"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": 0}', "must be above 0"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 0}', "must be at least 1"),
        ('{"method": "draft_model", "model": 5}', "model is 5, must be a text"),
        ('{"method": "draft_model", "prompt_lookup_max": 4}', "is not there with method draft"),
        ('{"method": "ngram", "disable_by_batch_size": -1}', "must not be negative"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"speculative_config: .*{why}"):
        parse_speculation(text)
