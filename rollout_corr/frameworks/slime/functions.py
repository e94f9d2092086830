"""slime and miles: functions for `--custom-tis-function-path`, which need no `install()`.

    --use-tis --custom-tis-function-path rollout_corr.frameworks.slime.tis
    --use-tis --custom-tis-function-path rollout_corr.frameworks.slime.icepop
    --use-tis --custom-tis-function-path rollout_corr.frameworks.slime.mis --custom-config-path mis.yaml

`tis` and `icepop` are slime's own functions of the policy loss, `mis` is the function of its example
`train_infer_mismatch_helper` with the settings of its mis.yaml, for all samples at once and not one after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api.correct import correct
from ...specs.correction import Spec
from ...specs.weight import SMALLEST_MEAN
from ..shared.dropin import DropIn
from . import config as presets
from .config import MisSettings, mis_settings, mis_spec

# Which of the two frameworks runs is told by which has loaded its tools for context parallelism.
CONTEXT_PARALLEL = ("slime.backends.megatron_utils.cp_utils", "miles.backends.training_utils.cp_utils")

Given = Sequence[Tensor]
Corrected = tuple[Tensor, list[Tensor], dict[str, Tensor]]

DROP_IN = DropIn("slime", checked=("624b824",))


def _per_token(name: str, preset: Callable[..., Spec]) -> Callable[..., Corrected]:
    """slime's function of that name. A token's weight needs no other rank: the masks are cut to this one's tokens."""

    def corrected(
        args: Any,
        *,
        pg_loss: Tensor,
        train_log_probs: Given,
        rollout_log_probs: Given,
        loss_masks: Given,
        total_lengths: Sequence[int] = (),
        response_lengths: Sequence[int] = (),
        **kwargs: Any,
    ) -> Corrected:
        """The loss with the weights, the masks as they were given, and slime's metrics: a value for each token here.

        Log-probs are a 1-D tensor a sample, its tokens on this rank; masks are of whole responses. Lengths, a sample
        each, are read under context parallelism, and miles's `max_seq_lens` where args.qkv_format is "bshd".
        """
        spec = preset(tis_clip=args.tis_clip, tis_clip_low=args.tis_clip_low)
        DROP_IN.say(True, repr(spec.weight) + (f" and {spec.criteria[0]!r}" if spec.criteria else ""))
        masks = _Ranks.of(args, total_lengths, response_lengths, kwargs).shard(loss_masks)
        _same_lengths(train_log_probs, rollout_log_probs, masks)
        here = _Whole(train_log_probs, rollout_log_probs, masks, list)
        out = correct(list(train_log_probs), list(rollout_log_probs), mask=masks, spec=spec)
        DROP_IN.seen(out.metrics_async(), train_log_probs, rollout_log_probs, masks)
        weights = here.flat(out.weights)
        ratio = here.d.clamp(-spec.clamp, spec.clamp).exp()
        metrics = {
            "tis": ratio,
            "tis_clipfrac": (ratio < args.tis_clip_low).float() + (ratio > args.tis_clip),
            "tis_abs": (ratio - 1.0).abs(),
        }
        return pg_loss * weights, list(loss_masks), metrics

    corrected.__name__ = corrected.__qualname__ = name
    return corrected


# The loss times exp(D): clamped to [args.tis_clip_low, args.tis_clip], or 0 outside.
tis, icepop = _per_token("tis", presets.tis), _per_token("icepop", presets.icepop)


