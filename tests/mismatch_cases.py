"""Dumps with a known cause, and dumps that only look like it: what `doctor` is tested with.

A small language model samples them: logits per token, noise of the engine, and one thing done wrong. So ratios,
probabilities and their averages relate to one another as they do in a real run.

`python tests/mismatch_cases.py` writes the table of docs/mismatch.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_corr.mismatch.arrays import ArrayFile, Loaded
from rollout_corr.mismatch.doctor import SIGNATURES, diagnose
from rollout_corr.mismatch.fields import Wanted
from rollout_corr.mismatch.measuring import Measured
from rollout_corr.mismatch.problems import Problems

VOCABULARY = 64

# Standard deviation of the engine's error in a logit, where a case does not say another one.
NOISE = 0.03


class Model:
    """Logits of every token, and what an engine with a little noise makes of them.

    Args:
        seed: Of everything drawn.
        sequences: How many.
        median: Of their lengths, which are lognormal.
        noise: Standard deviation of the engine's error in a logit; None: NOISE.
        smooth: Correlation of a token's certainty with the next one's.
        sure: Mean logarithm of the certainty.
        certainty: Factor of the certainty by position, or None.
    """

    def __init__(
        self,
        seed: int = 0,
        sequences: int = 40,
        median: int = 150,
        noise: float | None = None,
        smooth: float = 0.0,
        sure: float = 1.3,
        certainty: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        lengths = (median * self.normal(sequences).mul(0.4).exp()).clamp(16, 4 * median).long()
        self.lengths, self.count = lengths, int(lengths.sum())
        self.offsets = torch.tensor([0, *lengths.tolist()]).cumsum(0)
        self.owner = torch.arange(sequences).repeat_interleave(lengths)
        self.position = torch.arange(self.count) - self.offsets[self.owner]
        sharpness = self.normal(self.count)
        for i in range(1, self.count if smooth else 0):
            sharpness[i] = smooth * sharpness[i - 1] + math.sqrt(1 - smooth**2) * sharpness[i]
        scale = (sure + 0.7 * sharpness).exp()
        if certainty is not None:
            scale = scale * certainty(self.position, self.owner)
        self.logits = self.normal(self.count, VOCABULARY) * scale[:, None]
        self.engine = self.logits + (NOISE if noise is None else noise) * self.normal(self.count, VOCABULARY)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def sample(self, logp: Tensor) -> Tensor:
        return torch.multinomial(logp.exp(), 1, generator=self.generator).squeeze(1)

    def columns(self, sampled: Tensor, train: Tensor, rollout: Tensor, **more: Tensor) -> dict[str, Tensor]:
        """A dump of the log-probs of what was sampled, from the log-probs of the whole vocabulary."""
        return {
            "train_logp": at(train, sampled),
            "rollout_logp": at(rollout, sampled),
            "token_ids": sampled,
            "cu_seqlens": self.offsets,
            **more,
        }

    def healthy(self, **more: Tensor) -> dict[str, Tensor]:
        """The engine's noise and nothing else."""
        rollout = self.engine.log_softmax(1)
        return self.columns(self.sample(rollout), self.logits.log_softmax(1), rollout, **more)


def at(logp: Tensor, sampled: Tensor) -> Tensor:
    return logp.gather(1, sampled[:, None]).squeeze(1)


def truncated(logits: Tensor, top_p: float = 1.0, top_k: int = VOCABULARY) -> Tensor:
    """Log-probs after top-k and top-p, renormalised."""
    logp = logits.log_softmax(1)
    ordered, order = logp.sort(1, descending=True)
    before = ordered.exp().cumsum(1) - ordered.exp()
    keep = (before < top_p) & (torch.arange(VOCABULARY) < top_k)
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    return logp.masked_fill(~kept, -torch.inf).log_softmax(1)


# --- the log-probs are of different distributions
# ----------------------------------------------------------------------


def renormalised(seed: int, **limits: float) -> dict[str, Tensor]:
    model = Model(seed)
    rollout = truncated(model.engine, **limits)  # type: ignore[arg-type]  # top_k is whole
    return model.columns(model.sample(rollout), model.logits.log_softmax(1), rollout)


