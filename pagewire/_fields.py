"""Values into fields of a message; one that does not fit is an InvalidArgument that names it."""

from collections.abc import Iterable, Mapping

from google.protobuf.message import Message as ProtoMessage

from pagewire._errors import InvalidArgument


def set_fields(target: ProtoMessage, values: Mapping[str, object], *, name: str = "") -> None:
    """Sets those that are not None; `name` is what the caller knows them by."""
    for field, value in values.items():
        if value is None:
            continue
        try:
            setattr(target, field, value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{name or field}: {value!r} does not fit ({error})") from None


def extend(target: ProtoMessage, field: str, values: Iterable[object], *, name: str = "") -> None:
    """Appends to a repeated field."""
    try:
        getattr(target, field).extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name or field}: {error}") from None
