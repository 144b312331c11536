"""Stop strings of chats: reasoning is no answer, and a special token is matched unseen."""

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from gateway.chat.answer import ChatFormat
from gateway.chat.conversation import Conversation, Message, Tool
from gateway.chat.formats import HARMONY, REASONING
from gateway.text.stops import StopMatcher
from gateway.text.stretches import Stretches
from pagewire.v1 import inference_pb2 as pb
from pagewire.v1 import types_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.gateway.http_calls import post

pytestmark = pytest.mark.asyncio(loop_scope="module")

TURN = pb.ChatMessage(role="user", content="Hi")
USER = {"role": "user", "content": "Hi"}
CHAT = Conversation((Message("user", "Hi"),), (Tool("f"),))
# As lm-eval sends them with every chat.
UNTIL = ["\n\n", "Question:", "</s>", "<|im_end|>"]
THOUGHT = "<think>\nQuestion: what?\n\nIt is Paris.\n\n\n</think>\n\n"
QUESTIONS = [f"What is {a} + {b}?" for a, b in [(1, 1), (2, 3), (4, 4), (5, 0)]]
ANSWERS = ["2", "5", "9", "5"]  # one is wrong: a score that is neither 0 nor 1


def read(matcher: StopMatcher, stretches: Stretches | None, pieces: list[str]) -> tuple[str, Any]:
    """The text that is shown, and the stop string."""
    shown = ""
    for piece in [*pieces, None]:
        assert stretches is not None
        for stretch in stretches.push(piece or "", is_last=piece is None):
            if not stretch.is_answer:
                shown += matcher.skip(stretch.text)
                continue
            text, stop = matcher.push(stretch.text)
            shown += text
            if stop is not None:
                return shown, stop
    return shown + matcher.flush(), None


BODY = "<|channel|>analysis<|message|>Hm END.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALLED = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
# Format, whether the prompt opens the reasoning, stop string, text, what is shown before the stop.
CASES: list[tuple[str, bool, str, str, str | None]] = [
    ("qwen3", False, "END", "<think>END</think>an END.", "<think>END</think>an "),
    ("qwen3", False, "END", "an END <think>", "an "),
    ("qwen3", False, "\n\n", THOUGHT + "a\n\nb", THOUGHT + "a"),
    ("qwen3", True, "\n\n", "a\n\nb</think>\n\nc\n\nd", "a\n\nb</think>\n\nc"),
    ("qwen3", True, "END", "END and END", None),
    ("qwen3", False, "</think>", "<think>a</think>b</think>c", "<think>a</think>b"),
    ("qwen3", False, "kEN", "<think>k</think>ENkEN", "<think>k</think>EN"),
    ("deepseek_r1", False, "END", "END</think>END", "END</think>"),
    ("harmony", False, "END", f"{BODY}{FINAL}an END.", f"{BODY}{FINAL}an "),
    ("harmony", False, "assistant", f"{BODY}{FINAL}an assistant.", f"{BODY}{FINAL}an "),
    ("harmony", False, "<|end|>", f"{BODY}{FINAL}a", None),
    ("harmony", False, "<|return|>", f"{BODY}{FINAL}a<|return|>", f"{BODY}{FINAL}a"),
    ("harmony", False, "END", f'{BODY}{CALLED}{{"a": "END"}}', f'{BODY}{CALLED}{{"a": "'),
    ("harmony", False, "END", "no channel END", "no channel "),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
async def test_stop_strings_count_in_the_answer_alone_wherever_the_text_is_cut(
    case: tuple[str, bool, str, str, str | None],
) -> None:
    name, is_open, stop, text, shown = case
    form = REASONING[name]
    chat_format = ChatFormat(True, HARMONY if name == "harmony" else None, form)
    expected = (text, None) if shown is None else (shown, stop)
    prompt = "<think>\n" if is_open else ""
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(len(text)))]
    for pieces in cuts:
        matcher = StopMatcher((stop,), include_in_output=False)
        stretches = chat_format.stretches(CHAT, prompt, None)
        assert read(matcher, stretches, pieces) == expected, pieces


