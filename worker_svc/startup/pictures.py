"""The choice whether a worker encodes pictures (--pictures), and the memory for its outputs."""

import logging
from typing import TYPE_CHECKING

from worker_svc.config import UnsupportedOption, WorkerConfig
from worker_svc.models.step_model import StepModel
from worker_svc.parallel.group import Group
from worker_svc.runner.picture_outputs import PictureOutputs

if TYPE_CHECKING:
    from worker_svc.transformers_models.config import TransformersConfig

log = logging.getLogger(__name__)

ON, OFF = "on", "off"
MIB = 1 << 20


def encodes_pictures(
    config: WorkerConfig, shape: "TransformersConfig", device_type: str, group: Group
) -> bool:
    """True if a model that transformers computes encodes pictures. Raises UnsupportedOption."""
    from worker_svc.transformers_models.pictures import form_of  # noqa: PLC0415 - an extra

    if config.pictures == OFF:
        return False
    problem = None
    if form_of(shape.whole) is None:
        problem = f"{shape.architecture} has no encoder of pictures that is served"
    elif shape.quantization is not None:
        problem = "the encoder of a quantized checkpoint is not read"
    elif group.size > 1:
        problem = "several ranks encode no pictures"
    elif device_type != "cpu" and config.pictures != ON:
        problem = f"steps would not be recorded in graphs; --pictures {ON} serves them so"
    if problem is None:
        return True
    if config.pictures == ON:
        raise UnsupportedOption(f"pictures: {ON}: {problem}")
    if getattr(shape.whole, "vision_config", None) is not None:
        log.info("pictures are not served: %s", problem)
    return False


def picture_outputs(
    config: WorkerConfig, model: StepModel, max_model_len: int
) -> PictureOutputs | None:
    """The memory for encoded pictures; None: the model encodes none."""
    tower = getattr(model, "tower", None)
    if tower is None:
        return None
    of_one_sequence = max_model_len * tower.token_bytes
    return PictureOutputs(tower, max(config.picture_cache_mib * MIB, of_one_sequence))
