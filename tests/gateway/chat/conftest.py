"""A model with tools and reasoning."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.tokens.tokenizer import Tokenizer
from pagewire.v1 import types_pb2

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Call tools like <tool_call>{"name": "...", "arguments": {...}}</tool_call>. They are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.name is defined %} ({{ message.name }}){% endif %}
{%- if message.tool_call_id is defined %} [{{ message.tool_call_id }}]{% endif %}

{% if message.reasoning_content is defined -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- endif %}"""


@pytest.fixture(scope="session")
def model_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder)


@pytest.fixture(scope="module")
def model_info(model_info: types_pb2.ModelInfo) -> types_pb2.ModelInfo:
    model_info.max_model_len = 4096
    return model_info


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def weather() -> dict[str, Any]:
    return json.loads(json.dumps(WEATHER))
