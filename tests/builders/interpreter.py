"""Triton's interpreter without its repeated work: the same kernels and the same checks in half of the time.

For every value that a kernel computes, the interpreter builds a type anew: it unwraps and checks the shape, prints a
name, looks up NumPy's dtype in a new table. All of it depends on the type alone, so it is kept here by
the type's name. Where another Triton lacks one of these functions, that part is left as it is, and tests are slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Keep what the interpreter computes again and again, for as long as this is entered."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patches = [
        (interpreter, "_patch_lang", _once_a_launch),
        (interpreter, "_get_np_dtype", _by_name),
        (core.block_type, "__init__", _block_types),
        (core.tensor, "__init__", _tensors),
        (TritonSemantic, "broadcast_impl_value", _unless_alike),
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


def _by_name(np_dtype):
    """NumPy's dtype of a Triton type, found once a type."""
    found = {}

    def look_up(kind):
        if kind.name not in found:
            found[kind.name] = np_dtype(kind)
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


def _unless_alike(broadcast):
    """Broadcast two operands, unless their shapes are equal already."""

    def operands(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return operands
