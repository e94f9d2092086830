"""The gradient of the policy loss in autograd: it was computed in the forward pass, so backward only scales it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import loss_operators


def refuse_other_derivatives(new: Tensor) -> None:
    """Refuse the derivatives that are not autograd's backward: torch.func, and tangents of forward mode."""
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        kind = "torch.func (grad, vmap, jvp and what is made of them)"
    elif forward_ad._current_level >= 0 and forward_ad.unpack_dual(new).tangent is not None:
        kind = "forward-mode differentiation, in which it has no tangent"
    else:
        return
    raise RuntimeError(
        f"policy_loss: expected a call outside of {kind}; it makes its gradient in its forward pass. Call "
        "policy_loss(...).value.backward(), or torch.autograd.grad(value, new_logp). Inside torch.func.grad, `correct` "
        "gives the weights, as constants, for a loss of your own"
    )


def scaled(gradient: Tensor, upstream: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the gradient by the upstream gradient, and divide it by what it is still to be divided by."""
    return (gradient * (upstream.double() / rest).to(gradient.dtype)).to(dtype)


class Differentiable(torch.autograd.Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(
        ctx: Any,
        new: Tensor,
        value: Tensor,
        gradient: Tensor,
        rest: Tensor,
        by_kernels: bool,
        inners: Tensor | None = None,
        offsets: Tensor | None = None,
        flags: Tensor | None = None,
    ) -> Tensor:
        """Give the value, 0-d, a gradient: d(value * rest) / d(new).

        `inners`, [S], is what each sequence's gradient is to be multiplied by; None or empty for nothing. `flags` are
        the kernels'.
        """
        ctx.save_for_backward(gradient, rest, *(() if inners is None and flags is None else (inners, offsets, flags)))
        ctx.dtype, ctx.by_kernels = new.dtype, by_kernels
        # Not the tensor that came in, or autograd would take this for the identity. Compilers shall see no alias.
        return value.clone() if torch.compiler.is_compiling() else value.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Scale the gradient."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "policy_loss: expected a backward pass without create_graph=True; its gradient is made in the forward "
                "pass and has no derivative of its own"
            )
        gradient, rest, *of_sequences = ctx.saved_tensors
        inners, offsets, flags = of_sequences or (None, None, None)
        if ctx.by_kernels:
            found = loss_operators.scaled(gradient, inners, grad_outputs[0], rest, offsets, flags, ctx.dtype)
        else:
            found = scaled(gradient, grad_outputs[0], rest, ctx.dtype)
        return found, None, None, None, None, None, None, None
