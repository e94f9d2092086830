"""verl's recipes, by the names of `RolloutCorrectionConfig`'s classmethods.

Every recipe edits the mask where it rejects, and asks for verl's own metrics. A recipe of bypass mode is given the
current policy, detached, as `train_logp`; which loss it feeds is the business of the policy loss. In bypass mode PPO
does not multiply by the weight.
"""

from __future__ import annotations

from rollout_corr.frameworks.registry import old_name, recipe
from rollout_corr.frameworks.verl import options
from rollout_corr.frameworks.verl.options import Threshold
from rollout_corr.spec.correction import Criterion, Scheme, Spec, Weight

REPORT: tuple[Scheme, ...] = ("native", "verl")


def spec(weight: Weight | None = None, criteria: tuple[Criterion, ...] = ()) -> Spec:
    """What all of verl's recipes share."""
    return Spec(weight=weight, criteria=criteria, rejected="mask", report=REPORT)


def _is(level: str, threshold: object, key: str = "is_threshold") -> Weight:
    return options.weight(level, threshold, key=key)


def _rs(option: str, threshold: object, k1_bounds: str = "verl") -> tuple[Criterion, ...]:
    return options.criteria(option, threshold, k1_bounds, key="rs_threshold")


def _icepop(threshold: object, threshold_lower: object) -> Weight:
    lower = options.number("threshold_lower", threshold_lower)
    upper = options.number("threshold", threshold)
    return options.weight("token", (lower, upper), key="threshold")


@recipe("verl 0.9.1")
def decoupled_token_is(threshold: Threshold = 2.0) -> Spec:
    """Token TIS: w = min(exp(D), threshold)."""
    return spec(_is("token", threshold, "threshold"))


@recipe("verl 0.9.1")
def decoupled_seq_is(threshold: Threshold = 2.0) -> Spec:
    """Sequence TIS: w = min(exp(sum D), threshold)."""
    return spec(_is("sequence", threshold, "threshold"))


@recipe("verl 0.9.1")
def decoupled_token_icepop(threshold: float = 5.0, threshold_lower: float = 0.5) -> Spec:
    """Token IcePop: w = exp(D) inside [threshold_lower, threshold], else 0."""
    return spec(_icepop(threshold, threshold_lower))


