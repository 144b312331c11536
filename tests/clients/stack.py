"""A live tiny product for clients of another environment: prints its address, runs until told.

`python -m tests.clients.stack FOLDER` with an environment that has the services.
"""

import sys
from dataclasses import replace
from pathlib import Path

from default_model.folder import ensure
from pagewire.cli.launcher.services import Settings
from tests.e2e.conftest import Product
from tests.tiny_model import save_tiny_model

TEMPLATE = """\
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


class StoringProduct(Product):
    """A product whose gateway keeps responses."""

    @property
    def _settings(self) -> Settings:
        return replace(super()._settings, gateway_options=("--store-responses", "16"))


def main() -> None:
    """Serves until standard input ends."""
    folder = Path(sys.argv[1])
    model = save_tiny_model(folder / "tiny", ensure())
    (model / "chat_template.jinja").write_text(TEMPLATE)
    product = StoringProduct(model, folder, ("--threads", "1", "--kv-cache-gib", "0.3"))
    try:
        product.start()
        sys.stdout.write(f"{product.url}\n")
        sys.stdout.flush()
        sys.stdin.read()
        product.stop()
    finally:
        product.kill()


if __name__ == "__main__":
    main()
