"""SkyRL's settings that make the log-probs of the engine, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Callable

from ..shared.checking import Checks, Rule, Run, roles, without
from .config import AROUND, OF_SPEC, PLACE

ALGORITHM, SAMPLING = "trainer.algorithm.", "generator.sampling_params."
BLOCK = f"{PLACE}."
METRIC, TYPE, LOSS = f"{BLOCK}sequence_mask_metric", f"{BLOCK}tis_ratio_type", f"{ALGORITHM}policy_loss_type"
FIELDS = tuple(BLOCK + key for key in OF_SPEC)
LOGPROBS = f"{SAMPLING}logprobs"
# The bounds that belong to one choice of METRIC or TYPE, by the beginning of their names.
CHOICES = {
    "geo_mask": (METRIC, "geometric"),
    "product_mask": (METRIC, "product"),
    "token_tis": (TYPE, "token"),
    "sequence_tis": (TYPE, "sequence"),
}


def _of_choice(prefix: str, setting: str, value: str) -> tuple[Rule, ...]:
    """Rules for the bounds of a choice that is not made."""
    last = setting.rpartition(".")[2]
    keys = [key for key in FIELDS if key.startswith(BLOCK + prefix)]

    def idle(key: str) -> Callable[[Run], bool]:
        return lambda run: run.given(key) and run.has(setting) and not run.is_(setting, value)

    of_other = (
        Rule(key, idle(key), f"{{value}} does nothing: {last} is not {value!r}", f"write {last}={value}")
        for key in keys
    )
    return (*of_other, *without(setting, *keys, usual=True))


def _corrects(run: Run) -> bool:
    return run.on(f"{ALGORITHM}use_tis", False) or any(run.given(key) for key in FIELDS)


CHECKS = Checks(
    keys=(*FIELDS, *(ALGORITHM + key for key in [*AROUND][1:]), LOSS),
    closed=(PLACE,),
    launchers=r"\bskyrl(\.train|_train)\.",
    context=(LOGPROBS,),
    # SkyRL leaves vLLM's default (vime#64).
    mode="raw_logprobs",
    roles=roles(
        SAMPLING,
        "temperature",
        mode="generator.inference_engine.engine_init_kwargs.logprobs_mode",
        trainer_temperature=f"{ALGORITHM}temperature",
        length=f"{SAMPLING}max_generate_length",
    ),
    bounds={
        "weight": (f"{BLOCK}token_tis_ratio_clip_high", f"{BLOCK}sequence_tis_ratio_clip_high"),
        "geo_sequence_mask": (f"{BLOCK}geo_mask_high", f"{BLOCK}geo_mask_low", METRIC),
        "product_sequence_mask": (f"{BLOCK}product_mask_high", f"{BLOCK}product_mask_low", METRIC),
        "token_mask": (f"{BLOCK}token_mask_is_threshold_high",),
        "outlier": (f"{BLOCK}outlier_token_is_threshold_high",),
    },
    rules=(
        *(rule for prefix, (setting, value) in CHOICES.items() for rule in _of_choice(prefix, setting, value)),
        *without(f"{ALGORITHM}use_tis", f"{ALGORITHM}tis_imp_ratio_cap", usual=True),
        Rule(
            LOGPROBS,
            lambda run: run.off(LOGPROBS, 1) and run.is_(LOSS, "rollout_is", "dppo") and not _corrects(run),
            "the loss gets no log-probs of the engine: rollout_is refuses that, dppo compares old policies in silence",
            "write logprobs=1",
        ),
        Rule(
            LOGPROBS,
            lambda run: run.off(LOGPROBS, 1) and _corrects(run),
            "the correction needs log-probs of the engine, so SkyRL sets 1 in its place and warns",
            "write logprobs=1",
            "warning",
        ),
        Rule(
            TYPE,
            lambda run: run.on(TYPE) and run.is_(LOSS, "rollout_is", "dppo"),
            "two corrections: the loss takes the ratio to the engine, and the weight multiplies it by another",
            "write tis_ratio_type=null",
        ),
    ),
)
