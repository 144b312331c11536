"""Makes Triton's interpreter prepare its language once per launch, which halves its time.

It replaces the functions of `triton.language` before each launch, and does so again at each call
of a function from a kernel. The second time changes nothing: the first lasts until the launch ends.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

LANGUAGES = ("triton.language", "triton.language.core")
Patch = Callable[[FunctionType], Any]


@cache
def quicken() -> None:
    """Does it once for this process, where kernels are interpreted by a Triton that is so built."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = once_per_launch(
            interpreter._patch_lang, interpreter._LangPatchScope
        )


def once_per_launch(patch: Patch, unchanged: Callable[[], Any]) -> Patch:
    """`patch`, but `unchanged` for modules that it has changed in the launch that runs."""
    changed: set[frozenset[str]] = set()

    def patch_once(function: FunctionType) -> Any:
        languages = languages_of(function)
        if languages in changed:
            return unchanged()
        is_launch = not changed
        scope = patch(function)
        changed.add(languages)
        return Launch(scope, changed) if is_launch else scope

    return patch_once


@cache
def languages_of(function: FunctionType) -> frozenset[str]:
    """The modules that `patch` changes, of those that a function's file imports."""
    names = {getattr(value, "__name__", "") for value in function.__globals__.values()}
    return frozenset(names.intersection(LANGUAGES))


class Launch:
    """What a launch has changed; at its end all is as before."""

    def __init__(self, scope: Any, changed: set[frozenset[str]]) -> None:
        self._scope, self._changed = scope, changed

    def restore(self) -> None:
        """Called by the interpreter, after an error too."""
        self._changed.clear()
        self._scope.restore()
