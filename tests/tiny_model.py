"""A model of no language that a worker starts in seconds, with the default model's tokenizer."""

import json
import shutil
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from tests.worker_svc.random_models import save_random_model

ALL_WORDS, FEW_WORDS = 49152, 4096  # tokens of the tokenizer
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,  # outputs wander
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

# That of the default model knows no tools; this one tells of them in the form of hermes.
TOOL_TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}To call one write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_tiny_model(folder: Path, default_model: Path, num_tokens: int = ALL_WORDS) -> Path:
    """Random weights in a folder, next to the default's chat template and first tokens."""
    config = CONFIG | {"vocab_size": num_tokens}
    save_random_model(folder, (LlamaConfig, LlamaForCausalLM), config)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(default_model / name, folder)
    definition = (default_model / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(with_first_tokens(definition, num_tokens))
    return folder


def with_first_tokens(definition: str, num_tokens: int) -> str:
    """A tokenizer.json that splits into the first tokens: later ones are merges of these."""
    tokenizer = json.loads(definition)
    model = tokenizer["model"]
    kept = {token: number for token, number in model["vocab"].items() if number < num_tokens}
    model["vocab"] = kept
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in kept]
    return json.dumps(tokenizer, ensure_ascii=False)
