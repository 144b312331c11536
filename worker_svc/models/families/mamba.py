"""Keys and words that configurations of models with Mamba-2 layers share."""

import math

from worker_svc.models.config_keys import FULL_ATTENTION

MAMBA = "linear_attention"  # the type of a layer
OLDER = {"mamba": MAMBA, "attention": FULL_ATTENTION}  # other words for types
# Steps have no limits. transformers limits those of prompts, and no others, so that its results
# depend on how a prompt is cut.
NEUTRAL = {"time_step_limit": ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])}