@recipe("verl 0.9.1")
def decoupled_seq_is_rs(
    is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.5_2.0", k1_bounds: str = "verl"
) -> Spec:
    """Sequence TIS, and keep a sequence iff its summed -D lies within log of the bounds (seq_sum_k1)."""
    return spec(_is("sequence", is_threshold), _rs("seq_sum_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def decoupled_geo_rs(rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl") -> Spec:
    """No weight; keep a sequence iff its mean -D lies within log of the bounds (seq_mean_k1)."""
    return spec(None, _rs("seq_mean_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def decoupled_geo_rs_seq_tis(
    is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl"
) -> Spec:
    """Sequence TIS and seq_mean_k1."""
    return spec(_is("sequence", is_threshold), _rs("seq_mean_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def decoupled_geo_rs_token_tis(
    is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl"
) -> Spec:
    """Token TIS and seq_mean_k1."""
    return spec(_is("token", is_threshold), _rs("seq_mean_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def decoupled_k3_rs(rs_threshold: float = 0.01) -> Spec:
    """No weight; keep a sequence iff its mean of exp(D) - 1 - D is at most rs_threshold (seq_mean_k3)."""
    return spec(None, _rs("seq_mean_k3", rs_threshold))


@recipe("verl 0.9.1")
def decoupled_k3_rs_seq_tis(is_threshold: Threshold = 2.0, rs_threshold: float = 0.01) -> Spec:
    """Sequence TIS and seq_mean_k3."""
    return spec(_is("sequence", is_threshold), _rs("seq_mean_k3", rs_threshold))


@recipe("verl 0.9.1")
def decoupled_k3_rs_token_tis(is_threshold: Threshold = 2.0, rs_threshold: float = 0.01) -> Spec:
    """Token TIS and seq_mean_k3."""
    return spec(_is("token", is_threshold), _rs("seq_mean_k3", rs_threshold))


@recipe("verl 0.9.1")
def bypass_ppo_clip() -> Spec:
    """Bypass, PPO: the surrogate's own ratio is the correction; metrics only here."""
    return spec()


@recipe("verl 0.9.1")
def bypass_ppo_clip_geo_rs(rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl") -> Spec:
    """Bypass, PPO, and seq_mean_k1."""
    return spec(None, _rs("seq_mean_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def bypass_ppo_clip_k3_rs(rs_threshold: float = 0.01) -> Spec:
    """Bypass, PPO, and seq_mean_k3."""
    return spec(None, _rs("seq_mean_k3", rs_threshold))


@recipe("verl 0.9.1")
def bypass_pg_is(threshold: Threshold = 2.0) -> Spec:
    """Bypass, REINFORCE with sequence TIS."""
    return spec(_is("sequence", threshold, "threshold"))


@recipe("verl 0.9.1")
def bypass_pg_token_icepop(threshold: float = 5.0, threshold_lower: float = 0.5) -> Spec:
    """Bypass, REINFORCE with token IcePop."""
    return spec(_icepop(threshold, threshold_lower))


@recipe("verl 0.9.1")
def bypass_pg_geo_rs(rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl") -> Spec:
    """Bypass, REINFORCE without weight, and seq_mean_k1."""
    return spec(None, _rs("seq_mean_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def bypass_pg_geo_rs_seq_tis(
    is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl"
) -> Spec:
    """Bypass, REINFORCE with sequence TIS, and seq_mean_k1."""
    return spec(_is("sequence", is_threshold), _rs("seq_mean_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def bypass_pg_geo_rs_token_tis(
    is_threshold: Threshold = 2.0, rs_threshold: Threshold = "0.999_1.001", k1_bounds: str = "verl"
) -> Spec:
    """Bypass, REINFORCE with token TIS, and seq_mean_k1."""
    return spec(_is("token", is_threshold), _rs("seq_mean_k1", rs_threshold, k1_bounds))


@recipe("verl 0.9.1")
def disabled() -> Spec:
    """Metrics only."""
    return spec()


# The old names. Up to 0.7.0 verl tested the ratio itself, with 1/upper as the lower bound if none was given, and many
# recipes had a veto.

_EARLY = "verl before 0.6.1"


def _old_rs(option: str, upper: object, lower: object) -> Criterion:
    least, most = options.ratio_bounds("rs_threshold", upper)
    if lower is not None:
        # seq_mis leaves the lower side open by writing 0.
        least = 0.0 if lower == 0 else options.number("rs_threshold_lower", lower)
    return options.ratio_criterion(option, least, most)


def _with_veto(weight: Weight | None, option: str, upper: object, lower: object, veto_threshold: float | None) -> Spec:
    criteria: tuple[Criterion, ...] = (_old_rs(option, upper, lower),)
    if veto_threshold is not None:
        criteria = (*criteria, options.veto(veto_threshold, "veto_threshold"))
    return spec(weight, criteria)


@old_name(_EARLY, "verl.decoupled_token_is(threshold=...)")
def token_is(threshold: float = 2.0) -> Spec:
    """Now decoupled_token_is."""
    return spec(_is("token", threshold, "threshold"))


@old_name(_EARLY, "verl.decoupled_token_is(threshold=...)")
def token_tis(threshold: float = 2.0) -> Spec:
    """Now decoupled_token_is."""
    return spec(_is("token", threshold, "threshold"))


@old_name(_EARLY, "verl.decoupled_seq_is(threshold=...)")
def seq_is(threshold: float = 2.0) -> Spec:
    """Now decoupled_seq_is."""
    return spec(_is("sequence", threshold, "threshold"))


@old_name(_EARLY, 'verl.decoupled_seq_is_rs(is_threshold=..., rs_threshold="lower_upper", k1_bounds="ratio")')
def seq_is_rs(is_threshold: float = 2.0, rs_threshold: float = 2.0, rs_threshold_lower: float | None = None) -> Spec:
    """Now decoupled_seq_is_rs: the same Spec where the bounds are reciprocal, so that the sign of k1 is no matter."""
    weight = _is("sequence", is_threshold)
    if rs_threshold_lower is None:
        return spec(weight, _rs("seq_sum_k1", rs_threshold))
    return spec(weight, (_old_rs("seq_sum_k1", rs_threshold, rs_threshold_lower),))


@old_name(
    _EARLY,
    'Spec(weight=Weight("product", upper=...), criteria=(Criterion("ratio", over="sequence", reduce="sum", '
    "upper=...),))",
)
def seq_mis(threshold: float = 2.0) -> Spec:
    """seq_is_rs with one threshold for both and an open lower side."""
    return spec(_is("sequence", threshold, "threshold"), (_old_rs("seq_sum_k1", threshold, 0),))


@old_name(_EARLY, 'verl.decoupled_geo_rs(rs_threshold="lower_upper", k1_bounds="ratio"); the veto has no new name')
def geo_rs(
    rs_threshold: float = 1.001, rs_threshold_lower: float | None = None, veto_threshold: float | None = 1e-4
) -> Spec:
    """decoupled_geo_rs with the veto that it had up to 0.7.0."""
    return _with_veto(None, "seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)


@old_name(_EARLY, 'verl.decoupled_geo_rs(rs_threshold="lower_upper", k1_bounds="ratio"); the veto has no new name')
def geo_mis(
    rs_threshold: float = 1.001, rs_threshold_lower: float = 0.999, veto_threshold: float | None = 1e-4
) -> Spec:
    """geo_rs with a lower bound of its own."""
    return _with_veto(None, "seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)


@old_name("verl 0.6.1", "verl.bypass_ppo_clip()")
def ppo_is_bypass(threshold: float = 2.0) -> Spec:
    """Bypass, PPO; the token weight is there for its metrics, the loss never multiplied by it."""
    return spec(_is("token", threshold, "threshold"))


@old_name(_EARLY, "verl.bypass_pg_is(threshold=...)")
def pure_is(threshold: float = 2.0) -> Spec:
    """Now bypass_pg_is."""
    return spec(_is("sequence", threshold, "threshold"))


@old_name("verl 0.6.1", "verl.bypass_pg_is(threshold=...)")
def pg_is(threshold: float = 2.0) -> Spec:
    """Now bypass_pg_is."""
    return spec(_is("sequence", threshold, "threshold"))


@old_name(
    "verl 0.6.1", 'verl.bypass_pg_geo_rs(rs_threshold="lower_upper", k1_bounds="ratio"); the veto has no new name'
)
def pg_rs(
    rs_threshold: float = 1.001, rs_threshold_lower: float | None = None, veto_threshold: float | None = 1e-4
) -> Spec:
    """bypass_pg_geo_rs with the veto that it had up to 0.7.0."""
    return _with_veto(None, "seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)


@old_name(
    "verl 0.7.0", 'verl.bypass_pg_geo_rs(rs_threshold="lower_upper", k1_bounds="ratio"); the veto has no new name'
)
def bypass_pg_rs(
    rs_threshold: float = 1.001, rs_threshold_lower: float | None = None, veto_threshold: float | None = 1e-4
) -> Spec:
    """bypass_pg_geo_rs with the veto that it had up to 0.7.0."""
    return _with_veto(None, "seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)


@old_name(
    "verl 0.7.0",
    'verl.decoupled_geo_rs_seq_tis(is_threshold=..., rs_threshold="lower_upper", k1_bounds="ratio"); '
    "the veto has no new name",
)
def geo_rs_seq_tis(
    is_threshold: float = 2.0,
    rs_threshold: float = 1.001,
    rs_threshold_lower: float | None = None,
    veto_threshold: float | None = 1e-4,
) -> Spec:
    """decoupled_geo_rs_seq_tis with the veto that it had in 0.7.0."""
    weight = _is("sequence", is_threshold)
    return _with_veto(weight, "seq_mean_k1", rs_threshold, rs_threshold_lower, veto_threshold)
