"""Calls as the families of models write them."""

from gateway.chat.families import deepseek

DSML = f"{deepseek.BAR}DSML{deepseek.BAR}"


def qwen(name: str, **values: str) -> str:
    parts = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    parts = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in values.items()
    )
    return f"<tool_call>{name}\n{parts}</tool_call>"


def kimi(*calls: tuple[str, str]) -> str:
    parts = "".join(
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{text}"
        "<|tool_call_end|>"
        for at, (name, text) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{parts}<|tool_calls_section_end|>"


def minimax(*calls: tuple[str, dict[str, str]]) -> str:
    parts = ""
    for name, values in calls:
        inner = "".join(
            f'<parameter name="{key}">{text}</parameter>\n' for key, text in values.items()
        )
        parts += f'<invoke name="{name}">\n{inner}</invoke>\n'
    return f"<minimax:tool_call>\n{parts}</minimax:tool_call>"


def seed(name: str, **values: str) -> str:
    parts = "".join(f"<parameter={key}>{text}</parameter>\n" for key, text in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{parts}</function>\n</seed:tool_call>"


def token(name: str) -> str:
    return f"<{deepseek.BAR}{name.replace(' ', '▁')}{deepseek.BAR}>"


def deepseek_v31(*calls: tuple[str, str]) -> str:
    parts = "".join(
        f"{token('tool call begin')}{name}{token('tool sep')}{text}{token('tool call end')}"
        for name, text in calls
    )
    return f"{token('tool calls begin')}{parts}{token('tool calls end')}"


def deepseek_v3(*calls: tuple[str, str]) -> str:
    parts = "\n".join(
        f"{token('tool call begin')}function{token('tool sep')}{name}\n```json\n{text}\n```"
        f"{token('tool call end')}"
        for name, text in calls
    )
    return f"{token('tool calls begin')}{parts}{token('tool calls end')}"


def dsml(block: str, *calls: tuple[str, dict[str, tuple[str, str]]]) -> str:
    parts = ""
    for name, values in calls:
        inner = "".join(
            f'<{DSML}parameter name="{key}" string="{kind}">{text}</{DSML}parameter>\n'
            for key, (kind, text) in values.items()
        )
        parts += f'<{DSML}invoke name="{name}">\n{inner}</{DSML}invoke>\n'
    return f"<{DSML}{block}>\n{parts}</{DSML}{block}>"


def lfm2(*calls: str) -> str:
    return f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"


def gemma4(call: str) -> str:
    return f"<|tool_call>call:{call}<tool_call|>"


def quoted(text: str) -> str:
    return f'<|"|>{text}<|"|>'
