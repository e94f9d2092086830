"""Triton's interpreter without its repeated work: the same kernels and the same checks in a seventh of the time.

For every value that a kernel computes, the interpreter builds a type anew: it unwraps and checks the shape, prints a
name, looks up NumPy's dtype in a new table. All of it depends on the type alone, so it is kept here by
the type's name. Where another Triton lacks one of these functions, that part is left as it is, and tests are slower.
One result is mended: compiled kernels compare bfloat16 by value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import is_dataclass
from unittest import mock


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Keep what the interpreter computes again and again, for as long as this is entered."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter, jit

    builder = interpreter.InterpreterBuilder
    patches = [
        (interpreter, "_patch_lang", _once_a_launch),
        (interpreter, "_get_np_dtype", _by_name),
        (core.block_type, "__init__", _block_types),
        (core.dtype, "is_int", _by_name),
        (core.tensor, "__init__", _tensors),
        (interpreter, "_patch_attr", _without_wrappers),
        (TritonSemantic, "binary_op_sanitize_overflow_impl", _if_it_overflows),
        (TritonSemantic, "binary_op_type_checking_impl", _unless_fit),
        (getattr(jit, "ConstexprFunction", None), "__call__", _once_for_constants),
        *((builder, name, _of_bfloat16) for name in dir(builder) if name.startswith("create_fcmp")),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, changed in patches:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, changed(getattr(owner, name))))
        yield


def _once_a_launch(patch):
    """Exchange the functions of triton.language once a launch, not at every call of a function."""
    done = set()

    def once(fn):
        if id(fn.__globals__) in done:
            return None
        scope = patch(fn)
        if not done:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        done.add(id(fn.__globals__))
        return scope

    return once


def _by_name(ask):
    """Ask something of a Triton type once for each name: NumPy's dtype of it, whether it is an integer."""
    found = {}

    def look_up(kind):
        if kind.name not in found:
            found[kind.name] = ask(kind)
        return found[kind.name]

    return look_up


def _block_types(construct):
    """`block_type(element, shape)`: unwrapped, checked and named once for each element and shape."""
    made = {}

    def init(self, element_ty, shape):
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key in made:
            vars(self).update(made[key])
        else:
            construct(self, element_ty, shape)
            made[key] = dict(vars(self))

    return init


def _tensors(construct):
    """`tensor(handle, type)`: shape, size and dtype wrapped once for each type."""
    made = {}

    def init(self, handle, type):
        if type.name in made:
            self.handle, self.type = handle, type
            vars(self).update(made[type.name])
        else:
            construct(self, handle, type)
            made[type.name] = {name: x for name, x in vars(self).items() if name not in ("handle", "type")}

    return init


def _without_wrappers(patch_attr):
    """Call a function of triton.language itself: its wrapper checks only for what the interpreter always gives."""
    del patch_attr
    from triton.runtime.interpreter import interpreter_semantic

    def direct(obj, name, member, builder, scope):
        inner = getattr(member, "__wrapped__", member)

        def called(*args, **kwargs):
            kwargs["_semantic"] = interpreter_semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, called)

    return direct


def _unless_fit(check):
    """Convert and broadcast two operands, unless such types came back as they were; the blocks of a number are kept."""
    from triton.language import core

    fit, numbers = set(), {}

    def operands(self, lhs, rhs, *flags, **named):
        if type(lhs) is not core.tensor:
            return check(self, lhs, rhs, *flags, **named)
        if type(rhs) is core.tensor:
            key = (lhs.type.name, rhs.type.name, flags, *named.items())
            if key in fit:
                return lhs, rhs
            checked = check(self, lhs, rhs, *flags, **named)
            if checked[0] is lhs and checked[1] is rhs:
                fit.add(key)
            return checked
        # As a text, because 0.0 equals -0.0 and 1 equals True.
        key = (lhs.type.name, repr(rhs), flags, *named.items())
        if key in numbers:
            return lhs, numbers[key]
        checked = check(self, lhs, rhs, *flags, **named)
        if checked[0] is lhs and type(rhs) in (int, float, bool):
            numbers[key] = checked[1]
        return checked

    return operands


def _once_for_constants(call):
    """Call a function of constants once for each of them: names of columns, places in a plan, whether it has one."""
    from triton.language import core

    plain, found = (str, int, bool, float, type(None)), {}

    def answered(self, *args, **named):
        key = [id(self)]
        for x in (*args, *named.values()):
            if type(x) in plain:
                key += type(x), x
            elif isinstance(x, core.dtype):
                key += type(x), x.name
            elif is_dataclass(x):
                key += type(x), id(x)  # a plan is one object, and takes long to compare
            else:
                return call(self, *args, **named)
        key = (*key, *named)
        if key not in found:
            found[key] = call(self, *args, **named), args  # which stay, so that their numbers stay theirs
        return found[key][0]

    return answered


def _if_it_overflows(raise_overflow):
    """Look for an overflow of integers with NumPy, and have one reported as ever."""
    import numpy as np

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def checked(self, lhs, rhs, binary_op):
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            exact = operations[binary_op.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
            if exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value():
                raise_overflow(self, lhs, rhs, binary_op)

    return checked


def _of_bfloat16(compare):
    """Compare bfloat16 as floats. Triton 3.9's interpreter compares the bits, by which -0.0 is not 0.0."""
    from triton.language import core

    def compared(self, lhs, rhs):
        if lhs.dtype.scalar == core.bfloat16:
            lhs, rhs = self.cast_impl(lhs, core.float32), self.cast_impl(rhs, core.float32)
        return compare(self, lhs, rhs)

    return compared
