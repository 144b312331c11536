"""Converts prompts of every form to token ids."""

from dataclasses import dataclass

from gateway.chat.breaks import mended
from gateway.chat.conversation import Conversation
from gateway.errors.request_errors import invalid, unsupported
from gateway.request.generation import Prompt, ServedModel, Truncation, check_token_ids
from gateway.tokens.pictures.reader import PictureReader, PreparedPicture
from gateway.tokens.placeholders import PictureInPrompt, PictureTokens, find, put_in
from gateway.tokens.tokenizer import Tokenizer, too_long

MOST_TRUNCATED = 16  # times the model's limit: what is longer is refused before it is tokenized


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """The ids for the scheduler, and the text they came from if there was one."""

    token_ids: list[int]
    text: str
    pictures: tuple[PictureInPrompt, ...] = ()


async def tokenize(
    tokenizer: Tokenizer,
    prompt: Prompt,
    model: ServedModel,
    add_special_tokens: bool | None = None,
    *,
    num_output_tokens: int = 1,
    truncation: Truncation | None = None,
    pictures: PictureReader | None = None,
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
        shown: list[PreparedPicture] = []
        if isinstance(prompt, str):
            text = prompt
        else:
            text, shown = await _written(tokenizer, prompt, pictures)
        longest = model.max_model_len * (1 if truncation is None else MOST_TRUNCATED)
        token_ids = await tokenizer.encode(
            name,
            text,
            add_special_tokens=adds,
            max_tokens=longest,
            max_model_len=model.max_model_len,
        )
        placed = find(token_ids, shown, shown[0].settings) if shown else ()
        tokenized = TokenizedPrompt(
            token_ids, text if isinstance(prompt, str) else mended(text), placed
        )
    if truncation is not None:
        if tokenized.pictures:
            raise unsupported("truncate_prompt_tokens", "a prompt with pictures is never cut")
        tokenized = _truncated(tokenized, truncation, model.max_model_len - num_output_tokens)
    num_tokens = len(tokenized.token_ids)
    if not prompt or not num_tokens:
        raise invalid(name, "is empty")
    if num_tokens + num_output_tokens > model.max_model_len:
        raise too_long(name, f"{num_tokens} tokens", model.max_model_len)
    return tokenized


async def _written(
    tokenizer: Tokenizer, conversation: Conversation, pictures: PictureReader | None
) -> tuple[str, list[PreparedPicture]]:
    """The rendered text of a conversation, and its pictures. Raises RequestError."""
    sources = conversation.pictures
    if not sources:
        return await tokenizer.write(conversation), []
    if pictures is None:
        raise unsupported(sources[0].place, sources[0].problem)
    # Rendered first: it costs less, and says what is wrong with the turns.
    text = await tokenizer.write_around(conversation.with_marks_apart())
    prepared = await pictures.prepare(sources)
    settings = pictures.settings
    ids = settings.begin_id, settings.token_id, settings.end_id
    begin, token, end = map(tokenizer.spelled, ids)
    tokens = PictureTokens(begin, token, end, settings.gap)
    return put_in(text, sources, prepared, tokens), prepared


def _truncated(prompt: TokenizedPrompt, truncation: Truncation, room: int) -> TokenizedPrompt:
    """The prompt with its first or last tokens alone; text that lost some is gone as a whole."""
    most = room if truncation.num_tokens is None else truncation.num_tokens
    if len(prompt.token_ids) <= most:
        return prompt
    kept = slice(most) if truncation.keeps_start else slice(-most, None)
    return TokenizedPrompt(prompt.token_ids[kept], "")
