"""Parts of a turn that are no text: refused by name, or nothing where their content is left out.

Some agents take a picture out of the conversation and go on once they read that it could not be
processed: Claude Code the first sentence, Codex the second.
"""

from collections.abc import Collection, Mapping
from typing import Any

from gateway.chat.pictures import PictureSource, given_pictures
from gateway.errors.request_errors import unsupported

IMAGE = "could not process image: the model reads text only"
FILE = "could not process pdf: the model reads text only"
NO_IMAGE = "The image data you provided does not represent a valid image for it"
_IMAGES = ("image", "image_url", "input_image", "computer_screenshot")
_FILES = ("file", "input_file", "document")
_CARRIERS = ("source", "image_url", "image", "file", "file_id", "file_data", "file_url")
_INSIDE = ("data", "url", "file_id", "file_data")


def readable(
    path: str, parts: list[Any], known: Collection[str], *, takes_pictures: bool = True
) -> list[Any]:
    """The parts without those whose content was left out, and with marks in place of pictures.

    Raises RequestError naming the first of a type that is none of the `known` ones.
    """
    kept = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind in known:
            kept.append(part)
        elif not is_left_out(kind, part):
            place = f"{path}[{index}].type"
            if not takes_pictures:
                raise unsupported(place, problem(kind, known))
            kept.append({"type": "text", "text": mark_of(place, kind, part, known)})
    return kept or ([{"type": "text", "text": ""}] if parts else [])


def mark_of(place: str, kind: str, part: Mapping[str, Any], known: Collection[str]) -> str:
    """The mark of a picture, as the text that stands for it.

    Raises RequestError for a part that is none, or where pictures are not taken.
    """
    given, why = given_pictures(), problem(kind, known)
    url = _url_of(part) if kind in _IMAGES else None
    if given is None or kind not in _IMAGES:
        raise unsupported(place, why)
    if url is None:
        raise unsupported(place, f"{kind!r} has no URL and no data: others are not read")
    return given.add(PictureSource(place.removesuffix(".type"), why, url))


def _url_of(part: Mapping[str, Any]) -> str | None:
    """The URL of a picture in any API's form; None where there is none.

    OpenAI's chats have an object with it, their responses the URL itself, Anthropic a source.
    """
    given = part.get("image_url", part.get("image"))
    if isinstance(given, Mapping):
        given = given.get("url")
    if isinstance(given, str):
        return given
    source = part.get("source")
    if not isinstance(source, Mapping):
        return None
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type', '')};base64,{source['data']}"
    url = source.get("url")
    return url if isinstance(url, str) else None


def is_left_out(kind: str, part: Mapping[str, Any]) -> bool:
    """True if an earlier step took the content out of a part and left its wrapping."""
    if kind not in (*_IMAGES, *_FILES):
        return False
    return not any(_carries(part.get(name)) for name in _CARRIERS)


def _carries(value: Any) -> bool:
    """True if something is there: text, or an object that is not known to hold an empty one."""
    if not isinstance(value, Mapping):
        return bool(value)
    named = [value[name] for name in _INSIDE if name in value]
    return not named or any(named)


def problem(kind: str, known: Collection[str]) -> str:
    """The reason why a part of this type is refused."""
    if kind in _IMAGES:
        return f"{IMAGE} ({kind}). {NO_IMAGE}"
    if kind in _FILES:
        return f"{FILE} ({kind})"
    supported = " or ".join(map(repr, known))
    return f"{kind[:64]!r} is not supported by this model, only {supported}"