def mis(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Given,
    rollout_log_probs: Given,
    loss_masks: Given,
    total_lengths: Sequence[int] = (),
    response_lengths: Sequence[int] = (),
    **kwargs: Any,
) -> Corrected:
    """Weights, rejection and veto by the settings of mis.yaml; arguments as for `tis`.

    Returns:
        The loss, the masks in float32 with 0 where rejected (as they were given without `--use-tis`), and the metrics
        under "mis_": a value for each token of this rank, as slime's reducer wants them.
    """
    ranks = _Ranks.of(args, total_lengths, response_lengths, kwargs)
    train, rollout = ranks.gather(train_log_probs), ranks.gather(rollout_log_probs)
    _same_lengths(train, rollout, loss_masks)
    whole = _Whole(train, rollout, loss_masks, ranks.shard)
    settings = mis_settings(args)
    metrics = _mismatch(whole)
    masks = list(loss_masks)
    if settings is None:
        DROP_IN.say(False, "metrics only: --use-tis is off")
    else:
        DROP_IN.say(True, f"mis with {settings}")
        DROP_IN.name_unknown(args, presets.MIS, 0.85)
        out = correct(list(whole.train), list(whole.rollout), mask=list(whole.masks), spec=mis_spec(settings))
        DROP_IN.seen(out.metrics_async(), whole.train, whole.rollout, whole.masks)
        masks = [mask.to(torch.promote_types(mask.dtype, torch.float32)) for mask in out.mask]
        flat = whole.flat(out.weights)
        metrics |= _importance(whole, settings, flat)
        pg_loss = pg_loss * torch.cat(whole.shard(whole.split(flat)))
    found = {f"mis_{key}": torch.cat(whole.shard(whole.split(x))) for key, x in metrics.items()}
    return pg_loss, masks, found


# --- slime's samples ---


@dataclass
class _Whole:
    """Samples as lists, and as one flat tensor with their lengths."""

    train: Given
    rollout: Given
    masks: Given
    shard: Callable[[Given], list[Tensor]]

    def __post_init__(self) -> None:
        self.lengths = [sample.shape[0] for sample in self.train]
        device = self.train[0].device
        self.sizes = torch.tensor(self.lengths, device=device)
        d = self.flat(self.train) - self.flat(self.rollout)
        # Metrics are of valid tokens whose log-ratio is a number; what becomes of the others the Spec says.
        self.mask = (torch.cat(list(self.masks)).to(device) != 0) & d.isfinite()
        self.d = torch.where(self.mask, d, 0.0)

    @staticmethod
    def flat(samples: Given) -> Tensor:
        """[N] in float32 or wider, without a gradient."""
        joined = torch.cat(list(samples)).detach()
        return joined.to(torch.promote_types(joined.dtype, torch.float32))

    def split(self, x: Tensor) -> Given:
        return x.split(self.lengths)

    def spread(self, x: Tensor) -> Tensor:
        """A value of each sample at each of its tokens."""
        return x.repeat_interleave(self.sizes, output_size=sum(self.lengths))

    def sums(self, x: Tensor) -> Tensor:
        """[S] sums over the valid tokens."""
        chosen = torch.where(self.mask, x, 0.0)
        return torch.segment_reduce(chosen, "sum", lengths=self.sizes, unsafe=True, initial=0.0)

    def means(self, x: Tensor) -> Tensor:
        return self.sums(x) / self.sums(torch.ones_like(x)).clamp(min=1.0)

    def largest(self, x: Tensor) -> Tensor:
        """[S] maxima over the valid tokens, 0 without one."""
        chosen = torch.where(self.mask, x, -torch.inf)
        found = torch.segment_reduce(chosen, "max", lengths=self.sizes, unsafe=True, initial=-torch.inf)
        return torch.where(found == -torch.inf, 0.0, found)


class _Ranks(NamedTuple):
    """The framework's own tools for context parallelism, which do nothing on one rank; None where no framework runs.

    Attributes:
        tools: Its module.
        layouts: What they are told of each sample: lengths, and where rows are padded (miles's "bshd") the padded one.
    """

    tools: Any
    layouts: list[tuple[Any, ...]]

    @classmethod
    def of(cls, args: Any, total: Sequence[int], response: Sequence[int], kwargs: dict[str, Any]) -> _Ranks:
        """Find the framework that runs, and the layout of its samples."""
        tools = next((sys.modules[name] for name in CONTEXT_PARALLEL if name in sys.modules), None)
        if tools is None or getattr(args, "qkv_format", "thd") == "thd":
            return cls(tools, list(zip(total, response, strict=True)))
        padded = kwargs.get("max_seq_lens")
        if padded is None:
            raise ValueError(f"max_seq_lens: expected the padded lengths with qkv_format={args.qkv_format!r}, got None")
        return cls(tools, [(*sizes, args.qkv_format, n) for *sizes, n in zip(total, response, padded, strict=True)])

    def gather(self, samples: Given) -> Given:
        """The whole responses."""
        if self.tools is None:
            return samples
        cut = zip(samples, self.layouts, strict=True)
        return [self.tools.all_gather_with_cp(x, *layout).detach() for x, layout in cut]

    def shard(self, samples: Given) -> list[Tensor]:
        """This rank's tokens of whole responses."""
        if self.tools is None:
            return list(samples)
        return [self.tools.slice_log_prob_with_cp(x, *layout) for x, layout in zip(samples, self.layouts, strict=True)]


