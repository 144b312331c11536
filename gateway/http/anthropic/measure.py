"""The length of a conversation's prompt in tokens, computed once for each form of it."""

from collections.abc import Callable

from gateway.chat.conversation import Conversation
from gateway.http.anthropic.blocks import Turn
from gateway.tokens.tokenizer import Tokenizer

SPARE_BYTES = 16  # a tokenizer may add a space of its own: no prompt has more tokens than bytes


class Measure:
    """Counts the tokens of turns, with the tools and settings of one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        chat_of: Callable[[list[Turn]], Conversation],
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len  # bounds the texts that are tokenized
        self._chat_of = chat_of
        self._texts: list[tuple[list[Turn], str]] = []
        self._counts: list[tuple[list[Turn], int]] = []

    async def num_tokens(self, turns: list[Turn]) -> int:
        """The number of tokens of the prompt. Raises RequestError."""
        known = next((count for other, count in self._counts if other is turns), None)
        if known is not None:
            return known
        text = await self._text(turns)
        token_ids = await self._tokenizer.encode(
            "messages", text, add_special_tokens=False, max_model_len=self._max_model_len
        )
        self._counts.append((turns, len(token_ids)))
        return len(token_ids)

    async def exceeds(self, turns: list[Turn], limit: int) -> bool:
        """True if the prompt has more tokens; short ones are not tokenized to know it."""
        if len((await self._text(turns)).encode("utf-8", "replace")) + SPARE_BYTES <= limit:
            return False
        return await self.num_tokens(turns) > limit

    async def _text(self, turns: list[Turn]) -> str:
        known = next((text for other, text in self._texts if other is turns), None)
        if known is None:
            known = await self._tokenizer.write(self._chat_of(turns))
            self._texts.append((turns, known))
        return known
