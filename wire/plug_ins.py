"""Plug-ins of installed packages: entry points by group and name, imported when asked for."""

from importlib.metadata import entry_points
from typing import NamedTuple


class BadPlugIn(Exception):
    """A plug-in cannot be used; the message names where it is."""


class PlugIn(NamedTuple):
    """The value of an entry point, and its place: MODULE:NAME."""

    value: object
    place: str


def find(group: str, name: str) -> PlugIn | None:
    """The plug-in of a name; None: there is none. Raises BadPlugIn."""
    found = list(entry_points(group=group, name=name))
    if not found:
        return None
    places = ", ".join(sorted(entry.value for entry in found))
    if len(found) > 1:
        raise BadPlugIn(f"several plug-ins serve {name}: {places}")
    try:
        return PlugIn(found[0].load(), places)
    except Exception as error:  # what a plug-in does when it is imported is not known here
        text = f"the plug-in {places} for {name} cannot be imported: {error!r}"
        raise BadPlugIn(text) from error


def names(group: str) -> list[str]:
    """The names for which there are plug-ins."""
    return sorted(entry_points(group=group).names)
