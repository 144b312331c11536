"""Models: reads a Hugging Face folder and runs the decoder for a step."""

from worker_svc.models.decoder import Decoder
from worker_svc.models.stored.loading import DUMMY, load_model

__all__ = ["DUMMY", "Decoder", "load_model"]
