"""The modes, the verdicts of doctor that are right for each, and what doctor says: with torch alone."""

from typing import Literal

from torch import Tensor

import rollout_corr as rc
from rollout_corr.metrics.limits import BY_KEY

CURRENT = 1000
"""The trainer's version in dumps that have versions."""

HEALTHY = ("healthy",)
DIFFERENT = ("different_policies",)
# What makes a few first tokens differ also changes, less, all that follow.
PROMPT = ("sequence_starts", "different_policies", "outliers", "positions")
TURNS = ("turn_starts", "different_policies", "outliers", "positions")
PENALTY = ("different_policies", "not_the_sampler", "penalties")
# As small as the error of arithmetic in bf16.
SMALL = ("healthy", "different_policies")

# The first finding above a note has to be among these. "raw" log-probs are those of the model, whatever the sampler did
# to its logits: both sides agree, and log-probs cannot show that other tokens were sampled than they say.
ACCEPTED: dict[str, tuple[str, ...]] = {
    "bf16": HEALTHY,
    "bf16_both": HEALTHY,
    "fp16": HEALTHY,
    "fp32": HEALTHY,
    "fp32_trainer_bf16": HEALTHY,
    "prefix_caching": HEALTHY,
    "chunked_prefill": HEALTHY,
    "speculative_ngram": HEALTHY,
    "left_padded": HEALTHY,
    "left_padded_positions": HEALTHY,  # rotary embeddings see differences of positions alone
    "processed": HEALTHY,
    "processed_temperature_0.7": HEALTHY,
    "turns": HEALTHY,
    "moe": HEALTHY,
    "moe_bf16_both": HEALTHY,
    "raw_top_p": HEALTHY,
    "raw_top_k": HEALTHY,
    "raw_min_p": HEALTHY,
    "raw_repetition_penalty": HEALTHY,
    "raw_presence_penalty": HEALTHY,
    "raw_logit_bias": HEALTHY,
    "raw_temperature_0.7": ("healthy", "not_the_sampler"),
    "bf16_with_entropy": HEALTHY,
    "raw_temperature_0.7_with_entropy": ("raw_log_probs",),
    "raw_top_p_with_entropy": ("raw_log_probs",),
    "int8_weights_and_activations": SMALL,
    "fp8_weights": SMALL,
    "kv_cache_fp8_e4m3": DIFFERENT,
    "kv_cache_fp8_e5m2": DIFFERENT,
    "stale_1": SMALL,
    "stale_4": SMALL,
    "int4_weights": DIFFERENT,
    "int4_kernels": DIFFERENT,
    "int3_weights": DIFFERENT,
    "stale_16": DIFFERENT,
    "stale_64": DIFFERENT,
    "versions_mixed_16": ("stale",),
    "versions_mixed_64": ("stale",),
    "replica_stale_16": ("different_policies", "outliers"),
    "replica_stale_64": ("different_policies", "outliers"),
    "replica_stale_16_labelled": ("label",),
    "replica_stale_64_labelled": ("label",),
    "raw_temperature_0.7_trainer_too": ("temperature",),
    "raw_temperature_1.3_trainer_too": ("temperature",),
    "trainer_temperature_0.7": ("temperature",),
    "processed_temperature_0.7_trainer_1": ("temperature",),
    "processed_temperature_0.7_top_p_0.9_trainer_1": ("temperature", "renormalized"),
    "processed_temperature_0.7_top_p_0.9": ("renormalized",),
    "processed_top_p_0.9": ("renormalized",),
    "processed_top_p_0.95": ("renormalized",),
    "processed_top_k_20": ("renormalized", "healthy"),  # a peaky model has fewer tokens to choose from
    "processed_top_k_2": ("renormalized",),
    "processed_min_p_0.05": ("renormalized",),
    "processed_repetition_penalty": PENALTY,
    "processed_presence_penalty": PENALTY,
    "processed_frequency_penalty": PENALTY,
    "processed_logit_bias": PENALTY,
    # Without its EOS the rest is renormalized; the advice for outliers names it.
    "processed_min_tokens": (*PENALTY, "renormalized", "outliers"),
    "left_padded_no_mask": DIFFERENT,
    "position_gap": ("different_policies", "positions"),
    "packed_attends_across": DIFFERENT,
    "gathered_one_late": ("shifted", "wrong_weights"),
    "slice_one_early": ("shifted",),
    "slice_one_late": ("shifted",),
    "rows_swapped": ("swapped",),
    "eos_forced": ("outliers", "not_the_sampler", "different_policies"),
    "eos_added": ("outliers", "filled", "not_the_sampler"),
    "padding_not_masked": ("padding",),
    "prompt_double_bos": PROMPT,
    "prompt_no_bos": PROMPT,
    "prompt_no_assistant": PROMPT,
    "prompt_cut_left": PROMPT,
    "turns_tool_not_masked": ("filled",),
    "turns_template_differs": TURNS,
    "turns_tool_output_lost": TURNS,
    "turns_all_text_lost": TURNS,
    "rope_theta": ("different_policies", "positions"),
    "head_untied_random": ("wrong_weights",),
    "head_untied_old64": DIFFERENT,
    "lora_not_loaded": DIFFERENT,
    "weak_lora_not_loaded": DIFFERENT,
    "moe_trainer_top_1": DIFFERENT,
}


def arguments(tensors: dict[str, Tensor]) -> dict:
    """Tensors by name as the arguments of `rc.dump` and `rc.doctor`."""
    found, sequences = dict(tensors), len(tensors["cu_seqlens"]) - 1
    turns, versions = found.pop("turns", None), found.pop("versions", None)
    found["batch"] = rc.Batch(
        mask=found.pop("mask", None),
        cu_seqlens=found.pop("cu_seqlens"),
        entropy=found.pop("entropy", None),
        turns=None if turns is None else rc.TurnIds(turns, 2 * sequences),
        versions=None if versions is None else rc.Versions(versions, CURRENT),
    )
    return found


def diagnose(tensors: dict[str, Tensor]) -> rc.Diagnosis:
    """What doctor says; labels of replicas are there to be looked at."""
    given = arguments(tensors)
    by = ("replica",) if "replica" in tensors else ()
    return rc.doctor(given.pop("train_logp"), given.pop("rollout_logp"), by=by, **given)


def verdict(diagnosis: rc.Diagnosis) -> str:
    """The name of the first finding above a note, or "healthy". Of raw log-probs a note says all that can be known."""
    said = (one.name for one in diagnosis.findings if one.severity != "note" or one.name == "raw_log_probs")
    return next(said, "healthy")


def outcome(mode: str, diagnosis: rc.Diagnosis) -> Literal["right", "too small", "wrong"]:
    """Whether the verdict is accepted. Too small: "healthy" of a mode that k3 alone shows, below its limit."""
    said = verdict(diagnosis)
    if said in ACCEPTED[mode]:
        return "right"
    small = diagnosis.metrics()["kl_rollout_train_k3"] < BY_KEY["kl_rollout_train_k3"].watch
    return "too small" if said == "healthy" and small and "different_policies" in ACCEPTED[mode] else "wrong"


def summary(judged: dict[str, str]) -> str:
    """What the outcomes of modes, by their names, add up to."""
    well = [one for mode, one in judged.items() if ACCEPTED[mode] == HEALTHY]
    ill = [one for mode, one in judged.items() if "healthy" not in ACCEPTED[mode]]
    return (
        f"{well.count('wrong')} false alarms in {len(well)} healthy modes; of {len(ill)} ill ones {ill.count('right')} "
        f"are named, {ill.count('too small')} too small to matter, {ill.count('wrong')} missed."
    )