async def test_stretches_are_all_of_the_text() -> None:
    dice = random.Random(0)
    words = ["<think>", "</think>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "final"]
    words += ["analysis", "commentary", " to=functions.f", "{", '"', "}", " ", "\n", "a", "<"]
    for form, is_open in itertools.product(REASONING.values(), (False, True)):
        chat_format = ChatFormat(True, HARMONY, form)
        for _ in range(200):
            text = "".join(dice.choices(words, k=dice.randrange(12)))
            stretches = chat_format.stretches(CHAT, "<think>" if is_open else "", None)
            assert stretches is not None
            found = [one for char in text for one in stretches.push(char)]
            found += stretches.push("", is_last=True)
            assert "".join(stretch.text for stretch in found) == text


async def chat(running: Any, **fields: Any) -> tuple[str, str | None, str]:
    """Content, reasoning and finish reason."""
    body = {"messages": [USER], "temperature": 0, "seed": 1234, "max_tokens": 256} | fields
    choice = (await post(running, "/v1/chat/completions", body))["choices"][0]
    message = choice["message"]
    return message["content"] or "", message.get("reasoning_content"), choice["finish_reason"]


@pytest.mark.parametrize("tokens_per_step", [1, 7])
async def test_a_reasoning_model_scores_the_same_with_stop_strings_in_its_thoughts(
    tokens_per_step: int, running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.tokens_per_step = tokens_per_step
    scores = []
    for stop in (None, UNTIL):
        right = 0
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
            tail = "" if stop is None else f"\n\nQuestion: {question}"
            running.scheduler.output = encode(f"{THOUGHT}{answer}{tail}")
            content, reasoning, reason = await chat(running, stop=stop)
            assert reasoning == "Question: what?\n\nIt is Paris." and reason == "stop"
            right += content == str(eval(question[8:-1]))
        scores.append(right)
    assert scores == [3, 3]


async def test_thoughts_that_never_end_end_by_length_and_not_by_a_stop_string(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode("<think>\nOne.\n\nQuestion: two")
    running.scheduler.end = {"reason": types_pb2.FINISH_REASON_LENGTH}
    assert await chat(running, stop=UNTIL) == ("", "One.\n\nQuestion: two", "length")


async def test_the_messages_api_and_grpc_think_past_stop_strings(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode(f"{THOUGHT}Paris\n\nMore")
    asked = {"messages": [USER], "max_tokens": 256, "stop_sequences": UNTIL}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    answer = await post(running, "/v1/messages", {"messages": [USER], "max_tokens": 256} | asked)
    assert [block.get("text") for block in answer["content"]][-1] == "Paris"
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "\n\n")
    stub = InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(stop=UNTIL)
    output = (await stub.Chat(pb.ChatRequest(messages=[TURN], options=options))).output
    assert (output.text, output.stop_string) == ("Paris", "\n\n")
    assert output.reasoning == "Question: what?\n\nIt is Paris."


async def test_the_output_ends_with_the_token_that_completed_the_stop_string(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    before, after = encode(f"{THOUGHT}Paris."), encode("\n\nParis")
    running.scheduler.output = [*before, *after]
    body = {"messages": [USER], "stop": ["\n\n"], "return_token_ids": True}
    choice = (await post(running, "/v1/chat/completions", body))["choices"][0]
    assert choice["token_ids"] == [*before, *encode("\n\n")]


@pytest.fixture
def hidden(encode: Callable[[str], list[int]]) -> list[int]:
    """An output with a special token in its middle."""
    return encode("Hello<|im_start|>user\n<|im_start|>more")


ROUTES = {
    "/v1/chat/completions": ({"messages": [USER]}, "stop"),
    "/v1/completions": ({"prompt": "Hi", "max_tokens": 99}, "stop"),
    "/v1/messages": ({"messages": [USER], "max_tokens": 99}, "stop_sequences"),
}
# Stop string, what is shown before it; None: it does not occur.
STOPS = [
    ("<|im_start|>", "Hello"),
    ("lo<|im_start|>us", "Hel"),
    ("user\n<|im_start|>", "Hello"),
    ("<|im_start|><|im_start|>", None),
    ("<|im_", None),
    ("user\n", "Hello"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("stop", "shown"), STOPS)
async def test_a_special_token_is_matched_and_not_shown(
    route: str, stop: str, shown: str | None, running: Any, hidden: list[int]
) -> None:
    running.scheduler.output = hidden
    body, name = ROUTES[route]
    answer = await post(running, route, body | {name: [stop]})
    text = json.dumps(answer)
    said = "Hellouser\nmore" if shown is None else shown
    assert f'"{json.dumps(said)[1:-1]}"' in text
    assert "im_start" not in text.replace(json.dumps(stop), "")


@pytest.mark.parametrize("includes", [False, True])
async def test_a_special_token_in_a_stop_string_ends_streams_and_is_never_sent(
    includes: bool, running: Any, hidden: list[int]
) -> None:
    running.scheduler.output = hidden
    stub = InferenceServiceStub(running.channel)
    options = pb.GenerationOptions(stop=["<|im_start|>user"], include_stop_str_in_output=includes)
    request = pb.ChatStreamRequest(messages=[TURN], options=options)
    deltas = [one.delta async for one in stub.ChatStream(request)]
    text = "".join(delta.text for delta in deltas)
    assert text == ("Hellouser" if includes else "Hello")


async def test_a_special_token_counts_as_text_where_special_tokens_are_shown(
    running: Any, hidden: list[int]
) -> None:
    running.scheduler.output = hidden
    found = await chat(running, stop=["<|im_start|>more"], skip_special_tokens=False)
    assert found[0] == "Hello<|im_start|>user\n"


async def test_a_special_token_in_the_reasoning_is_no_stop_string(
    running: Any, encode: Callable[[str], list[int]]
) -> None:
    running.scheduler.output = encode("<think>a<|im_start|>b</think>c<|im_start|>d")
    assert await chat(running, stop=["<|im_start|>"]) == ("c", "ab", "stop")
