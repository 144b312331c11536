"""Why a model of a hub cannot be had, in one sentence that says what to do."""

import os

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pagewire.hub.names import ModelName

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def explain(error: BaseException, name: ModelName) -> str:
    """The reason of a failed download."""
    hub = constants.ENDPOINT
    match error:
        case GatedRepoError():
            return f"{name.repository} is gated at {hub}: {_gate()}"
        case RevisionNotFoundError():
            return f"{name.repository} has no revision {name.revision!r} at {hub}"
        case RepositoryNotFoundError():
            return (
                f"{name.repository} is neither a folder here nor a repository that can be read at "
                f"{hub}; a private one needs a token in the variable HF_TOKEN{_token_given()}"
            )
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"{hub} refuses access to {name.repository}{_token_given()}: {_gate()}"
        case HfHubHTTPError():
            return f"{hub} answered {error.response.status_code} when asked for {name}"
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            return _not_cached(error, name)
        case OSError() if error.errno is not None:
            return f"{name.repository} cannot be stored in {constants.HF_HUB_CACHE}: {error}"
    return f"{name.repository} cannot be read from {hub}: {_first_line(error)}"


def _gate() -> str:
    if get_token() is None:
        return "accept its terms there, and put a token that may read it into the variable HF_TOKEN"
    return (
        "its terms must be accepted there, and the token in HF_TOKEN must be one that may read it"
    )


def _token_given() -> str:
    return "" if get_token() is None else ", and the one that is there does not open it"


def _not_cached(error: OSError, name: ModelName) -> str:
    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    lacks = f"{name} is not, or not all, in the cache {cache}"
    cause = error.__cause__
    if constants.is_offline_mode():
        variable = next((v for v in OFFLINE_VARIABLES if os.environ.get(v)), OFFLINE_VARIABLES[0])
        return f"{variable} is set, and {lacks}"
    if isinstance(cause, HfHubHTTPError):
        return explain(cause, name)
    return f"{hub} cannot be reached ({_first_line(cause or error)}), and {lacks}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
