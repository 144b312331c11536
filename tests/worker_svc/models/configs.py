"""Configurations of models as published, and what is read of them, with changes."""

import json
from pathlib import Path
from typing import Any

from worker_svc.models import config as model_config
from worker_svc.models.spec import ModelSpec, MoeSpec

_PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
NAMES = tuple(_PUBLISHED)
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA: dict[str, Any] = _PUBLISHED["llama"]


def published(name: str, **changes: Any) -> dict[str, Any]:
    """A configuration, with changes of its text; the value `...` removes a key.

    Where the file leaves out the sizes of a model they are those of LLAMA.
    """
    found: dict[str, Any] = _PUBLISHED[name]
    if "text_config" in found:
        return found | {"text_config": changed(found["text_config"], **changes)}
    return changed(found if "hidden_size" in found else LLAMA | found, **changes)


def changed(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A configuration with changes; the value `...` removes a key."""
    return {name: value for name, value in (raw | changes).items() if value is not ...}


def read(folder: Path, raw: dict[str, Any] | str, **changes: Any) -> ModelSpec:
    """Reads a configuration, or a published one by its name, with changes, as a folder has it."""
    raw = published(raw, **changes) if isinstance(raw, str) else changed(raw, **changes)
    (folder / "config.json").write_text(json.dumps(raw))
    return model_config.load(folder)


def windows(spec: ModelSpec) -> list[int | None]:
    """The window of each layer."""
    return [layer.mixer.window for layer in spec.layers]


def feed_of(spec: ModelSpec) -> MoeSpec:
    """The experts of the last layer."""
    feed = spec.layers[-1].feed
    assert isinstance(feed, MoeSpec)
    return feed