def temperature(seed: int, engine: float, reported: float, trainer: float) -> dict[str, Tensor]:
    model = Model(seed)
    sampled = model.sample((model.engine / engine).log_softmax(1))
    return model.columns(sampled, (model.logits / trainer).log_softmax(1), (model.engine / reported).log_softmax(1))


def updated(seed: int, step: float, **model_arguments: float) -> dict[str, Tensor]:
    """The trainer is some updates ahead."""
    model = Model(seed, **model_arguments)  # type: ignore[arg-type]
    rollout = model.engine.log_softmax(1)
    ahead = model.logits + step * model.normal(model.count, VOCABULARY)
    return model.columns(model.sample(rollout), ahead.log_softmax(1), rollout)


def sharpened(seed: int, factor: float) -> dict[str, Tensor]:
    """The trainer has become surer of the likeliest token in some contexts, as training does."""
    model = Model(seed)
    rollout = model.engine.log_softmax(1)
    some = (model.uniform(model.count) < 0.3).float()[:, None]
    ahead = model.logits + factor * some * torch.nn.functional.one_hot(model.logits.argmax(1), VOCABULARY)
    return model.columns(model.sample(rollout), ahead.log_softmax(1), rollout)


def rare_tokens_biased(seed: int, bias: float) -> dict[str, Tensor]:
    """The engine thinks too much of rare tokens, as low precision does."""
    model = Model(seed)
    logp = model.engine.log_softmax(1)
    rollout = (logp + bias * (1.0 - logp.exp()) * model.normal(model.count, VOCABULARY).abs()).log_softmax(1)
    return model.columns(model.sample(rollout), model.logits.log_softmax(1), rollout)


def other_weights(seed: int) -> dict[str, Tensor]:
    model = Model(seed)
    rollout = model.engine.log_softmax(1)
    other = model.logits[torch.randperm(model.count, generator=model.generator)]
    return model.columns(model.sample(rollout), other.log_softmax(1), rollout)


def untrained_head(seed: int) -> dict[str, Tensor]:
    model = Model(seed)
    rollout = model.engine.log_softmax(1)
    flat = 0.05 * model.normal(model.count, VOCABULARY)
    return model.columns(model.sample(rollout), flat.log_softmax(1), rollout)


def coarse(seed: int) -> dict[str, Tensor]:
    """Unrelated policies whose log-probs have few different values."""
    columns = other_weights(seed)
    return columns | {name: columns[name].mul(2.0).round().div(2.0) for name in ("train_logp", "rollout_logp")}


# --- the log-probs are of different tokens
# ------------------------------------------------------------------------------


def shifted(seed: int, by: int, share: float = 1.0, **model_arguments: float) -> dict[str, Tensor]:
    model = Model(seed, **model_arguments)  # type: ignore[arg-type]
    columns = model.healthy()
    moved = columns["rollout_logp"].roll(by)
    some = model.uniform(len(model.lengths)) < share
    columns["rollout_logp"] = torch.where(some[model.owner], moved, columns["rollout_logp"])
    return columns


def swapped(seed: int) -> dict[str, Tensor]:
    """Rows of a padded batch of which one side was shuffled."""
    model = Model(seed, median=100)
    columns = model.healthy()
    width = int(model.lengths.max())
    rows = len(model.lengths)
    padded = {}
    inside = torch.arange(width) < model.lengths[:, None]
    for name in ("train_logp", "rollout_logp"):
        padded[name] = model.normal(rows, width).abs().neg().masked_scatter(inside, columns[name])
    padded["rollout_logp"] = padded["rollout_logp"][torch.randperm(rows, generator=model.generator)]
    return padded


