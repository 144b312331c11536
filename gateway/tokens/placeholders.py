"""Puts pictures into a rendered conversation, and finds their tokens among its ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.chat.pictures import PictureSource
from gateway.errors.request_errors import invalid
from gateway.tokens.pictures.reader import PreparedPicture
from gateway.tokens.pictures.settings import PictureSettings


@dataclass(frozen=True, slots=True)
class PictureInPrompt:
    """A picture and the position of its first token in a prompt."""

    position: int
    picture: PreparedPicture


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """The spelling of the tokens of a picture, and around it."""

    begin: str
    token: str
    end: str
    gap: str

    def spelled(self, picture: PreparedPicture) -> str:
        """The text of a picture."""
        return f"{self.gap}{self.begin}{self.token * picture.num_tokens}{self.end}{self.gap}"


def put_in(
    text: str,
    sources: Sequence[PictureSource],
    pictures: Sequence[PreparedPicture],
    tokens: PictureTokens,
) -> str:
    """The rendered text with pictures in place of the marks. Raises RequestError."""
    for source, picture in zip(sources, pictures, strict=True):
        if text.count(source.mark) != 1:
            problem = "the model's chat template does not write the picture where it stands"
            raise invalid(source.place, problem)
        text = text.replace(source.mark, tokens.spelled(picture))
    return text


def find(
    token_ids: Sequence[int], pictures: Sequence[PreparedPicture], settings: PictureSettings
) -> tuple[PictureInPrompt, ...]:
    """The places of pictures. Raises RequestError where a text spells their tokens, too."""
    placed, at = [], 0
    for picture in pictures:
        while at < len(token_ids) and token_ids[at] != settings.token_id:
            at += 1
        placed.append(PictureInPrompt(at, picture))
        at += picture.num_tokens
    runs = [range(one.position, one.position + one.picture.num_tokens) for one in placed]
    expected = {position for run in runs for position in run}
    found = {at for at, token in enumerate(token_ids) if token == settings.token_id}
    if found != expected:
        raise invalid("messages", "a text spells the token that stands for pictures")
    return tuple(placed)
