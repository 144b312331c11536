"""Makes Triton's interpreter leave out what changes no result, which takes most of its time.

It replaces the functions of `triton.language` before each launch, and does so again at each call
of a function from a kernel. The second time changes nothing: the first lasts until the launch ends.

It computes for each sum, difference and product of integers whether it overflows, and looks at the
answer only in debug mode, which it is not in. For each value it makes tables of types and a shape
of objects, which are the same for all values of one type.
"""

import dataclasses
import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

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
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(builder, "options") and not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = once_per_type(interpreter._get_np_dtype)
    share_shapes(importlib.import_module("triton.language.core"))
    leave_equal_shapes(importlib.import_module("triton.language.semantic").TritonSemantic)


@cache
def mend_products() -> None:
    """Gives products of matrices in bfloat16 their meaning, once for this process.

    The interpreter holds such numbers as integers of 16 bits, and multiplies those.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    multiply = interpreter.InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar.name != "bf16":
            return operand
        wide = (operand.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def multiply_wide(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = multiply_wide


def once_per_type(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`find`, of a type or of a block of it, called once for each type."""
    found: dict[str, Any] = {}

    def find_once(of: Any) -> Any:
        name = of.scalar.name
        if name not in found:
            found[name] = find(of)
        return found[name]

    return find_once


def share_shapes(core: Any) -> None:
    """Values of one shape share the objects that tell it, and so do types of blocks."""
    made: dict[tuple[str, tuple[int, ...]], Any] = {}
    make = core.block_type.__init__

    @cache
    def told(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def prepare_value(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = told(tuple(kind.shape) if kind.is_block() else ())

    def prepare_type(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple(getattr(n, "value", n) for n in shape)
        if key not in made:
            make(self, element, shape)
            made[key] = self.shape, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = made[key]

    core.tensor.__init__ = prepare_value
    core.block_type.__init__ = prepare_type


def leave_equal_shapes(semantic: Any) -> None:
    """Two blocks of one shape, or two scalars, are not broadcast."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:  # which all values of this shape have
            return left, right
        return broadcast(self, left, right)

    semantic.broadcast_impl_value = broadcast_others


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
    """The changes of a launch; at its end all is as before."""

    def __init__(self, scope: Any, changed: set[frozenset[str]]) -> None:
        self._scope, self._changed = scope, changed

    def restore(self) -> None:
        """Called by the interpreter, after an error too."""
        self._changed.clear()
        self._scope.restore()
