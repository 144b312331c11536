"""The draft model of --speculative-config, which is an option of the worker, too."""

import json
from pathlib import Path


def words_for_worker(speculative_config: str | None) -> tuple[str, ...]:
    """The worker's options for the model that the scheduler drafts with.

    Of what is no such JSON nothing: the scheduler refuses it with a reason.
    """
    try:
        config = json.loads(speculative_config or "{}")
    except json.JSONDecodeError:
        return ()
    if not isinstance(config, dict) or config.get("method") != "draft_model":
        return ()
    model = config.get("model")
    if not isinstance(model, str):
        return ()
    path = Path(model)  # absolute, if it is one: the services run in another folder
    return ("--draft-model", str(path.absolute()) if path.exists() else model)
