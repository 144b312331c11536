"""Bounds of all lists and strings that clients send.

Ranges of single numbers are in the sampling parameters, token limits in the model.
"""

from gateway.errors.request_errors import invalid

MAX_BODY_BYTES = 32 << 20
MAX_REQUEST_ID_BYTES = 256
MAX_IDEMPOTENCY_KEY_BYTES = 256
MAX_TENANT_BYTES = 64
MAX_CACHE_SALT_BYTES = 256
MAX_PROMPTS = 2048
MAX_PROMPT_IDS = 1 << 24  # the model allows far fewer; no longer list is looked at
MAX_OUTPUTS = 4096  # of one call: its prompts times n
MAX_EMBEDDING_INPUTS = 2048
MAX_SCORED_DOCUMENTS = 1024  # each is two outputs
MAX_RECENT_ITEM_BYTES = 16 << 20  # of answers that may be named by their ids
MAX_RECENT_ITEM_BYTES_OF_CALLER = 4 << 20
MAX_BACKGROUND_RESPONSES = 256  # that run at once
MAX_BACKGROUND_OF_CALLER = 64
MAX_BACKGROUND_BYTES = 16 << 20  # of the events of those that have ended
# Agents work for days and bring every tool they know: what a body may hold is bounded by its bytes.
# These only keep what is made of its smallest entries in proportion.
MAX_MESSAGES = 32768
MAX_CONTENT_PARTS = 8192
MAX_ROLE_BYTES = 64
MAX_TOOLS = 4096
MAX_TOOL_CALLS = 128  # of one turn, and of one answer
MAX_CONTEXT_EDITS = 16
MAX_TOOL_NAME_BYTES = 128
MAX_TEMPLATE_KWARGS = 64
MAX_DOCUMENTS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 1024
MAX_BAD_WORD_TOKENS = 256
MAX_BAD_TOKEN_SEQUENCES = 512
MAX_SCHEMA_BYTES = 128 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_COMPILED_GRAMMAR_BYTES = 1 << 20
MAX_WHITESPACE_BYTES = 256
MAX_CHOICE_OPTIONS = 1024
MAX_DETOKENIZE_IDS = 1 << 20
MAX_DEBUG_ENTRIES = 1000


def check_count(field: str, count: int, limit: int) -> None:
    """Raises RequestError for a list that is too long."""
    if count > limit:
        raise invalid(field, f"{count} entries, at most {limit} are allowed")


def check_bytes(field: str, text: str, limit: int) -> None:
    """Raises RequestError for a string with too many UTF-8 bytes."""
    num_bytes = len(utf8(field, text))
    if num_bytes > limit:
        raise invalid(field, f"{num_bytes} bytes, at most {limit} are allowed")


def utf8(field: str, text: str) -> bytes:
    """The text in UTF-8. Raises RequestError for lone surrogates, which JSON allows."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise invalid(field, "is not valid Unicode: it holds a lone surrogate") from None
