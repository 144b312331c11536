"""Sets message fields; a value that does not fit raises InvalidArgument with the field's name."""

from collections.abc import Iterable, Mapping

from google.protobuf.message import Message as ProtoMessage

from pagewire._errors import InvalidArgument


def set_fields(target: ProtoMessage, values: Mapping[str, object], *, name: str = "") -> None:
    """Sets the values that are not None; errors call the message `name`."""
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
