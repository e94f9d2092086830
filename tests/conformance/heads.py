"""Open pull requests that change a correction, compared as if they were merged: `--next`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import rollout_corr as rc
from conformance.batches import Batch
from conformance.peers import miles, nemo, skyrl, slime, verl
from conformance.rows import BF16, PROPAGATES, Declared, Row, Tally, compared, draw, loss_of, of_loss, report, spec_of
from conformance.samples import padded, samples_of
from conformance.sources import Source, found
from conformance.verl_parts import Proto, weights_of


class Head(NamedTuple):
    """The head of a pull request.

    Attributes:
        framework: Its name in `rollout_corr.frameworks`.
        pull: Its number.
        commit: The head that was compared.
        changes: What it changes, for the page.
        here: What it is here, and which differences it intends.
        rows: The rows that run its functions: the framework's own, and those of what is new; None: none can.
    """

    framework: str
    pull: int
    commit: str
    changes: str
    here: str
    rows: Callable[[Source], Iterator[Row]] | None = None

    @property
    def title(self) -> str:
        """Framework and number, for tables."""
        return f"{self.framework}#{self.pull}"

    def sources(self) -> list[Source]:
        """The folder PEERS/NAME-pull-N, where there is one: the head merged into the branch that it is for."""
        peer = importlib.import_module(f"conformance.peers.{self.framework}")
        return found(
            self.framework, None, peer.PACKAGE, f"{peer.CHECKOUT}-pull-{self.pull}", getattr(peer, "UNDER", "")
        )


FLOAT32 = Declared(
    "a binary KL next to probability 1",
    "conformance.md",
    "its KL, in float32 there, differs where a probability is next to 1",
    lambda given, settings: True,
    tuple(
        f"rollout_corr/rollout_rs_binary_kl_{end}"
        for end in ("mean", "std", "max", "min", "seq_mean", "seq_std", "seq_max", "seq_min", "seq_max_deviation")
    ),
)


def verl_kpop(source: Source) -> Iterator[Row]:
    """Compare everything, and the reader of `rollout_rs: binary_kl`."""
    yield from verl.rows(source)
    correct = source.cut(verl.HELPER, verl.MAIN, DataProto=Proto)

    def run(given: Batch, drawn: dict[str, Any]) -> dict[str, Any]:
        held, mask, _ = correct(given.old, given.rollout, given.mask, **drawn)
        return {"mask": mask, "weights": weights_of(held)}

    settings = draw(
        rollout_is=(None, "token"),
        rollout_is_threshold=(1.05, 2.0),
        rollout_rs="binary_kl",
        rollout_rs_threshold=(0.001, 0.05, 2.0),
    )
    place = f"{verl.HELPER}: {verl.MAIN}, binary_kl"
    more: dict[str, Any] = {"declared": verl.OF_CORRECTION, "kinds": verl.SOME}
    yield spec_of("verl", place, run, settings, ", binary_kl", **more)

    def metrics(given: Batch, drawn: dict[str, Any]) -> dict[str, float]:
        found: dict[str, float] = correct(given.old, given.rollout, given.mask, **drawn)[2]
        return found

    more["declared"] += (FLOAT32,)
    yield report("verl", place, partial(rc.spec, "verl"), metrics, settings, within=(2e-5, 2e-5), **more)


def miles_off_policy(source: Source) -> Iterator[Row]:
    """Compare the loss, and `off_policy_is_function` on REINFORCE's with CISPO's surrogate in bypass mode."""
    yield from miles.rows(source)
    file = miles.CODE.tis
    function = source.cut(file, "off_policy_is_function")

    def theirs(given: Batch, eps_clip: float, eps_clip_high: float) -> Tensor:
        called = slime.per_sample(given)
        new = samples_of(given.new, called["response_lengths"])
        args = slime.arguments(eps_clip=eps_clip, eps_clip_high=eps_clip_high)
        more = {key: called[key] for key in ("rollout_log_probs", "loss_masks")}
        # The gradient of REINFORCE's loss, -A log p.
        advantages = samples_of(given.token_advantages, called["response_lengths"])
        plain = -torch.cat(new) * torch.cat(advantages)
        value, _, _ = function(args, pg_loss=plain, cur_log_probs=new, **more)
        at = padded(list(value.split(called["response_lengths"])), given.mask.shape[1])
        return at.where(given.mask, 0.0).sum() / given.mask.sum().clamp(min=1)

    def ours(given: Batch, eps_clip: float, eps_clip_high: float) -> Tensor:
        made = rc.Recipe(None, rc.Loss(rc.CISPO(eps_clip, eps_clip_high)))
        return loss_of(made, given, rollout_logp=given.rollout)

    settings = draw(eps_clip=(0.2, 1.0), eps_clip_high=(0.2, 1.0, 4.0))
    sides = of_loss(ours), of_loss(theirs)
    declared = (PROPAGATES, BF16)
    yield Row("recipe", "CISPO of new/rollout", f"{file}: off_policy_is_function", *sides, settings, declared)


HEADS = (
    Head(
        "verl", 6800, "b26dfa5c8",
        "`rollout_rs: binary_kl` (KPop)",
        "read and reported already: `binary_kl_symmetric` with an `eps` of 1e-6; "
        "its KL, in float32 there, differs where a probability is next to 1",
        verl_kpop,
    ),
    Head(
        "verl", 7196, "0482624a7",
        "`debug_rollout_actor_probs`: in bypass mode one more forward pass, for `calculate_debug_metrics`",
        "read without effect; the pass is their trainer's, and its metrics have rows and a drop-in",
        verl.of_correction,
    ),
    Head(
        "nemo", 3751, "2eda5ed12",
        "the clipped loss with one host transfer, `metrics_level`, `enable_torch_compile`",
        "the same losses",
        nemo.rows,
    ),
    Head(
        "slime", 2305, "eba726132",
        "`--rs-batch-refill`: samples again what sequence rejection took",
        "`Correction.keep` says what went, and the refill is their trainer's; the functions it calls are the same",
        slime.rows,
    ),
    Head(
        "slime", 2383, "-",
        "verl's fused log-prob kernel",
        "log-probs are given here; the stored snapshots have no head of it",
    ),
    Head(
        "miles", 1344, "c77693ad2",
        "`off_policy_is_function`: new/rollout, clipped, times the loss of REINFORCE",
        "`rc.CISPO` with `rollout_logp` alone",
        miles_off_policy,
    ),
    Head(
        "skyrl", 1896, "57ec2a2bd",
        "REPO-R: advantages rescaled by log-probs and a controller of entropy",
        "advantages are given here; the losses behind it are the same",
        skyrl.rows,
    ),
    Head(
        "prime_rl", 3555, "-",
        "`exact_on_policy_ratio`: the ratio is 1 where the trainer's own version sampled the token",
        "`Versions` and `rc.proximal`; the stored snapshots have no head of it",
    ),
)  # fmt: skip


class Next(NamedTuple):
    """Outcome of a row of a head."""

    head: Head
    tally: Tally


def run(cases: int, seed: int = 0, only: str = "") -> Iterator[Next]:
    """Compare all heads that are there."""
    torch.set_num_threads(1)
    for head in HEADS:
        for source in head.sources():
            rows = () if head.rows is None else head.rows(source)
            yield from (Next(head, compared(row, cases, seed)) for row in rows if only in row.name)


def table(done: list[Next]) -> str:
    """The table of the heads for the page; counts of a run where there are some."""
    lines = ["| pull request | head | what it changes | here | rows, cases |", "|---|---|---|---|---|"]
    for head in HEADS:
        tallies = [tally for other, tally in done if other is head]
        counts = f"{len(tallies)}, {sum(tally.cases for tally in tallies):,}" if tallies else "-"
        lines.append(f"| {head.title} | {head.commit} | {head.changes} | {head.here} | {counts} |")
    return "\n".join(lines)
