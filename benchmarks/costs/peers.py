"""The frameworks' own code: rows of the conformance tests, by the names that these have, and their settings.

What an adapter of those tests computes is not counted, only what a framework's functions do when they are called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.cases.batches import Batch
from benchmarks.costs.counting import Cost, cost_of
from conformance import batches, campaign
from conformance.rows import Row
from conformance.sources import Source

Settings = dict[str, Any]

CORRECTION, LOSS, BOTH = "correction", "loss", "correction in the loss"
# Kinds of rows, and the part of a name that tells them apart.
KINDS = {CORRECTION: ("preset",), LOSS: ("recipe", "drop-in"), BOTH: ("recipe",)}


class Asked(NamedTuple):
    """The row of a framework that is counted."""

    row: str
    settings: Settings
    entries: tuple[str, ...]


class Peer(NamedTuple):
    """A framework; `compiles` is the function of its loss, by module and name, that it gives to torch.compile."""

    name: str
    module: str
    asked: dict[str, Asked]
    packed: bool = False
    compiles: tuple[str, str] | None = None


# Settings near each other's: a ratio clipped at 0.2 on both sides and at 3, weights and ratios between 0.5 and 2.
FRAGMENT = ("fragment",)  # consecutive statements of a longer function
VERL = "compute_rollout_correction_and_rejection_mask"
VANILLA = ("compute_policy_loss_vanilla",)
VERL_LOSS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "mode": "token-mean", "info": {}}
TRL: Settings = {"epsilon_high": None, "beta": 0.0, "use_bias_correction_kl": True, "clip_max": 2.0}
TRL |= {"vllm_importance_sampling_mode": "token_truncate", "importance_sampling_level": "token"}
TRL_ALONE, TRL_WITH = (TRL | {"vllm_importance_sampling_correction": x} for x in (False, True))
SKYRL = {"eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0}
XTUNER = {"cliprange_low": 0.2, "cliprange_high": 0.2, "clip_ratio_c": 3.0}
XTUNER_BOUNDS = {"threshold": (2.0, 0.5), "mask_threshold": (5.0, 0.2), "veto_threshold": (20.0, 0.0)}
XTUNER_LOSS = ("build_batches", "loss_fn")
NEMO = {"token_level_loss": True, "ratio_clip_c": 3.0, "reference_policy_kl_penalty": 0.0}
NEMO_BOUNDS = {"ratio": 2.0, "ratio_min": 0.5}
SLIME = {"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": 3.0}
SLIME_BOUNDS = {"tis_upper_bound": 2.0, "rs_lower_bound": 0.5, "rs_upper_bound": 2.0, "rs_veto_threshold": 1e-4}
SLIME_BOUNDS |= {"tis_batch_normalize": False}
AREAL: Settings = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": 3.0}
AREAL_BOUNDS = {"lower": 0.5, "upper": 2.0, "agg": "mean"}
OPENRLHF: Settings = {"eps_clip_low_high": (0.2, 0.2), "dual_clip": 3.0, "loss_agg_mode": "token-mean"}
OPENRLHF_BOUNDS = {"low": 0.5, "high": 2.0}
PRIME_RL = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "kl_tau": 1e-3, "adv_tau": 1.0}
ALLENAI = {"clip_higher": 0.2, "beta": 0.0, "kl_estimator": 0}
ALLENAI_BOUNDS = {"clamp_upper": 2.0, "mask_lower": 0.5, "mask_upper": 2.0}
ROLL = {"pg_clip": 0.2, "pg_clip_low": 0.2, "pg_clip_high": 0.2, "dual_clip_loss": True, "loss_agg_mode": "token-mean"}
ROLL_BOUNDS = {"upper_bound": 2.0, "ratio_low": 0.5, "ratio_high": 2.0}
ROLL_CORRECTION = "compute_train_infer_correction"

# What Liger Kernel compiles by default; it calls nothing else.
LIGER = ("liger_kernel.chunked_loss.grpo_loss", "LigerFusedLinearGRPOFunction.ppo_loss_fn")

PEERS = (
    Peer(
        "verl",
        "verl",
        {
            CORRECTION: Asked(
                "verl.decoupled_geo_rs_token_tis", {"is_threshold": 2.0, "rs_threshold": "0.999_1.001"}, (VERL,)
            ),
            LOSS: Asked("verl.losses.vanilla", VERL_LOSS | {"weighted": True}, VANILLA),
            BOTH: Asked(
                "verl.bypass_ppo_clip_geo_rs", {"rs_threshold": "0.999_1.001"}, ("compute_policy_loss_bypass_mode",)
            ),
        },
    ),
    Peer(
        "TRL",
        "trl",
        {
            CORRECTION: Asked("trl.token_truncate", {"clip_max": 2.0, "clip_min": None}, FRAGMENT),
            LOSS: Asked("trl.dapo", TRL_ALONE, FRAGMENT),
            BOTH: Asked("trl.dapo", TRL_WITH, FRAGMENT),
        },
    ),
    Peer(
        "SkyRL",
        "skyrl",
        {
            CORRECTION: Asked("skyrl.tldr", {}, ("compute_off_policy_correction",)),
            LOSS: Asked("skyrl.dual_clip", SKYRL, ("ppo_policy_loss",)),
            BOTH: Asked("skyrl.tldr", {}, ("ppo_policy_loss",)),
        },
    ),
    Peer(
        "xtuner",
        "xtuner",
        {
            CORRECTION: Asked("xtuner.reasoning", XTUNER_BOUNDS, ("compute_rollout_importance_weights_and_metrics",)),
            LOSS: Asked("xtuner.ppo", XTUNER, XTUNER_LOSS),
            BOTH: Asked("xtuner.reasoning", XTUNER_BOUNDS | XTUNER, ("compute_rollout_is", *XTUNER_LOSS)),
        },
        packed=True,
    ),
    Peer(
        "NeMo RL",
        "nemo",
        {
            CORRECTION: Asked("nemo.tis", NEMO_BOUNDS, FRAGMENT),
            LOSS: Asked("nemo.ppo", NEMO, ("__call__",)),
            BOTH: Asked("nemo.tis", NEMO_BOUNDS | NEMO, ("__call__",)),
        },
    ),
    Peer(
        "slime",
        "slime",
        {
            CORRECTION: Asked("slime.mis", SLIME_BOUNDS, ("compute_mis_weights",)),
            LOSS: Asked("slime.ppo", SLIME, ("loss_function",)),
            BOTH: Asked("slime.mis", SLIME_BOUNDS | SLIME, ("loss_function",)),
        },
        packed=True,
    ),
    Peer(
        "AReaL",
        "areal",
        {
            CORRECTION: Asked("areal.seq", AREAL_BOUNDS, ("apply_rejection_sampling",)),
            LOSS: Asked("areal.ppo", AREAL, ("ppo_actor_loss_fn",)),
            BOTH: Asked("areal.seq", AREAL_BOUNDS | AREAL, ("ppo_actor_loss_fn",)),
        },
    ),
    Peer(
        "OpenRLHF",
        "openrlhf",
        {
            CORRECTION: Asked("openrlhf.seq_mask_tis", OPENRLHF_BOUNDS, FRAGMENT),
            LOSS: Asked("openrlhf.ppo", OPENRLHF, ("forward",)),
            BOTH: Asked("openrlhf.seq_mask_tis", OPENRLHF_BOUNDS | OPENRLHF, ("forward",)),
        },
    ),
    Peer("prime-rl", "prime_rl", {BOTH: Asked("prime_rl.dppo", PRIME_RL, ("compute_loss",))}, packed=True),
    Peer(
        "open-instruct",
        "open_instruct",
        {
            CORRECTION: Asked("open_instruct.seq", ALLENAI_BOUNDS, ("compute_rho_correction",)),
            LOSS: Asked("open_instruct.ppo", ALLENAI, FRAGMENT),
            BOTH: Asked("open_instruct.seq", ALLENAI_BOUNDS | ALLENAI, FRAGMENT),
        },
    ),
    Peer(
        "ROLL",
        "roll",
        {
            CORRECTION: Asked("roll.default", ROLL_BOUNDS, (ROLL_CORRECTION,)),
            LOSS: Asked("roll.ppo", ROLL, ("loss_func",)),
            BOTH: Asked("roll.default", ROLL_BOUNDS | ROLL, (ROLL_CORRECTION, "loss_func")),
        },
    ),
    Peer(
        "Liger Kernel",
        "liger",
        {LOSS: Asked("trl.dapo", TRL_ALONE, ("ppo_loss_fn",))},
        compiles=LIGER,
    ),
)


class Found(NamedTuple):
    """A framework's code of one version, ready to run."""

    peer: Peer
    version: str
    root: Path
    rows: dict[str, Row]

    def call(self, what: str, given: batches.Batch) -> Any:
        """Run the framework's side once, of a loss with its backward."""
        return self.rows[what].theirs(given, dict(self.peer.asked[what].settings))

    def cost(self, what: str, given: batches.Batch) -> Cost:
        """Count what the framework's functions do, or what inductor makes of the one that it compiles."""
        if self.peer.compiles is not None:
            return self._compiled_cost(what, given, *self.peer.compiles)
        return cost_of(lambda: self.call(what, given), self.root, self.peer.asked[what].entries)

    def _compiled_cost(self, what: str, given: batches.Batch, module: str, name: str) -> Cost:
        """Count the graphs of a function that is imported as it is: the globals of a cut are not Python's."""
        from benchmarks.costs import compiled

        backend = compiled.Backend()
        with mock.patch.object(sys, "path", [str(self.root), *sys.path]):
            function = backend.of(attrgetter(name)(importlib.import_module(module)))
        with mock.patch.object(Source, "cut", return_value=function):
            (source,) = [one for one in campaign.sources_of(self.peer.module) if one.root == self.root]
            row = row_of(source, self.peer, what)
        row.theirs(given, dict(self.peer.asked[what].settings))
        return backend.cost()


def row_of(source: Source, peer: Peer, what: str) -> Row:
    """Find the row of a framework that is counted."""
    every, asked = campaign.rows_of(source), peer.asked[what]
    return next(row for row in every if row.kind in KINDS[what] and row.name == asked.row)


def found(wanted: Iterable[Peer] = PEERS) -> Iterator[Found]:
    """Find the frameworks that are installed or lie in the folder that PEERS names."""
    for peer in wanted:
        for source in campaign.sources_of(peer.module)[:1]:
            rows = {what: row_of(source, peer, what) for what in peer.asked}
            yield Found(peer, source.version, source.root, rows)


def batch_of(given: Batch, packed: bool) -> batches.Batch:
    """Make the conformance tests' batch; packed: of sequences of one length, which leave no padding behind."""
    assert given.new is not None
    mask, tensors = given.mask, [given.new.detach(), given.old, given.rollout, given.old]
    if packed:
        rows = len(given.lengths)
        width = given.old.numel() // rows
        tensors = [x[: rows * width].view(rows, width) for x in tensors]
        mask = torch.ones_like(tensors[0], dtype=torch.bool)
    assert mask is not None
    return batches.Batch("mild", 1, *tensors, torch.linspace(-1.0, 1.0, len(mask)), mask.bool())
