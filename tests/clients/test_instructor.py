"""instructor: typed answers in each of its modes, and streams of partial ones."""

from typing import Any

import pytest

instructor = pytest.importorskip("instructor", reason="instructor is not here: make test-clients")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

USER: Any = {"role": "user", "content": "The weather?"}


class Weather(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """The weather somewhere."""

    model_config = pydantic.ConfigDict(extra="forbid")  # a model of no language would go on

    is_sunny: bool


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_a_typed_answer(mode: str, base_url: str) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key="none", max_retries=0),
        mode=getattr(instructor.Mode, mode),
    )
    answer = client.chat.completions.create(
        model="tiny", response_model=Weather, messages=[USER], max_retries=0
    )
    assert isinstance(answer, Weather)


def test_partial_answers(base_url: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"))
    *_, last = client.chat.completions.create_partial(
        model="tiny", response_model=Weather, messages=[USER]
    )
    assert last.is_sunny in (True, False)
