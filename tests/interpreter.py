"""Kernels of a GPU in Triton's interpreter, which is kept from doing the same work again.

conftest.py of the kernels imports this before it is known whether Triton is to interpret, so that
nothing here may import Triton sooner than a test does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


@cache
def interpret_quickly() -> None:
    """Keeps what the interpreter would make again at every operation.

    - Names of operations are looked up once, where it goes through every member of five modules,
      and they are replaced once, not again for each kernel and each function in it.
    - The parts of a shape and numpy's dtype for one of Triton's are kept.
    - From bfloat16 to float32 16 bits come, as its dozens of operations find for all numbers but
      the smallest, which they get wrong. From float32 to bfloat16 numbers are rounded to the
      nearest, as a GPU rounds them, where it would cut them off: the one result that changes.
    - Whether integers overflow is not computed, with ten operations for each sum and product: it
      would only be looked at with debug on.
    - Operands of one type and shape are taken as they are, and a number beside a tensor becomes one
      of its shape once.

    It stays so until the process ends.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    _replace_operations_once(interpreter)
    _cast_at_once(interpreter)
    _hold_at_once(interpreter)
    _keep_shapes()
    _keep_operands(interpreter)


def _kept_by_name(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function of a type in Triton, asked once for each name of a type."""
    known: dict[str, Any] = {}

    def kept(of: Any) -> Any:
        if of.name not in known:
            known[of.name] = function(of)
        return known[of.name]

    return kept


def _replace_operations_once(interpreter: Any) -> None:
    """Which names are operations does not change, and nobody needs them as they were."""
    from triton import language
    from triton.language.core import is_builtin

    patch_lang = interpreter._patch_lang

    @cache
    def operations(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    outermost = language.core.load.__code__  # which only asks whether there is a semantic

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in operations(package):
            member = getattr(package, name)
            if is_builtin(member):
                function = member.__wrapped__ if member.__code__ is outermost else member
                setattr(package, name, _with(interpreter.interpreter_semantic, function))

    @cache
    def packages(function: Any) -> list[Any]:
        named = function.__globals__.values()
        return [each for each in (language, language.core) if any(each is one for one in named)]

    def patch_lang_once(function: Any) -> Any:
        assert packages(function), "triton.language must be visible from within jit'd function"
        if any(is_builtin(package.load) for package in packages(function)):
            patch_lang(function)
        return interpreter._LangPatchScope()

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once


def _with(semantic: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the language as the interpreter does it."""

    def operation(*args: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return function(*args, **options)

    return operation


def _hold_at_once(interpreter: Any) -> None:
    """How many bytes a number may have is looked up by the name of its type."""
    from triton import language

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    most: dict[str, int] = {}

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        name = dtype.name
        if name not in most:
            pointer = isinstance(dtype, language.pointer_type)
            most[name] = 1 << 62 if pointer else max(8, dtype.primitive_bitwidth) // 8
        if data.itemsize > most[name]:
            raise ValueError(f"numbers of {data.itemsize} bytes exceed those of {dtype}")

    def binary_op(self: Any, left: Any, right: Any, operation: Any) -> Any:
        found, dtype = operation(left.data, right.data), left.dtype.scalar
        if dtype.name in most and found.itemsize > most[dtype.name]:
            found = found.astype(interpreter._get_np_dtype(dtype))
        return handle(found, dtype)

    handle.__init__ = init
    builder.binary_op = binary_op


def _keep_operands(interpreter: Any) -> None:
    """What both operands become does not depend on their numbers, but where one is a number."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    check, tensor, handle = (
        TritonSemantic.binary_op_type_checking_impl, core.tensor, interpreter.TensorHandle,
    )  # fmt: skip
    plain = {id(each) for each in vars(core).values() if type(each) is core.dtype}
    known: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def operands(
        self: Any, left: Any, right: Any, left_ptr: bool = False, right_ptr: bool = False,
        arithmetic: bool = True, divides: bool = False,
    ) -> Any:  # fmt: skip
        if type(left) is not tensor or type(right) is not tensor:
            return with_a_number(self, left, right, left_ptr, right_ptr, arithmetic, divides)
        same = left.dtype is right.dtype and left.shape is right.shape
        if same and not divides and id(left.dtype) in plain:
            return left, right
        return check(self, left, right, left_ptr, right_ptr, arithmetic, divides)

    def with_a_number(self: Any, left: Any, right: Any, *how: bool) -> Any:
        if type(left) is not tensor or type(right) not in (int, float):
            return check(self, left, right, *how)
        key = type(right), right, left.type.name, *how
        if key in known:
            data, kind = known[key]
            return left, tensor(handle(data, kind.scalar), kind)
        found, number = check(self, left, right, *how)
        if found is left:
            if len(known) == 4096:
                known.clear()
            known[key] = number.handle.data, number.type
        return found, number

    TritonSemantic.binary_op_type_checking_impl = operands  # type: ignore[method-assign]


def _cast_at_once(interpreter: Any) -> None:
    """bfloat16 is the first half of float32."""
    from triton import language

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        types = src.dtype.scalar, dst_type.scalar
        if types == (language.bfloat16, language.float32):
            return handle((src.data.astype(np.uint32) << 16).view(np.float32), types[1])
        if types == (language.float32, language.bfloat16):
            return handle(_rounded(np.ascontiguousarray(src.data).view(np.uint32)), types[1])
        return cast(self, src, dst_type)

    builder.cast_impl = cast_impl


def _rounded(bits: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The bits of bfloat16 nearest to those of float32, of two equally near the even one."""
    number = (bits & 0x7FFFFFFF) <= 0x7F800000
    up = np.where(number, 0x7FFF + (bits >> 16 & 1), 0)
    # NaN stays one where the bits that say so are cut off
    return ((bits + up) >> 16 | np.where(number, 0, 0x40)).astype(np.uint16)


def _keep_shapes() -> None:
    """Types and tensors of one shape share the tuples that name it, which nothing changes.

    So two of them are of one shape where their tuples are one, and none has to be broadcast.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_type = core.block_type.__init__
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    shapes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    scalar = core.constexpr(1), core.tuple([])

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [core._unwrap_if_constexpr(each) for each in shape]
        # with their types: 8.0 and True are equal to sizes, and are none
        key = element_ty.name, *((type(each), each) for each in sizes)
        if key not in known:
            make_type(self, element_ty, shape)
            if key[1:] not in shapes:
                constants = core.tuple([core.constexpr(each) for each in self.shape])
                shapes[key[1:]] = self.shape, self.numel, (core.constexpr(self.numel), constants)
            known[key] = *shapes[key[1:]], self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.as_constants, self.name = known[key]

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.as_constants if type.is_block() else scalar

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape is other.shape:
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_others  # type: ignore[method-assign]
    core.block_type.__init__ = init_type  # type: ignore[method-assign]
    core.tensor.__init__ = init_tensor  # type: ignore[method-assign]


def kernels_of_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Every device counts as one that Triton compiles for."""
    from specexec_kernels import dispatch

    interpret_quickly()
    patch.setattr(dispatch, "uses_triton", lambda device: True)


def only_kernels_attend(patch: pytest.MonkeyPatch, attention: ModuleType) -> None:
    """As on a GPU, and what computes attention by PyTorch's operations is gone.

    Args:
        attention: models/attention.py, which tests of the kernels alone must not import by this.
    """
    kernels_of_a_gpu(patch)
    for name in ("_dense_attention", "_grouped", "_split"):
        patch.delattr(attention, name)
