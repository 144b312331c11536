"""Mistral: perhaps a window, that of all layers."""

from dataclasses import replace

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec, UnsupportedModel

FIRST_WINDOW = 4096  # of the first model, which its config.json leaves out


def read(config: ConfigJson) -> ModelSpec:
    window, kinds = config.window(absent=FIRST_WINDOW), config.get("layer_types")
    spec = dense.decoder(config, may_slide=True)
    if window is not None and kinds is not None and set(kinds) != {dense.SLIDING}:
        # transformers' class gives all layers the window; the configuration says otherwise.
        if dense.SLIDING in kinds:
            raise UnsupportedModel("layer_types: layers of Mistral have one window, or all none")
        return replace(spec, unsure_window=window)
    return dense.windowed(config, spec, window, [True] * spec.num_layers)


FAMILY = Family("MistralForCausalLM", "mistral", read, keys=dense.WINDOW_KEYS)
