"""Members of gpt-oss's config.json that no file says: they are the architecture's."""

from collections.abc import Mapping
from typing import Any

from pagewire.gguf.header import GgufHeader

NAME = "gpt-oss"
WINDOW, ALL = "sliding_attention", "full_attention"
# Of YaRN, where the file says nothing; frequencies are blended between limits that are not rounded.
ROTATION = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def config(header: GgufHeader, common: Mapping[str, Any]) -> dict[str, Any]:
    """The content of config.json, of what all decoders have in theirs. Raises BadGguf."""
    header.require(f"{NAME}.attention.sliding_window", int)
    scaling = common["rope_scaling"] or {"rope_type": "default"}  # or the class has its own
    if scaling["rope_type"] == "yarn":
        scaling = ROTATION | scaling
    kinds = [ALL if index % 2 else WINDOW for index in range(common["num_hidden_layers"])]
    return {**common, "rope_scaling": scaling, "layer_types": kinds}