def siblings(seed: int) -> dict[str, Tensor]:
    """Groups of four samples that begin with the same hundred tokens, as a common prompt would make them."""
    model = Model(seed, median=200)
    columns = model.healthy()
    first = model.offsets[:-1][torch.arange(len(model.lengths)) // 4 * 4][model.owner] + model.position
    common = (model.position < 100) & (first < model.count)
    for name in ("train_logp", "rollout_logp"):
        columns[name] = torch.where(common, columns[name][first.clamp(max=model.count - 1)], columns[name])
    return columns


def retokenised(seed: int, tokens: int, harder: float | None = None, first: bool = False) -> dict[str, Tensor]:
    """Turns of 30 tokens with 10 of a tool between them, whose first tokens the trainer reads as others."""
    start_of = lambda position: (position % 40 < 3) & (position >= 40)  # noqa: E731
    certainty = None
    if harder is not None:
        certainty = lambda position, owner: torch.where(start_of(position), harder, 5.0)  # noqa: E731
    model = Model(seed, certainty=certainty)
    columns = model.healthy(mask=model.position % 40 < 30)
    begin = (model.position % 40 < tokens) & ((model.position >= 40) | first)
    if first:
        begin &= model.position < 40
    wrong = model.normal(model.count, VOCABULARY) * 3.0
    wrong_logp = at(wrong.log_softmax(1), columns["token_ids"])
    columns["train_logp"] = torch.where(begin, wrong_logp, columns["train_logp"])
    return columns


# --- the log-probs are none
# --------------------------------------------------------------------------------------------


def filled(seed: int, value: float, share: float = 0.1, side: str = "rollout_logp") -> dict[str, Tensor]:
    """Runs of ten tokens that the mask lets through hold a filling."""
    model = Model(seed)
    columns = model.healthy()
    runs = (model.uniform(model.count // 10 + 1) < share).repeat_interleave(10)[: model.count]
    columns[side] = torch.where(runs, value, columns[side])
    return columns


def broken(seed: int, rows: float = 0.0, tokens: float = 0.0, masked: bool = False) -> dict[str, Tensor]:
    model = Model(seed)
    columns = model.healthy()
    bad = (model.uniform(len(model.lengths)) < rows)[model.owner] | (model.uniform(model.count) < tokens)
    columns["train_logp"] = torch.where(bad, math.nan, columns["train_logp"])
    if masked:
        columns["mask"] = ~bad
    return columns


def not_logs(seed: int, change: Callable[[Tensor], Tensor], side: str = "rollout_logp") -> dict[str, Tensor]:
    columns = Model(seed).healthy()
    columns[side] = change(columns[side])
    return columns


def in_bfloat16(seed: int, side: str = "rollout_logp") -> dict[str, Tensor]:
    return not_logs(seed, lambda logp: logp.bfloat16().float(), side)


def partly_bfloat16(seed: int) -> dict[str, Tensor]:
    model = Model(seed)
    columns = model.healthy()
    some = model.uniform(model.count) < 0.1
    columns["rollout_logp"] = torch.where(some, columns["rollout_logp"].bfloat16().float(), columns["rollout_logp"])
    return columns


def copied(seed: int, share: float = 1.0) -> dict[str, Tensor]:
    model = Model(seed)
    columns = model.healthy()
    same = model.uniform(model.count) < share
    columns["train_logp"] = torch.where(same, columns["rollout_logp"], columns["train_logp"])
    return columns


# --- it grows
# ----------------------------------------------------------------------------------------------------------


def over(seed: int, noise: Callable[[Model], Tensor], **model_arguments: object) -> tuple[Model, dict[str, Tensor]]:
    """The trainer's noise in every logit of a token, by whatever it depends on."""
    model = Model(seed, **model_arguments)  # type: ignore[arg-type]
    rollout = model.engine.log_softmax(1)
    train = model.logits + noise(model)[:, None] * model.normal(model.count, VOCABULARY)
    return model, model.columns(model.sample(rollout), train.log_softmax(1), rollout)


def over_steps(seed: int, noise: Callable[[Tensor], Tensor], steps: int = 20, **more: object) -> dict[str, Tensor]:
    _, columns = over(seed, lambda model: noise(model.owner * steps // 80), sequences=80, median=80, **more)
    columns["steps"] = torch.arange(80) * steps // 80
    return columns


def over_positions(seed: int, noise: Callable[[Tensor], Tensor], **more: object) -> dict[str, Tensor]:
    return over(seed, lambda model: noise(model.position.double()).float(), median=400, sequences=20, **more)[1]


def over_versions(seed: int, noise: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Four weight versions, of which the last is the trainer's."""

    def version(model: Model) -> Tensor:
        return model.owner % 4

    model, columns = over(seed, lambda model: noise(3.0 - version(model)))
    columns["versions"] = 100 + version(model)
    return columns


def long_sequences(seed: int, median: int, noise: float, bias: float) -> dict[str, Tensor]:
    """Long sequences straight from D: a vocabulary for each token would take too long."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (median * torch.randn(12, generator=generator).mul(0.2).exp()).long()
    n = int(lengths.sum())
    rollout = -torch.empty(n).exponential_(generator=generator)
    d = (noise * torch.randn(n, generator=generator) - bias) * (1.0 - rollout.exp())
    return {"train_logp": rollout + d, "rollout_logp": rollout, "lengths": lengths}


# --- three policies
# ----------------------------------------------------------------------------------------------------


def three(seed: int, engine: float, again: float) -> dict[str, Tensor]:
    """Another pass of the trainer with a noise of its own, beside an engine with its."""
    model = Model(seed, noise=engine)
    columns = model.healthy()
    second = model.logits + again * model.normal(model.count, VOCABULARY)
    return columns | {"new_logp": at(second.log_softmax(1), columns["token_ids"])}


class Case(NamedTuple):
    """One kind of dump.

    Attributes:
        name: What it is.
        verdict: The cause that the doctor has to name first; None: the dump is healthy.
        like: The cause that it looks like, for a dump that does not have it.
        make: Makes it from a seed.
        also: Further verdicts that are right.
    """

    name: str
    verdict: str | None
    like: str | None
    make: Callable[[int], dict[str, Tensor]]
    also: tuple[str, ...] = ()


def case(
    name: str,
    verdict: str | None,
    make: Callable[..., dict[str, Tensor]],
    *arguments: object,
    like: str | None = None,
    also: tuple[str, ...] = (),
    **keywords: object,
) -> Case:
    return Case(name, verdict, like, lambda seed: make(seed, *arguments, **keywords), also)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full(x.shape, value)


def plain_model(seed: int, **arguments: object) -> dict[str, Tensor]:
    return Model(seed, **arguments).healthy()  # type: ignore[arg-type]


CASES = (
    case("noise of a bf16 engine", None, plain_model),
    case("a nearly exact engine", None, plain_model, noise=1e-4),
    case("little noise, few and short sequences", None, plain_model, sequences=6, median=40),
    # --- other distributions
    case("top-p 0.8", "renormalised", renormalised, top_p=0.8),
    case("top-p 0.95", "renormalised", renormalised, top_p=0.95),
    case("top-k 8", "renormalised", renormalised, top_k=8),
    case("top-p 0.9 after top-k 20", "renormalised", renormalised, top_p=0.9, top_k=20),
    case("a head that is not tied: 3 nats less everywhere", "renormalised", not_logs, lambda x: x - 3.0, "train_logp"),
    case("rollout log-probs too low by a constant", "not_the_sampler", not_logs, lambda x: x - 0.3),
    case("trainer so far ahead that few tokens decide", "different_policies", updated, 1.6, like="not_the_sampler"),
    case("a little engine noise more", "different_policies", updated, 0.25, like="not_the_sampler"),
    case("temperature 0.7 in the engine alone", "temperature", temperature, 0.7, 0.7, 1.0),
    case("temperature 1.3 in the engine alone", "temperature", temperature, 1.3, 1.3, 1.0),
    case("temperature 0.7, engine reports raw log-probs", "temperature", temperature, 0.7, 1.0, 0.7),
    case("temperature 0.7 divides twice in the trainer", "temperature", temperature, 0.7, 0.7, 0.49),
    case("temperature 0.7 on both sides", None, temperature, 0.7, 0.7, 0.7, like="temperature"),
    case("temperature 0.95 in the engine alone", "temperature", temperature, 0.95, 0.95, 1.0),
    case("rare tokens biased a little", None, rare_tokens_biased, 0.02, like="temperature"),
    case("rare tokens biased", "different_policies", rare_tokens_biased, 0.6, like="temperature"),
    case("trainer some updates ahead", "different_policies", updated, 0.5, like="renormalised"),
    case("trainer less sure everywhere", "temperature", temperature, 1.0, 1.0, 1.2, like="renormalised"),
    case("trainer a little surer of what is likely", None, sharpened, 0.2, like="renormalised"),
    case("trainer many updates ahead", "different_policies", updated, 1.2, like="wrong_weights"),
    case("trainer very many updates ahead", "different_policies", updated, 2.0, like="wrong_weights"),
    case("coarse log-probs of other weights", "wrong_weights", coarse, like="filled", also=("bfloat16",)),
    case("trainer surer of what is likely", "different_policies", sharpened, 2.5, like="temperature"),
    case("other weights", "wrong_weights", other_weights),
    case("an untrained head", "wrong_weights", untrained_head),
    # --- other tokens
    case("rollout log-probs one late", "shifted", shifted, 1),
    case("rollout log-probs one early", "shifted", shifted, -1),
    case("rollout log-probs two late", "shifted", shifted, 2),
    case("a third of the sequences one late", "shifted", shifted, 1, 0.33),
    case("one late in text whose certainty comes in runs", "shifted", shifted, 1, smooth=0.9),
    case("text whose certainty comes in runs", None, plain_model, like="shifted", smooth=0.95),
    case("rows of one side shuffled", "swapped", swapped),
    case("groups that begin alike", None, siblings, like="swapped"),
    case("sequences of many updates ago", "different_policies", updated, 1.5, like="swapped"),
    case(
        "a trainer ahead in text whose certainty comes in runs",
        "different_policies",
        updated,
        1.0,
        like="shifted",
        smooth=0.95,
    ),
    case(
        "sequences whose first tokens are hard to guess",
        None,
        plain_model,
        like="sequence_starts",
        certainty=lambda position, owner: torch.where(position < 3, 0.5, 5.0),
    ),
    case("retokenised turn starts", "turn_starts", retokenised, 2),
    case("the first token of a turn from another template", "turn_starts", retokenised, 1),
    case("turn starts that are hard to guess", None, retokenised, 0, 0.5, like="turn_starts"),
    case("turns", None, retokenised, 0, like="turn_starts"),
    case("prompts of another template", "sequence_starts", retokenised, 1, like="turn_starts", first=True),
    # --- no log-probs
    case("0.0 on a tool's tokens", "filled", filled, 0.0),
    case("-1 on a tool's tokens", "filled", filled, -1.0),
    case("-9999 on a tool's tokens", "filled", filled, -9999.0, 0.02),
    case("the trainer's side filled with 0.0", "filled", filled, 0.0, side="train_logp"),
    case("1.0 on a tool's tokens", "filled", filled, 1.0),
    case("a sure policy with many log-probs of 0.0", None, plain_model, like="filled", sure=3.0),
    case("NaN rows", "nonfinite", broken, rows=0.1),
    case("some NaN tokens", "nonfinite", broken, tokens=0.002),
    case("NaN behind the mask", None, broken, rows=0.1, tokens=0.01, masked=True, like="nonfinite"),
    case("probabilities instead of log-probs", "not_log_probs", not_logs, torch.exp),
    case("negative log-likelihoods", "not_log_probs", not_logs, torch.neg),
    case("the trainer's side negated", "not_log_probs", not_logs, torch.neg, "train_logp"),
    case("log-probs rounded a little above 0", None, not_logs, lambda x: x + 5e-5, like="not_log_probs"),
    case("log-probs kept in bfloat16", "bfloat16", in_bfloat16),
    case("the trainer's log-probs kept in bfloat16", "bfloat16", in_bfloat16, "train_logp"),
    case("log-probs kept in float16", None, not_logs, lambda x: x.half().float(), like="bfloat16"),
    case("one log-prob in ten kept in bfloat16", None, partly_bfloat16, like="bfloat16"),
    case("log-probs copied", "copied", copied),
    case("half of the log-probs equal", None, copied, 0.5, like="copied"),
    # --- growing
    case("worse step by step", "drift", over_steps, lambda step: 0.02 + 0.01 * step),
    case("steps that wobble", None, over_steps, lambda step: 0.03 + 0.02 * (step % 3), like="drift"),
    case("one bad step", None, over_steps, lambda step: 0.03 + 0.2 * (step == 9), like="drift"),
    case("one very bad step at the end", None, over_steps, lambda step: 0.02 + 0.5 * (step == 18), like="drift"),
    case("two steps", None, over_steps, lambda step: 0.03 + 0.02 * step, 2, like="drift"),
    case(
        "harder tokens step by step",
        None,
        over_steps,
        constant(0.03),
        like="drift",
        certainty=lambda position, owner: 2.0 - owner / 60,
    ),
    case("worse along the sequence", "positions", over_positions, lambda position: 0.001 * position),
    case("the same all along", None, over_positions, constant(0.05), like="positions"),
    case(
        "harder tokens along the sequence",
        None,
        over_positions,
        constant(0.03),
        like="positions",
        certainty=lambda position, owner: 2.0 / (1.0 + position / 100),
    ),
    case("old weight versions", "stale", over_versions, lambda lag: 0.02 + 0.15 * lag),
    case("weight versions that all differ as much", None, over_versions, constant(0.05), like="stale"),
    case("newer weight versions differ more", None, over_versions, lambda lag: 0.08 - 0.02 * lag, like="stale"),
    case("products over long sequences", "long_products", long_sequences, 12000, 0.05, 0.002),
    case("short sequences with the same noise", None, long_sequences, 300, 0.05, 0.002, like="long_products"),
    case("long sequences of a nearly exact engine", None, long_sequences, 12000, 0.001, 0.0, like="long_products"),
    # --- three policies
    case("the engine is off, two passes of the trainer agree", "engine_alone", three, 0.6, 0.005),
    case("three policies, each a little apart", None, three, 0.03, 0.03, like="engine_alone"),
    case("the engine is off, and so are two passes", "different_policies", three, 0.6, 0.6, like="engine_alone"),
)


# --- the table
# ---------------------------------------------------------------------------------------------------------

# The thresholds were set while looking at seeds below 20.
SEEDS = range(100, 105)
BEGIN = "<!-- made by `python tests/mismatch_cases.py`; a test compares them -->"
END = "<!-- end of what is made -->"


def measured(columns: dict[str, Tensor]) -> Measured:
    """What a dump that holds these columns is measured as."""
    found = Measured()
    for block in ArrayFile(Loaded(columns), "dump", Wanted(), Problems()).blocks():
        found.add(block)
    return found


def verdicts(columns: dict[str, Tensor]) -> list[str]:
    """The causes that the doctor names, the gravest first."""
    return [verdict.name for verdict in diagnose(measured(columns))]


def table() -> str:
    """Hits and false alarms of every signature, over `SEEDS`."""
    named = [(case, verdicts(case.make(seed))) for case in CASES for seed in SEEDS]
    lines = [
        BEGIN,
        "",
        "| cause | dumps that have it | named first | dumps that look like it | false alarms | others |",
    ]
    lines[-1] += " false alarms |"
    lines.append("|---|---|---|---|---|---|---|")
    causes = [signature.__name__ for signature in SIGNATURES]
    for cause in [*causes, None]:
        having = [found for case, found in named if case.verdict == cause]
        alike = [found for case, found in named if case.like == cause and case.verdict != cause and cause]
        rest = [
            found
            for case, found in named
            if cause not in (case.verdict, case.like) and cause not in case.also and cause
        ]
        first = sum(found[:1] == ([] if cause is None else [cause]) for found in having)
        false = [sum(cause in found for found in some) for some in (alike, rest)]
        cells = [
            f"`{cause}`" if cause else "none: healthy",
            len(having),
            first,
            len(alike),
            false[0],
            len(rest),
            false[1],
        ]
        lines.append("| " + " | ".join(map(str, cells if cause else [*cells[:3], *("-",) * 4])) + " |")
    return "\n".join([*lines, "", noisier(), "", END])


def noisier() -> str:
    """How the signatures fare when the engine's noise is three times as large."""
    global NOISE
    usual, NOISE = NOISE, 0.1
    try:
        named = [(case, verdicts(case.make(seed))) for case in CASES if case.verdict for seed in SEEDS]
    finally:
        NOISE = usual
    # That much noise is itself worth a remark.
    remarks = ("different_policies", "long_products")
    missed = [case for case, found in named if case.verdict not in found]
    wrong = sum(bool({*found} - {case.verdict, *case.also, *remarks}) for case, found in named)
    names = ", ".join(f"{one.name} ({missed.count(one)})" for one in dict.fromkeys(missed))
    return (
        f"With an engine whose noise is three times as large, {len(named) - len(missed)} of {len(named)} dumps are "
        f"still named, {wrong} wrongly. Missed: {names}."
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"{table()}\n")
