"""Reasoning between <think> and </think>, as most families write it."""

from gateway.chat.reasoning_format import OPEN, ReasoningFormat

# When the answer, or the end of the prompt, opens it.
QWEN3 = ReasoningFormat("qwen3", is_in=lambda template: OPEN in template)
DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", begins_inside=True)
