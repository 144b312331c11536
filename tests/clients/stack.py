"""A live tiny product for clients of another environment: prints its address, runs until told.

`python -m tests.clients.stack FOLDER [--long | --pictured]`, where the services are installed.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from default_model.folder import ensure
from pagewire.cli.launcher.services import Settings
from tests.e2e.conftest import Product
from tests.tiny_model import TOOL_TEMPLATE, save_tiny_model


class StoringProduct(Product):
    """A product whose gateway keeps responses."""

    @property
    def _settings(self) -> Settings:
        return replace(super()._settings, gateway_options=("--store-responses", "16"))


LONG = "--long"
CONTEXT, BRIEF = 65536, 24  # tokens that a long model reads, and writes at most


def lengthened(model: Path) -> None:
    """Lets the model read long prompts, and has it write little where a request says nothing."""
    for name, fields in (
        ("config.json", {"max_position_embeddings": CONTEXT}),
        ("generation_config.json", {"max_new_tokens": BRIEF}),
    ):
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))


PICTURED = "--pictured"
FILES = ("one.png", "two.png")  # that it writes for its clients


def pictured(folder: Path) -> Product:
    """A product whose model takes pictures."""
    # Only here are Pillow and transformers wanted.
    from tests.e2e.pictures.stage import drawing, file_of, save_pictured_model  # noqa: PLC0415

    for seed, name in enumerate(FILES):
        (folder / name).write_bytes(file_of(drawing(seed, 24, 16)))
    model = save_pictured_model("qwen3_vl", folder / "pictured")
    options = ("--threads", "1", "--kv-cache-gib", "0.3", "--model-impl", "transformers")
    return StoringProduct(model, folder, options)


def textual(folder: Path, is_long: bool) -> Product:
    """A product with tools; a long one reads long prompts."""
    model = save_tiny_model(folder / "tiny", ensure())
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    if is_long:
        lengthened(model)
    return StoringProduct(model, folder, ("--threads", "1", "--kv-cache-gib", "0.3"))


def main() -> None:
    """Serves until standard input ends."""
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    with pictured(folder) if PICTURED in options else textual(folder, LONG in options) as product:
        product.start()
        sys.stdout.write(f"{product.url}\n")
        sys.stdout.flush()
        sys.stdin.read()
        product.stop()


if __name__ == "__main__":
    main()
