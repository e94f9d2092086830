"""The variants of the policy loss that are compiled ahead of time and compared with the reference.

Together they take every branch: each surrogate, KL, regulariser, reduction, each tensor given and not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout_corr.aot.variant import HUGE, LONG, LONGEST, MEDIUM, SHORT, TOKENS, placed
from rollout_corr.spec.loss import KL, LossReduction, Objective, SquaredLogRatio
from rollout_corr.spec.surrogates import DPPO, DRO, GMPO, GPG, GSPO, PPO, SAPO, Reinforce, Score

if TYPE_CHECKING:
    from rollout_corr.kernels.grid import Launch
    from rollout_corr.kernels.policy_loss.launch import LossGiven


@dataclass(frozen=True)
class LossVariant:
    """One variant.

    Args:
        name: How a report calls it.
        objective: What is computed.
        packed: Sequences by offsets, or the rows of [B, T].
        new: Dtype of new_logp.
        base: Dtype of the log-probs that it is compared with, None without.
        ref: Dtype of the reference policy's log-probs, None without.
        weights: Dtype of the weights, None without.
        trains: Dtype of the training mask, None without.
        mask: Dtype of the mask, None without one.
        offsets: Dtype of the offsets of a packed batch.
        advantages: "token" or "sequence".
        counted: The caller gives the denominator.
        differentiable: The gradient is wanted.
        aligned: As for a variant of `correct`.
        unit: As for a variant of `correct`.
        length: Tokens of a sequence on average.
        tokens: Tokens of the batch that is compiled for.
    """

    name: str
    objective: Objective
    packed: bool = True
    new: torch.dtype = torch.float32
    base: torch.dtype | None = torch.float32
    ref: torch.dtype | None = None
    weights: torch.dtype | None = torch.float32
    trains: torch.dtype | None = None
    mask: torch.dtype | None = torch.bool
    offsets: torch.dtype = torch.int32
    advantages: str = "token"
    counted: bool = False
    differentiable: bool = True
    aligned: bool = True
    unit: bool = True
    length: int = LONG
    tokens: int = TOKENS

    @property
    def wide_bytes(self) -> int:
        """Bytes a token that the compiler has to load 128 bits at a time; 0 where they do not lie well."""
        if not (self.new == self.base == torch.float32 and self.aligned and self.unit):
            return 0
        return 8 + sum(x.itemsize for x in (self.ref, self.weights) if x == torch.float32)

    def given(self, tokens: int, sequences: int, device: str | torch.device = "meta") -> LossGiven:
        """A batch of this variant without values in it; see `Variant.given`."""
        from rollout_corr.kernels.policy_loss.launch import LossGiven

        shape = (tokens,) if self.packed else (sequences, tokens // sequences)
        double = torch.float64 in (self.new, self.base, self.ref)

        def line(dtype: torch.dtype | None) -> Tensor | None:
            return None if dtype is None else placed(empty(dtype, *shape), self.aligned, self.unit)

        def empty(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        kind = torch.float64 if double else torch.float32
        return LossGiven(
            new=placed(empty(self.new, *shape), self.aligned, self.unit),
            base=line(self.base),
            ref=line(self.ref),
            advantages=empty(kind, *(shape if self.advantages == "token" else (sequences,))),
            per_sequence=self.advantages == "sequence",
            weights=line(self.weights),
            trains=line(self.trains),
            mask=line(self.mask),
            offsets=empty(self.offsets, sequences + 1) if self.packed else None,
            divisor=empty(torch.float64) if self.counted else None,
            double=double,
        )

    def launches(self, given: LossGiven | None = None) -> tuple[Launch, ...]:
        """What a forward and a backward would launch.

        Args:
            given: The batch; by default one on the meta device.
        """
        from rollout_corr.kernels.policy_loss.launch import prepare, prepare_scale

        given = self.given(self.tokens, self.tokens // self.length) if given is None else given
        found, launches = prepare(given, self.objective, self.differentiable)
        if found.gradient is None:
            return launches
        upstream = torch.empty((), dtype=found.value.dtype, device=given.new.device)
        backward = prepare_scale(found.gradient, found.inners, upstream, found.divisor, given.offsets, given.new.dtype)
        return (*launches, backward[1])


_MEAN: LossReduction = "sequence_mean_token_mean"
_K3 = KL("k3", 0.01, gradient="k2", value_clamp=10.0, weight="ratio", weight_upper=2.0)

_DECLARED = (
    # What frameworks run most, in the layouts and dtypes in which it comes.
    LossVariant("ppo_packed", Objective(PPO(0.2, 0.28), denominator="kept"), trains=torch.bool),
    LossVariant("ppo_padded", Objective(PPO(0.2, 0.28)), packed=False, mask=torch.int64, length=MEDIUM),
    LossVariant(
        "ppo_short", Objective(PPO(0.2, 0.28, dual=3.0), reduction=_MEAN), weights=None, length=SHORT, mask=torch.uint8
    ),
    LossVariant("ppo_huge", Objective(PPO()), tokens=HUGE, length=LONGEST, weights=None, mask=None),
    LossVariant(
        "ppo_bf16",
        Objective(PPO(0.2, 0.3, delta=2.0), kl=KL("k3", 0.001), reduction="token_sum_norm", max_length=4096.0),
        new=torch.bfloat16,
        base=torch.bfloat16,
        ref=torch.bfloat16,
        mask=torch.int64,
        packed=False,
        unit=False,
    ),
    LossVariant(
        "ppo_fp64",
        Objective(PPO(dual=3.0), _K3, SquaredLogRatio(0.1), _MEAN, "kept"),
        new=torch.float64,
        base=torch.float64,
        ref=torch.float64,
        weights=torch.float64,
        trains=torch.float64,
        packed=False,
        aligned=False,
        length=SHORT,
    ),
    LossVariant("ppo_on_policy", Objective(PPO()), base=None, weights=None, advantages="sequence", counted=True),
    LossVariant(
        "ppo_value",
        Objective(PPO(), nonfinite="neutral"),
        differentiable=False,
        trains=torch.int64,
        offsets=torch.int64,
        aligned=False,
    ),
    # The other surrogates.
    LossVariant("reinforce", Objective(Reinforce(), KL("abs", 0.1, weight="weights")), ref=torch.float32),
    LossVariant(
        "cispo", Objective(Score(upper=5.0), reduction="sequence_mean_token_sum"), advantages="sequence", mask=None
    ),
    LossVariant(
        "icepop",
        Objective(Score(0.5, 5.0, "zero"), regulariser=SquaredLogRatio(0.1, "all")),
        trains=torch.int32,
        packed=False,
        length=MEDIUM,
    ),
    LossVariant(
        "score_by_weights", Objective(Score(), reduction="sum", weights_are_the_ratio=True), trains=torch.uint8
    ),
    LossVariant("dppo_tv", Objective(DPPO(upper=None)), weights=None, new=torch.float16, base=torch.float16),
    LossVariant(
        "dppo_kl", Objective(DPPO("kl", 0.05, 0.05), KL("k1", 0.1, scope="all")), ref=torch.bfloat16, packed=False
    ),
    LossVariant("sapo", Objective(SAPO(), KL("k2", 0.1, weight="stopped_ratio")), ref=torch.float32, length=SHORT),
    LossVariant("gpg", Objective(GPG(), nonfinite="propagate"), trains=torch.float32, base=torch.float64),
    LossVariant("dro", Objective(DRO(0.5), reduction=_MEAN), packed=False, mask=torch.int32),
    # Those whose gradient hangs on whole sequences.
    LossVariant("gspo", Objective(GSPO(), reduction=_MEAN), trains=torch.bool, advantages="sequence"),
    LossVariant(
        "gspo_padded",
        Objective(GSPO(dual=2.0), _K3, SquaredLogRatio(0.1, "kept"), nonfinite="propagate"),
        packed=False,
        ref=torch.float32,
        mask=torch.int64,
        length=MEDIUM,
    ),
    LossVariant("gspo_token", Objective(GSPO(through="token"), denominator="kept"), weights=None, length=SHORT),
    LossVariant("gspo_fp64", Objective(GSPO()), new=torch.float64, base=torch.float64, packed=False, length=SHORT),
    LossVariant("gmpo", Objective(GMPO(), reduction=_MEAN), trains=torch.bool),
    LossVariant("gmpo_padded", Objective(GMPO(), KL("k3", 0.1)), weights=None, ref=torch.float32, packed=False),
)

LOSS_VARIANTS = {variant.name: variant for variant in _DECLARED}

# What stands for all where there is no time for all.
LOSS_FEW = ("ppo_packed", "ppo_short", "gspo_padded")