def _same_lengths(train: Given, rollout: Given, masks: Given) -> None:
    lengths = [sample.shape[0] for sample in train]
    for name, samples in (("rollout_log_probs", rollout), ("loss_masks", masks)):
        if (got := [sample.shape[0] for sample in samples]) != lengths:
            raise ValueError(f"{name}: expected samples of lengths {lengths} (of train_log_probs), got {got}")


# --- the metrics of mis.py, a value for each token ---


def _mismatch(whole: _Whole) -> dict[str, Tensor]:
    d = whole.d
    train, rollout = whole.means(whole.flat(whole.train)), whole.means(whole.flat(whole.rollout))
    gap = -whole.means(d)
    squared = (2.0 * d.clamp(-20.0, 20.0)).exp()
    of_samples = {
        "training_log_ppl": -train,
        "training_ppl": (-train).exp(),
        "rollout_log_ppl": -rollout,
        "rollout_ppl": (-rollout).exp(),
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.exp(),
        "chi2_token": whole.means(squared) - 1.0,
        "chi2_seq": (2.0 * whole.sums(d).clamp(-20.0, 20.0)).exp() - 1.0,
    }
    return {key: whole.spread(x) for key, x in of_samples.items()} | {"kl": -d, "k3_kl": d.expm1() - d}


def _importance(whole: _Whole, settings: MisSettings, weights: Tensor) -> dict[str, Tensor]:
    """Of the weights before and after their bound, of what is rejected, and of what multiplies the loss."""
    raw = _ratio(whole, settings.tis_level)
    lower, upper = settings.tis_lower, settings.tis_upper
    found = {"tis_weight_before_bound": raw}
    bounded = raw
    if settings.tis_mode == "truncate":
        found["tis_truncate_fraction"] = (raw > upper).float()
        bounded = raw.clamp(max=upper)
    else:
        kind = settings.tis_mode
        found |= {f"tis_{kind}_fraction_low": (raw < lower).float(), f"tis_{kind}_fraction_high": (raw > upper).float()}
    if settings.tis_mode == "clip":
        bounded = raw.clamp(lower, upper)
    bounded = torch.where(whole.mask, bounded, 0.0)
    found |= {"tis_weight_after_bound": bounded, "is_ratio_mean_after_tis_rs": bounded}
    if settings.rs_level is not None:
        tested = _ratio(whole, settings.rs_level)
        found["rs_mask_fraction_low"] = (tested < settings.rs_lower).float()
        found["rs_mask_fraction_high"] = (tested > settings.rs_upper).float()
    if settings.veto is not None:
        catastrophic = (whole.mask & (whole.d.exp() < settings.veto)).float()
        found["rs_catastrophic_token_fraction"] = catastrophic
        found["rs_catastrophic_seq_fraction"] = whole.spread(whole.largest(catastrophic))
    if settings.normalize:
        some, units = whole.mask, bounded
        if settings.tis_level != "token":
            # One weight a sample, and each sample with a valid token counts once.
            some, units = whole.largest(whole.mask.float()) > 0.0, whole.largest(bounded)
        mean = units.sum() / some.sum().clamp(min=1)
        found["batch_norm_factor"] = torch.where(mean > SMALLEST_MEAN, mean, 1.0).expand_as(bounded)
    found["is_ratio_mean_final"] = whole.spread(whole.means(weights))
    found["is_ratio_min_final"] = whole.spread(-whole.largest(-weights))
    found["is_ratio_max_final"] = whole.spread(whole.largest(weights))
    return found


def _ratio(whole: _Whole, level: str) -> Tensor:
    """The ratio of each token at a level, clamped but not bounded."""
    logs = whole.d
    if level != "token":
        logs = whole.spread(whole.sums(logs) if level == "sequence" else whole.means(logs))
    return logs.clamp(-20.0, 20.0).exp()
