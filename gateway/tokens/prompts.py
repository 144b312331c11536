"""Converts prompts of every form to token ids."""

from dataclasses import dataclass

from gateway.chat.breaks import mended
from gateway.chat.conversation import Conversation
from gateway.errors.request_errors import invalid
from gateway.request.generation import Prompt, ServedModel, Truncation, check_token_ids
from gateway.tokens.tokenizer import Tokenizer, too_long

MOST_TRUNCATED = 16  # times the model's limit: what is longer is refused before it is tokenized


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The ids for the scheduler, and the text they came from if there was one."""

    token_ids: list[int]
    text: str


async def tokenize(
    tokenizer: Tokenizer,
    prompt: Prompt,
    model: ServedModel,
    add_special_tokens: bool | None = None,
    *,
    num_output_tokens: int = 1,
    truncation: Truncation | None = None,
) -> TokenizedPrompt:
    """The ids of a prompt. Raises RequestError when they leave too little room for output.

    Text gets the tokenizer's special tokens; a conversation does not, since its template has them.
    """
    name = "messages" if isinstance(prompt, Conversation) else "prompt"
    if isinstance(prompt, tuple):
        if add_special_tokens:
            raise invalid("add_special_tokens", "a prompt of token ids is used as it is")
        check_token_ids(name, prompt, model.vocab_size)
        tokenized = TokenizedPrompt(list(prompt), "")
    else:
        adds = isinstance(prompt, str) if add_special_tokens is None else add_special_tokens
        text = prompt if isinstance(prompt, str) else await tokenizer.write(prompt)
        longest = model.max_model_len * (1 if truncation is None else MOST_TRUNCATED)
        token_ids = await tokenizer.encode(
            name,
            text,
            add_special_tokens=adds,
            max_tokens=longest,
            max_model_len=model.max_model_len,
        )
        tokenized = TokenizedPrompt(token_ids, text if isinstance(prompt, str) else mended(text))
    if truncation is not None:
        tokenized = _truncated(tokenized, truncation, model.max_model_len - num_output_tokens)
    num_tokens = len(tokenized.token_ids)
    if not prompt or not num_tokens:
        raise invalid(name, "is empty")
    if num_tokens + num_output_tokens > model.max_model_len:
        raise too_long(name, f"{num_tokens} tokens", model.max_model_len)
    return tokenized


def _truncated(prompt: TokenizedPrompt, truncation: Truncation, room: int) -> TokenizedPrompt:
    """The prompt with its first or last tokens alone; text that lost some is gone as a whole."""
    most = room if truncation.num_tokens is None else truncation.num_tokens
    if len(prompt.token_ids) <= most:
        return prompt
    kept = slice(most) if truncation.keeps_start else slice(-most, None)
    return TokenizedPrompt(prompt.token_ids[kept], "")
