"""The openai package with the running product."""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conftest import Product

QUESTION = {"role": "user", "content": "What is the capital of Japan?"}


@pytest.fixture
def client(product: Product) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{product.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def model_name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_chat_answers_with_usage(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.create(
        model=model_name, messages=[QUESTION], temperature=0, max_tokens=32
    )
    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_equals_the_whole_one_and_ends_with_usage(
    client: openai.OpenAI, model_name: str
) -> None:
    whole = client.chat.completions.create(
        model=model_name, messages=[QUESTION], temperature=0, max_tokens=32
    )
    chunks = list(
        client.chat.completions.create(
            model=model_name,
            messages=[QUESTION],
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == ["stop"]
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_streamed_completion_equals_the_whole_one(client: openai.OpenAI, model_name: str) -> None:
    prompt = "Once upon a time, in a village by the sea,"
    whole = client.completions.create(model=model_name, prompt=prompt, temperature=0, max_tokens=24)
    pieces = list(
        client.completions.create(
            model=model_name,
            prompt=prompt,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_a_prompt_of_token_ids_equals_the_text_they_stand_for(
    client: openai.OpenAI, model_name: str, product: Product
) -> None:
    prompt = "The three primary colours are"
    answer = client.post("/../tokenize", body={"prompt": prompt}, cast_to=object)
    assert isinstance(answer, dict)
    options = {"model": model_name, "temperature": 0, "max_tokens": 16}
    by_text = client.completions.create(prompt=prompt, **options)  # type: ignore[call-overload]
    by_ids = client.completions.create(prompt=answer["tokens"], **options)  # type: ignore[call-overload]
    assert by_text.choices[0].text == by_ids.choices[0].text


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 2.5), ("top_p", 0), ("max_tokens", 0), ("n", 129), ("top_logprobs", 2)],
)
def test_a_bad_field_is_a_400_that_names_it(
    client: openai.OpenAI, model_name: str, field: str, value: object
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(  # type: ignore[call-overload]
            model=model_name, messages=[QUESTION], **{field: value}
        )
    assert caught.value.status_code == 400
    assert caught.value.param == field
    assert field in caught.value.message


def test_an_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.chat.completions.create(model="no-such-model", messages=[QUESTION])


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    client: openai.OpenAI, model_name: str
) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=model_name, prompt="My favourite", temperature=1, seed=seed, max_tokens=24
        )
        return answer.choices[0].text

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
