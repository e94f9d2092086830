"""slime and miles: ranks of context parallelism, flags as tests draw them, and where their loss differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from threading import local
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from builders.threaded_ranks import Threads
from conformance.batches import Batch
from conformance.declared import Declared
from conformance.rows import both, draw


class Ranks(Threads):
    """Ranks of context parallelism as threads: what Megatron tells of them, and their all-reduce."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.here = local()
        self.mpu = SimpleNamespace(
            get_context_parallel_rank=lambda: self.here.rank,
            get_context_parallel_world_size=lambda: ranks,
            get_context_parallel_group=lambda: None,
            get_data_parallel_world_size=lambda with_context_parallel: ranks,
        )
        self.dist = SimpleNamespace(nn=SimpleNamespace(all_reduce=self.all_reduce))

    def state(self) -> SimpleNamespace:
        """The parallel state of miles."""
        cp = SimpleNamespace(rank=self.here.rank, size=self.ranks, group=None)
        return SimpleNamespace(cp=cp, intra_dp=SimpleNamespace(size=1), intra_dp_cp=SimpleNamespace(size=self.ranks))

    def all_reduce(self, x: Tensor, group: Any = None) -> Tensor:
        """Add up the parts of all ranks; the gradient is this rank's own."""
        parts = self.exchange(self.here.rank, x)
        return x + sum(part.detach() for i, part in enumerate(parts) if i != self.here.rank)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call a function on each rank, and return what it gives."""

        def on(rank: int) -> Any:
            self.here.rank = rank
            return function(rank)

        # One rank in this thread, where a caller may count what it does.
        return [on(0)] if self.ranks == 1 else super().run(on)


@contextmanager
def loaded(name: str, **members: Any) -> Iterator[None]:
    """Let `sys.modules` hold a module with some members, as when the framework itself runs."""
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


# --- flags ---

# The bounds of `--use-tis`.
bounds = draw(tis_clip=(1.05, 2.0, 5.0), tis_clip_low=(0.0, 0.5, 0.95))
clips = draw(eps_clip=(0.1, 0.2), eps_clip_high=(0.2, 0.28))
dual = both(clips, draw(eps_clip_c=(None, 3.0)))


def mis_settings(rng: Random) -> dict[str, Any]:
    """Draw settings of mis.yaml."""
    levels = ("token", "sequence", "geometric")
    drawn = {
        "tis_level": rng.choice(levels),
        "rs_level": rng.choice(levels),
        "tis_mode": rng.choice(("truncate", "clip", "mask")),
        "tis_lower_bound": rng.choice((None, 0.5, 0.9)),
        "tis_upper_bound": rng.choice((1.2, 2.0)),
        "rs_lower_bound": rng.choice((None, 0.9)),
        "rs_upper_bound": rng.choice((None, 1.1)),
        "rs_veto_threshold": rng.choice((None, 1e-4, 0.5)),
        "use_rs": rng.random() < 0.7,
    }
    # slime refuses to normalize geometric weights.
    return drawn | {"tis_batch_normalize": drawn["tis_level"] != "geometric" and rng.random() < 0.5}


def flags_of(rng: Random, more: tuple[str, ...]) -> dict[str, Any]:
    """Draw flags of the loss."""
    function = rng.choice(("tis", "icepop", "mis"))
    drawn = {
        **dual(rng),
        **bounds(rng),
        **mis_settings(rng),
        "function": function,
        "advantage_estimator": rng.choice(("grpo", "ppo", "gspo", *more)),
        "use_tis": rng.random() < 0.6,
        "use_opsm": rng.random() < 0.3,
        "opsm_delta": rng.choice((1e-4, 0.01)),
        "use_kl_loss": rng.random() < 0.5,
        "kl_loss_coef": rng.choice((0.0, 0.1)),
        "kl_loss_type": rng.choice(("k1", "k2", "k3", "low_var_kl")),
        "use_unbiased_kl": rng.random() < 0.5,
        "calculate_per_token_loss": rng.random() < 0.3,
    }
    drawn["use_rollout_logprobs"] = not drawn["use_tis"] and rng.random() < 0.5
    if function == "mis":
        # The reader refuses OPSM together with MIS and a KL.
        drawn["use_opsm"] = drawn["use_opsm"] and not drawn["use_kl_loss"]
    return drawn


# The arguments of the presets `mis` and `mis_geo`.
plain_mis = draw(
    tis_upper_bound=(1.2, 2.0),
    rs_lower_bound=(0.5, 0.9),
    rs_upper_bound=(1.1, 2.0),
    rs_veto_threshold=(None, 1e-4, 0.5),
    tis_batch_normalize=(True, False),
)
geometric = draw(
    tis_upper_bound=(1.2, 2.0),
    rs_lower_bound=(0.9, 0.9999),
    rs_upper_bound=(1.0001, 1.1),
    rs_veto_threshold=(None, 1e-4, 0.5),
)


# --- differences ---

EMPTY = Declared(
    "a sample without a token counts as one token",
    "`calculate_per_token_loss` of slime and miles | counts a sample without a token as one token",
    lambda given, settings: settings["calculate_per_token_loss"] and not bool(given.mask.any(1).all()),
)
EMPTY_NORMALIZED = Declared(
    "samples without a token in the mean that normalizes",
    "at the level sequence, samples without a valid token count in the mean that normalizes",
    lambda given, settings: _uses_mis(settings) and counts_empty(given, settings),
)
FAR_KL = Declared(
    "low_var_kl is clamped after its ratio",
    "clamps at 10 after it multiplies by the ratio",
    lambda given, settings: (
        settings["use_kl_loss"]
        and settings["use_unbiased_kl"]
        and settings["kl_loss_type"] == "low_var_kl"
        and _clamped(given, given.rollout if settings["use_rollout_logprobs"] else given.old)
    ),
)
GSPO_OVER_ALL = Declared(
    "gspo's ratio next to rejected tokens",
    "takes the mean over all tokens of a sequence",
    lambda given, settings: (
        settings["advantage_estimator"] == "gspo" and _uses_mis(settings) and _rejects_tokens(settings)
    ),
)


def _rejects_tokens(settings: dict[str, Any]) -> bool:
    by_weight = settings["tis_mode"] == "mask" and settings["tis_level"] == "token"
    return bool(by_weight or (settings["use_rs"] and settings["rs_level"] == "token"))


def _uses_mis(settings: dict[str, Any]) -> bool:
    return bool(settings["use_tis"] and settings["function"] == "mis")


def counts_empty(given: Batch, settings: dict[str, Any]) -> bool:
    """Tell whether a mean over samples normalizes, and one of them has no valid token."""
    normalizes = settings.get("tis_level") == "sequence" and settings["tis_batch_normalize"]
    return bool(normalizes) and not bool(given.mask.any(1).all())


def _clamped(given: Batch, old: Tensor) -> bool:
    k = (given.ref - given.new)[given.mask].double()
    k3 = k.exp() - 1.0 - k
    return bool((torch.maximum(k3, k3 * (given.new - old)[given.mask].double().exp()) > 10.0).any())
