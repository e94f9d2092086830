"""Define operators of torch from one declaration each: the record of its operands gives schema, calls and fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..specs.operands import CorrectOperands, LossOperands

if TYPE_CHECKING:
    from ..specs.checked import Checked

Operands = TypeVar("Operands", CorrectOperands, LossOperands)

# The name of the package: a copy under another name, as on the Hub, has operators of its own.
NAMESPACE = __name__.partition(".")[0]
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
OPERATORS = getattr(torch.ops, NAMESPACE)

# The type in a schema by the annotation of a field.
TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    bool: "bool",
    torch.dtype: "ScalarType",
}


# The types of tensors that are memory and nothing else, and of those that are not given.
PLAIN = frozenset((Tensor, type(None)))


def seen_by_others(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether an operator must replace the kernels: something watches operators, or tensors have no memory.

    So it is under a compiler, torch.export and tracers, in modes that intercept operators, in torch.func, and for
    tensors of a class that computes in its own way. Outside of these an operator only takes time.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return not PLAIN.issuperset(map(type, tensors))


def encoded_once(value: Checked) -> tuple[str, list[float]]:
    """A Spec or an Objective as the operands of an operator."""
    from ..specs.encode import encode_once

    return encode_once(value)


def offsets_near_tokens(given: Operands) -> Operands:
    """A record with its offsets on the device of the tokens, for the kernels."""
    device = given.first.device
    offsets, turns = _for_kernels(given.offsets, device), _for_kernels(given.turns, device)
    if offsets is given.offsets and turns is given.turns:
        return given  # A copy takes longer than all of this.
    return replace(given, offsets=offsets, turns=turns)


def flat(names: tuple[str, ...], given: CorrectOperands | LossOperands) -> list[Any]:
    """The operands of an operator by the names that `define` gave, from the record that has them as fields."""
    return [getattr(given, name) for name in names]


def _for_kernels(offsets: Tensor | None, device: torch.device) -> Tensor | None:
    """Offsets on a device, contiguous: kernels index from the address of the first."""
    if offsets is None:
        return None
    return (offsets if offsets.device == device else offsets.to(device)).contiguous()


def filled(like: Tensor, *found: Tensor | None) -> tuple[Tensor, ...]:
    """Results of an operator, in order; one that is not wanted is empty, because an operator cannot return None."""
    return tuple([like.new_empty(0) if x is None else x for x in found])


def define(
    name: str,
    operands: type[Any],
    results: int,
    *,
    cuda: Callable[..., tuple[Tensor, ...]],
    cpu: Callable[..., tuple[Tensor, ...]],
    fake: Callable[..., tuple[Tensor, ...]],
    encoded: str | None = None,
) -> tuple[str, ...]:
    """Define `torch.ops.rollout_corr.NAME`, which runs `cuda` on CUDA tensors, ROCm's too, and `cpu` on the CPU's.

    Args:
        name: Its name.
        operands: A record with a field for each operand, in order. Fields whose annotations are not in `TYPES` are no
            operands, and have defaults.
        results: How many tensors it gives.
        cuda: (operands) -> results, and with `encoded` (operands, decoded).
        cpu: Likewise.
        fake: Gives results of the right shapes and dtypes without looking at values.
        encoded: The name of one more operand, a Spec or an Objective, which travels as `spec.encode` encodes it.

    Returns:
        The names of the operands from the record, in order.
    """
    hints = get_type_hints(operands)
    order = operands._fields if hasattr(operands, "_fields") else [field.name for field in fields(operands)]
    own = {each: TYPES[hints[each]] for each in order if hints[each] in TYPES}
    count = len(own)
    every = own | ({} if encoded is None else {encoded: "str", "numbers": "float[]"})
    names = tuple(every)

    def called(run: Callable[..., Any]) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        def call(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
            given = (*args, *(kwargs[key] for key in names[len(args) :])) if kwargs else args
            record = operands(**dict(zip(own, given[:count], strict=True)))
            found = run(record, *([] if encoded is None else [_decoded(*given[count:])]))
            return found if results > 1 else found[0]

        return call

    LIBRARY.define(
        f"{name}({', '.join(f'{kind} {key}' for key, kind in every.items())}) -> ({', '.join(['Tensor'] * results)})",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    LIBRARY.impl(name, called(cuda), "CUDA")
    LIBRARY.impl(name, called(cpu), "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", called(fake), lib=LIBRARY)
    return tuple(own)


def _decoded(text: str, numbers: list[float]) -> Any:
    from ..specs.encode import decode  # with every surrogate that has a kernel

    return decode(text, numbers)
