"""Models: from a Hugging Face folder to something that can run a step."""

from worker_svc.models.decoder import Decoder, load_model

__all__ = ["Decoder", "load_model"]
