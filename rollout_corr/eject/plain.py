"""The function of a file for those who write their own training loop: `correct`."""

from __future__ import annotations

from collections.abc import Sequence

from ..frameworks.shared.doors import Door, Within
from .lines import WIDTH, joined

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
    """The lines of a mask for a call without one, in whose result packed tokens outside of sequences are not."""
    ones = f"        mask = torch.ones_like({logp}, dtype=torch.bool)"
    if not packed:
        return ["    if mask is None:", ones]
    return [
        "    inside = None",
        "    if mask is None:",
        ones,
        f"        token = torch.arange({logp}.numel(), device={logp}.device)",
        "        inside = (token >= cu_seqlens[0]) & (token < cu_seqlens[-1])",
    ]


def shapes_of(names: Sequence[str], width: int) -> list[str]:
    """The head of the loop that checks the shapes of tensors."""
    pairs = [f'("{name}", {name})' for name in names]
    head = f"    for name, x in ({', '.join(pairs)}):"
    return [head] if len(head) <= width else ["    for name, x in (", *(f"        {pair}," for pair in pairs), "    ):"]


def inside_alone(mask: str) -> list[str]:
    """The lines behind the call that take tokens outside of every sequence out of a mask."""
    return ["    if inside is not None:", f"        {mask} = {mask} & inside"]


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
    per_token = [name for name in within.extra if name != "cu_turns"]
    checked = ("rollout_logp", "mask", *per_token)
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
        "        The mask of the tokens that train, in its own dtype; as given where rejection does not edit it.",
        "        Whether each sequence is kept, [S] bool.",
        "        Metrics, from one copy to the host.",
        '    """',
        *("    " + line for line in within.check),
        *shapes_of(checked, WIDTH),
        "        if x is not None and x.shape != train_logp.shape:",
        '            raise ValueError(f"{name}: expected shape {list(train_logp.shape)}, got {list(x.shape)}")',
        *every_token("train_logp", packed),
        *(f"    {name} = {name}.view(-1)" for name in per_token if packed),
        "    train, rollout = train_logp.detach(), rollout_logp.detach()",
        *(["    offsets = cu_seqlens.to(train.device, torch.int64)"] if packed else []),
        f"    weights, kept_mask, keep{', numbers' if within.metrics != '{}' else ''} = {call}",
        *(inside_alone("kept_mask") if packed else []),
        f"    return {', '.join(returned)}, keep, {within.metrics}",
    ]
    return "\n".join(lines)


NAMES = {"train_logp": "train_logp", "rollout_logp": "rollout_logp", "mask": "mask"}


def _door(layout: str) -> Door:
    def public(within: Within) -> str:
        return _public(within, layout == "packed")

    return Door(layout, NAMES, None, ("import torch",), public, "correct", "return correct(**batch)")


DOORS = {layout: _door(layout) for layout in ("packed", "padded")}
