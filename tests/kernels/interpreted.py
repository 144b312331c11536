"""Makes Triton's interpreter leave out what changes no result, which takes most of its time.

It replaces the functions of `triton.language` before each launch, and does so again at each call
of a function from a kernel. The second time changes nothing: the first lasts until the launch ends.

It computes for each sum, difference and product of integers whether it overflows, and looks at the
answer only in debug mode, which it is not in. For each value it makes tables of types and a shape
of objects, which are the same for all values of one type. For each operation it looks for the type
of the result and casts both operands, also where they have one type and one shape. Kernels are
interpreted in half the time without all this.
"""

import dataclasses
import importlib
import importlib.util
import inspect
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
    core = importlib.import_module("triton.language.core")
    semantic = importlib.import_module("triton.language.semantic").TritonSemantic
    call_directly(interpreter, core)
    hold_quickly(interpreter.TensorHandle, core)
    share_shapes(core)
    tell_kinds_by_name(core)
    leave_equal_shapes(semantic)
    leave_equal_types(semantic, core)


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


def call_directly(interpreter: Any, core: Any) -> None:
    """Calls of the language reach its functions without what checks that they stand in a kernel.

    The members of a module or class are looked through once, not at each launch.
    """
    checked = core.builtin(lambda: None).__code__

    def direct(member: Any) -> Any:
        inner = member.__wrapped__ if member.__code__ is checked else member
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    @cache
    def directly(owner: Any) -> dict[str, Any]:
        members = inspect.getmembers(owner, core.is_builtin)
        return {name: direct(member) for name, member in members}

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        for name, call in directly(owner).items():
            scope.set_attr(owner, name, call)

    interpreter._patch_builtin = patch
    unwrap, plain = core._unwrap_if_constexpr, {int, float, bool, str, core.tensor, type(None)}
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)


def hold_quickly(handle: Any, core: Any) -> None:
    """Numbers that fit their type, as all of these do, are held without more."""
    refuse = handle.__post_init__

    def hold(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if dtype is not core.int1 and data.itemsize * 8 > getattr(dtype, "primitive_bitwidth", 64):
            refuse(self)

    handle.__init__ = hold


def tell_kinds_by_name(core: Any) -> None:
    """A type finds its name in a set, not in lists that are joined each time."""
    signed, unsigned = frozenset(core.dtype.SINT_TYPES), frozenset(core.dtype.UINT_TYPES)
    floating, integers = frozenset(core.dtype.FP_TYPES), signed | unsigned
    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.dtype.is_floating = lambda self: self.name in floating
    core.dtype.is_int = lambda self: self.name in integers
    core.dtype.is_int_signed = lambda self: self.name in signed
    core.dtype.is_int_unsigned = lambda self: self.name in unsigned


def share_shapes(core: Any) -> None:
    """Values of one shape share the objects that tell it, and so do types of blocks."""
    made: dict[tuple[str, tuple[int, ...]], Any] = {}
    make, change = core.block_type.__init__, core.block_type.with_element_ty

    @cache
    def told(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def prepare_value(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type = handle, kind
        if kind.is_block():
            self.dtype, (self.numel, self.shape) = kind.element_ty, kind.told
        else:
            self.dtype, (self.numel, self.shape) = kind, told(())

    def prepare_type(self: Any, element: Any, shape: Any) -> None:
        key = element.name, tuple([getattr(n, "value", n) for n in shape])
        if key not in made:
            make(self, element, shape)
            made[key] = self.shape, self.numel, self.name, told(tuple(self.shape))
        self.element_ty, self.others = element, {}
        self.shape, self.numel, self.name, self.told = made[key]

    def share_type(self: Any, element: Any) -> Any:
        if element.is_ptr():
            return change(self, element)
        if element.name not in self.others:
            self.others[element.name] = change(self, element)
        return self.others[element.name]

    core.tensor.__init__ = prepare_value
    core.block_type.__init__ = prepare_type
    core.block_type.with_element_ty = share_type


def leave_equal_shapes(semantic: Any) -> None:
    """Two blocks of one shape, or two scalars, are not broadcast; of two others one looks once."""
    broadcast = semantic.broadcast_impl_value
    shapes: dict[tuple[int, int], Any] = {}  # types of results, by the shapes, which are for good

    def widened(self: Any, value: Any, to: Any) -> Any:
        if value.shape is to.told[1]:
            return value
        kind = to.with_element_ty(value.dtype)
        if value.type.is_block():
            return self.make_tensor(self.builder.create_broadcast(value.handle, kind.shape), kind)
        return self.make_tensor(self.builder.create_splat(kind, value.handle), kind)

    def broadcast_others(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:  # which all values of this shape have
            return left, right
        pair = id(left.shape), id(right.shape)
        if pair not in shapes:
            shapes[pair] = broadcast(self, left, right)[0].type
        return widened(self, left, shapes[pair]), widened(self, right, shapes[pair])

    semantic.broadcast_impl_value = broadcast_others


def leave_equal_types(semantic: Any, core: Any) -> None:
    """Operands of one type are not cast, and a number is cast and broadcast once for a type."""
    check = semantic.binary_op_type_checking_impl
    constants: dict[tuple[Any, ...], Any] = {}

    def check_others(
        self: Any, left: Any, right: Any,
        left_may_point: bool = False, right_may_point: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        rest = left_may_point, right_may_point, arithmetic_check, div_or_mod
        kind = type(right)
        if type(left) is core.tensor and left.dtype.is_ptr():
            if kind is core.tensor and left_may_point and right.dtype.is_int():
                return self.broadcast_impl_value(left, right)
        elif type(left) is core.tensor and arithmetic_check:
            if kind is core.tensor and left.dtype is right.dtype and not div_or_mod:
                return self.broadcast_impl_value(left, right)
            if kind is int or (kind is float and right != 0):  # a zero has a sign
                key = left.type.name, kind, right, div_or_mod
                if key not in constants:
                    pair = check(self, left, right, *rest)
                    if pair[0] is not left:
                        return pair
                    pair[1].handle.data.setflags(write=False)
                    constants[key] = pair[1]
                return left, constants[key]
        return check(self, left, right, *rest)

    semantic.binary_op_type_checking_impl = check_others


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
