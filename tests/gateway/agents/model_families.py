"""Chat templates as four families of models have them, with their refusals, and how each calls."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]  # a tool's name, and its arguments

# Thoughts since the user's last question stay; results are turns of the user.
QWEN3 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them so: <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- set seen = namespace(users=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content and seen.users == ns.last %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# One turn of the system, and at the beginning; arguments are an object; a call is XML.
QWEN35 = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{%- endfor %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call: <tool_call>
<function=NAME>
<parameter=KEY>
...
</parameter>
</function>
</tool_call>
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{% endif %}<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role != 'system' %}{{ raise_exception('Unexpected message role.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# One call a turn, in JSON, and arguments that are an object.
LLAMA = """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}<|im_start|>system
{{ first }}
{%- if tools %}

Functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with {"name": ..., "parameters": ...} to call one.{% endif %}<|eot_id|>
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>ipython
{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}<|im_start|>assistant
{{ message.content }}
{%- set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {
{%- for key, value in call.arguments | items %}"{{ key }}": {{ value | tojson }}
{%- if not loop.last %}, {% endif %}{% endfor %}}}<|eot_id|>
{%- elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Users and assistants take turns, and each call has an id of nine letters and digits.
MISTRAL = """\
{%- set has_system = messages[0].role == 'system' %}
{%- set rest = messages[1:] if has_system else messages %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, roles must alternate.') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- elif message.role not in ('assistant', 'tool') %}
{{- raise_exception('Only user, assistant and tool roles are supported.') }}
{%- endif %}
{%- endfor %}
{%- if tools %}[AVAILABLE_TOOLS] [{% for tool in tools %}{{ tool | tojson }}, {% endfor %}]
[/AVAILABLE_TOOLS]{% endif %}
{%- if has_system %}[SYSTEM]{{ messages[0].content }}[/SYSTEM]{% endif %}
{%- for message in rest %}
{%- if message.role == 'user' %}[INST] {{ message.content }}[/INST]
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}[TOOL_RESULTS] {"content": {{ message.content }}}[/TOOL_RESULTS]
{%- elif message.tool_calls %}{{ message.content }}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}
{{- '}' }}
{%- if not loop.last %}, {% endif %}{% endfor %}]<|im_end|>
{%- else %} {{ message.content }}<|im_end|>{% endif %}
{%- endfor %}"""


def _hermes(calls: Sequence[Call]) -> str:
    told = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in told)


def _xml(calls: Sequence[Call]) -> str:
    told = []
    for name, arguments in calls:
        values = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        told.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(told)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": args}) for name, args in calls)


def _mistral(calls: Sequence[Call]) -> str:
    told = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS] {json.dumps(told)}"


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template, and the text of an answer."""

    name: str
    template: str
    calls: Callable[[Sequence[Call]], str]
    thinks: bool = False
    end: str = "<|im_end|>"
    has_text: bool = True  # before its calls

    def answer(self, thought: str, text: str, calls: Sequence[Call]) -> str:
        """The model's output, up to its end."""
        head = f"<think>\n{thought}\n</think>\n\n" if self.thinks and thought else ""
        if not calls:
            return head + text
        if not self.has_text or not text:
            return head + self.calls(calls)
        return f"{head}{text}\n{self.calls(calls)}"


FAMILIES = (
    Family("qwen3", QWEN3, _hermes, thinks=True),
    Family("qwen35", QWEN35, _xml, thinks=True),
    Family("llama", LLAMA, _llama3, end="<|eot_id|>", has_text=False),
    Family("mistral", MISTRAL, _mistral),
)
