"""The function of a file for those who write their own training loop: `correct`."""

from __future__ import annotations

from ..frameworks.shared.doors import Door, Within
from .lines import joined

PACKED = """train_logp, rollout_logp: [N] or [1, N], log-probs of the same tokens by the trainer and by the
    engine that sampled them: float32, bfloat16 or float16.
mask: Same shape, bool, integers or floats: 0 at tokens that do not count. None: every token counts.
cu_seqlens: [S + 1], int32 or int64: where sequences begin, and where the last one ends."""
PADDED = """train_logp, rollout_logp: [B, T], log-probs of the same tokens by the trainer and by the engine that
    sampled them: float32, bfloat16 or float16. Each row is a sequence.
mask: Same shape, bool, integers or floats: 0 at tokens that do not count. None: every token counts."""
EXTRA = {
    "advantages": "advantages: Same shape, of each token.",
    "ages": "ages: Same shape, float: how many updates older than the trainer the token's policy is.",
    "entropy": "entropy: Same shape, float32, of the trainer's distribution at each token.",
    "cu_turns": "cu_turns: [U + 1], int64: where turns begin among the tokens, row after row.",
}


def every_token(logp: str, packed: bool) -> list[str]:
    """The lines of a mask for who gives none: packed tokens outside of every sequence do not count."""
    if not packed:
        return [f"        mask = torch.ones_like({logp}, dtype=torch.bool)"]
    return [
        f"        token = torch.arange({logp}.numel(), device={logp}.device)",
        f"        mask = ((token >= cu_seqlens[0]) & (token < cu_seqlens[-1])).view({logp}.shape)",
    ]


def _public(within: Within, packed: bool) -> str:
    tensors = ["train_logp", "rollout_logp", "mask", *(["cu_seqlens"] if packed else []), *within.extra]
    typed = [f"    {name}: torch.Tensor{' | None' if name == 'mask' else ''}," for name in tensors]
    if within.fused:
        typed.append('    backend: str = "eager",')
    weights = "torch.Tensor" if within.spec.returns_weights else "None"
    told = PACKED if packed else PADDED
    for name in within.extra:
        told += "\n" + EXTRA.get(name, f"{name}: Same shape, float32: a statistic of each token.")
    if within.fused:
        told += '\nbackend: "eager", plain torch; or "fused", the Triton kernels, for tensors on a GPU.'
    shaped = "{}.view(train_logp.shape)" if packed else "{}"
    returned = [shaped.format("weights") if within.spec.returns_weights else "None", shaped.format("kept_mask")]
    call = within.call.format(
        train="train.view(-1)" if packed else "train", rollout="rollout.view(-1)" if packed else "rollout",
        mask="mask.view(-1)" if packed else "mask", offsets="offsets",
    )  # fmt: skip
    lines = [
        "def correct(",
        *typed,
        f") -> tuple[{weights}, torch.Tensor, torch.Tensor, dict[str, float]]:",
        '    """Correct a batch; nothing waits for the device before the metrics are read.',
        "",
        "    Args:",
        joined(told.splitlines(), "        "),
        "",
        "    Returns:",
        "        " + ("Weights, float32, 0 where nothing counts." if within.spec.returns_weights else "None."),
        "        The mask of the tokens that train, in its own dtype.",
        "        Whether each sequence is kept, [S] bool.",
        "        Metrics, from one copy to the host.",
        '    """',
        *("    " + line for line in within.check),
        '    for name, x in (("rollout_logp", rollout_logp), ("mask", mask)):',
        "        if x is not None and x.shape != train_logp.shape:",
        '            raise ValueError(f"{name}: expected shape {list(train_logp.shape)}, got {list(x.shape)}")',
        "    if mask is None:",
        *every_token("train_logp", packed),
        "    train, rollout = train_logp.detach(), rollout_logp.detach()",
        *(["    offsets = cu_seqlens.to(train.device, torch.int64)"] if packed else []),
        f"    weights, kept_mask, keep{', numbers' if within.metrics != '{}' else ''} = {call}",
        f"    return {', '.join(returned)}, keep, {within.metrics}",
    ]
    return "\n".join(lines)


NAMES = {"train_logp": "train_logp", "rollout_logp": "rollout_logp", "mask": "mask"}


def _door(layout: str) -> Door:
    def public(within: Within) -> str:
        return _public(within, layout == "packed")

    return Door(layout, NAMES, None, ("import torch",), public, "correct", "return correct(**batch)")


DOORS = {layout: _door(layout) for layout in ("packed", "padded")}
