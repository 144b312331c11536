"""The model's own sampling defaults: what its generation_config.json asks for.

They hold where a request leaves a field out, as in vLLM. `do_sample` decides nothing, as there; the
ids that end an output are read by the worker, whatever is chosen here.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gateway.errors.request_errors import RequestError
from gateway.request.generation import GenerationRequest, SamplingParams
from pagewire.gguf.files import file_in, read_file

AUTO, NONE = "auto", "none"
FILE = "generation_config.json"
MAX_TOKENS = "max_new_tokens"  # as the file calls max_tokens


class BadGenerationConfig(ValueError):
    """A generation config cannot be used; the message names the file and the key."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for the fields that a request leaves out; None leaves the default to the scheduler."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """The values by name, without those that the model does not set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def fill(self, request: GenerationRequest) -> GenerationRequest:
        """The request with these values where it has none."""
        sampling = request.sampling
        missing = {
            name: value for name, value in self.given().items() if getattr(sampling, name) is None
        }
        if not missing:
            return request
        if "max_tokens" in missing:
            missing["max_tokens"] = max(missing["max_tokens"], sampling.min_tokens or 0)
        return replace(request, sampling=replace(sampling, **missing))


NO_DEFAULTS = SamplingDefaults()


def read_defaults(model: Path, chosen: str = AUTO) -> SamplingDefaults:
    """The defaults by --generation-config: auto (the model's), none, or a folder's.

    Raises BadGenerationConfig, or BadGguf.
    """
    if chosen == NONE:
        return NO_DEFAULTS
    source = model if chosen == AUTO else Path(chosen)
    path = file_in(source, FILE)
    content = read_file(source, FILE)
    if content is None:
        if chosen == AUTO:
            return NO_DEFAULTS
        raise BadGenerationConfig(f"--generation-config: there is no {path}")
    try:
        config = json.loads(content)
    except ValueError as error:
        raise BadGenerationConfig(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise BadGenerationConfig(f"{path} is not a JSON object")
    return _checked(path, config)


def _checked(path: Path, config: dict[str, Any]) -> SamplingDefaults:
    values: dict[str, Any] = {}
    for field in fields(SamplingDefaults):
        key = MAX_TOKENS if field.name == "max_tokens" else field.name
        value = config.get(key)
        if value is None:
            continue
        kinds = (int,) if field.name in ("top_k", "max_tokens") else (int, float)
        if type(value) not in kinds:
            raise BadGenerationConfig(f"{path}: {key} is {value!r}, not a number as it must be")
        values[field.name] = value
    try:
        SamplingParams(**values).check(vocab_size=1)
    except RequestError as error:
        hint = "--generation-config none serves the model without its defaults"
        raise BadGenerationConfig(f"{path}: {error}; {hint}") from error
    return SamplingDefaults(**values)
