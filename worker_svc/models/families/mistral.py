"""Mistral: perhaps a window, that of all layers."""

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.families import dense
from worker_svc.models.families.family import Family
from worker_svc.models.spec import ModelSpec

FIRST_WINDOW = 4096  # of the first model, which its config.json leaves out


def read(config: ConfigJson) -> ModelSpec:
    spec = dense.decoder(config, may_slide=True)
    return dense.windowed_throughout(config, spec, config.window(absent=FIRST_WINDOW))


FAMILY = Family("MistralForCausalLM", "mistral", read, keys=dense.WINDOW_KEYS)
