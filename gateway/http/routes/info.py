"""Facts of this server for tools of other servers: /ping, /version, /load, /server_info, ..."""

from typing import Any

from fastapi import FastAPI

import pagewire
from gateway.pipeline.pipeline import Pipeline
from gateway.tokens.tokenizer import Tokenizer


def add_info_routes(app: FastAPI, pipeline: Pipeline, tokenizer: Tokenizer) -> None:
    """Adds the routes. None tells an address, a path or an option that holds a secret."""

    @app.get("/ping", include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    async def ping() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": pagewire.__version__}

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": pipeline.num_open}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        model = pipeline.resolve_model(None)
        return {
            "version": pagewire.__version__,
            "model": model.name,
            "architecture": model.architecture,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
            "eos_token_ids": list(model.eos_token_ids),
            "sampling_defaults": pipeline.sampling_defaults.given(),
            "chat_format": pipeline.chat_format.described(),
        }

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        template = tokenizer.template
        return {
            "vocab_size": tokenizer.vocab_size,
            "sha256": tokenizer.sha256,
            "chat_template": None if template is None else template.source,
            "special_tokens": {} if template is None else template.special_tokens,
        }
