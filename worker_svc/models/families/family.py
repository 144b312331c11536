"""The record that each file of this folder, or a plug-in, holds under the name FAMILY."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worker_svc.models.config_file import ConfigJson
from worker_svc.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """The reader of an architecture's config.json.

    `config_keys` holds the keys that mean the same in all families. Any other key is refused.
    """

    architecture: str
    model_type: str
    read: Callable[[ConfigJson], ModelSpec]  # raises UnsupportedModel, naming the key
    keys: frozenset[str] = frozenset()  # that `read` reads in addition to those of all families
    # Keys that change what other models compute, and the values under which this one computes the
    # same.
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()  # keys of its own that never change what is computed
    # Architectures of several parts that hold this decoder, and nest its keys in `text_config`.
    wrappers: frozenset[str] = frozenset()
    # False: its layers have not been run on CUDA, so there they are not chosen unasked.
    measured_on_cuda: bool = True

    @property
    def architectures(self) -> frozenset[str]:
        """Every architecture that this family serves."""
        return self.wrappers | {self.architecture}
