"""The function of a file for those who write their own training loop: `policy_loss`."""

from __future__ import annotations

from ..frameworks.shared.doors import Door, Within
from ..specs.correction import Spec
from .lines import WIDTH, joined
from .plain import every_token, inside_alone, shapes_of

ARGUMENTS = {
    "new_logp": "new_logp: {shape}, log-probs of the tokens under the policy that trains: float32, bfloat16, float16.",
    "advantages": "advantages: Same shape, of each token.",
    "mask": "mask: Same shape, bool, integers or floats: 0 at tokens that do not count. None: every token counts.",
    "cu_seqlens": "cu_seqlens: [S + 1], int32 or int64: where sequences begin, and where the last one ends.",
    "old_logp": "old_logp: Same shape as new_logp, log-probs under the policy before the update.",
    "rollout_logp": "rollout_logp: Same shape as new_logp, log-probs under the engine that sampled the tokens.",
    "ref_logp": "ref_logp: Same shape as new_logp, log-probs under the reference policy.",
}
RETURNS = {
    "weights": "Importance weights, float32, 0 where nothing counts.",
    "mask": "The mask of the tokens that train, in its own dtype; as given where rejection does not edit it.",
    "keep": "Whether each sequence is kept, [S] bool.",
}

WITH_GRADIENT = '''class _WithGradient(torch.autograd.Function):
    """A value whose gradient is known: backward scales it."""

    @staticmethod
    def forward(ctx, new_logp, value, gradient, divisor):
        """Keep the gradient of the value times the divisor."""
        ctx.save_for_backward(gradient, divisor)
        ctx.dtype = new_logp.dtype
        return value.detach()

    @staticmethod
    def backward(ctx, upstream):
        """Scale the gradient by what arrives from upstream."""
        if torch.is_grad_enabled():
            raise RuntimeError("policy_loss: expected a backward pass without create_graph=True")
        gradient, divisor = ctx.saved_tensors
        scale = (upstream.double() / divisor).to(gradient.dtype)
        return (gradient * scale).to(ctx.dtype), None, None, None'''


def indented(lines: list[str]) -> list[str]:
    """Lines of a block in another block."""
    return ["    " + line for line in lines]


def _public(within: Within, packed: bool, spec: Spec | None) -> str:
    more = [name for name in within.extra if name not in ("new_logp", "cu_seqlens")]
    typed = [f"    {name}: torch.Tensor{' | None' if name == 'mask' else ''}," for name in within.extra]
    typed += ['    backend: str = "eager",'] if within.fused else []
    told = [ARGUMENTS[name].format(shape="[N] or [1, N]" if packed else "[B, T]") for name in within.extra]
    if within.fused:
        told.append('backend: "eager", plain torch; or "fused", the Triton kernels, for tensors on a GPU.')
    found = ["weights", "mask", "keep"] if spec is not None else []
    types = ["torch.Tensor", *(["torch.Tensor | None", "torch.Tensor", "torch.Tensor"] if spec is not None else [])]
    flat = ".view(-1)" if packed else ""

    def given(name: str) -> str:
        if name in ("new_logp", "cu_seqlens"):
            return {"new_logp": f"new{flat}", "cu_seqlens": "cu_seqlens.to(new_logp.device, torch.int64)"}[name]
        return f"{name}{flat}" if name == "mask" else f"{name}.detach().float(){flat}"

    def as_it_is(name: str) -> str:
        return f"{name}.detach(){flat}" if name.endswith("_logp") else given(name)

    back = {"weights": "weights", "mask": "mask", "keep": "keep"}
    if packed:
        back["mask"] = "mask.view(new_logp.shape)"
        back["weights"] = "weights.view(new_logp.shape)" if spec is not None and spec.returns_weights else "weights"
    result = f"{''.join(f'{back[name]}, ' for name in found)}{within.metrics}"
    eager = [
        "    with torch.set_grad_enabled(differentiable):",
        "        new = new_logp.detach().float().requires_grad_(differentiable)",
        f"        total, divisor, {''.join(f'{name}, ' for name in found)}numbers = _eager(",
        *(f"            {given(name)}," for name in within.extra),
        "        )",
        "    value = (total.detach() / divisor).float()",
        "    if differentiable:",
        "        # The gradient is made here, where its activations end.",
        "        (gradient,) = torch.autograd.grad(total, new)",
        "        value = _WithGradient.apply(new_logp, value, gradient, divisor)",
    ]
    fused = [
        f"    value, saved, {''.join(f'{name}, ' for name in found)}numbers = _fused(",
        *(f"        {as_it_is(name)}," for name in within.extra),
        "    )",
        "    if differentiable:",
        "        value = _Scaled.apply(new_logp, value, *saved)",
    ]
    runs = {
        "_eager": eager,
        "_fused": fused,
        "run": ['    if backend == "fused":', *indented(fused), "    else:", *indented(eager)],
    }[within.call.partition("(")[0]]
    lines = [
        "def policy_loss(",
        *typed,
        f") -> tuple[{', '.join(types)}, dict[str, float]]:",
        '    """Compute a policy loss, whose gradient goes to new_logp alone.',
        "",
        "    Args:",
        joined(told, "        "),
        "",
        "    Returns:",
        "        The loss, a number in a tensor.",
        *(f"        {RETURNS[name]}" for name in found),
        "        Metrics, from one copy to the host.",
        '    """',
        *("    " + line for line in within.check if not line.startswith("run =")),
        *shapes_of(more, WIDTH),
        "        if x is not None and x.shape != new_logp.shape:",
        '            raise ValueError(f"{name}: expected shape {list(new_logp.shape)}, got {list(x.shape)}")',
        *(every_token("new_logp", packed) if packed and spec is not None else every_token("new_logp", False)),
        "    differentiable = torch.is_grad_enabled() and new_logp.requires_grad",
        *runs,
        *(inside_alone("mask") if packed and spec is not None else []),
        f"    return value, {result}",
        *(["", "", WITH_GRADIENT] if within.call.startswith(("_eager", "run")) else []),
    ]
    return "\n".join(lines)


def door_of(layout: str, spec: Spec | None) -> Door:
    """How a loss is called whose correction is a Spec, or that has none."""

    def public(within: Within) -> str:
        return _public(within, layout == "packed", spec)

    names = {"train_logp": "new_logp", "rollout_logp": "advantages", "mask": "mask"}
    return Door(layout, names, None, ("import torch",), public, "policy_loss", "return policy_loss(**batch)")
