"""Operations on a batch, the order in which a GPU is asked for them, and the bytes that each must move."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import rollout_corr as rc
from benchmarks.cases.batches import CASES, Batch, Case
from rollout_corr import Criterion, Spec, Weight

# verl's own defaults.
SURROGATE = rc.PPO(low=0.2, high=0.2, dual=3.0)
KEPT_TOKENS = rc.Mean(over="kept")
# What DAPO clips at, for a whole step.
STEP_SURROGATE = rc.PPO(low=0.2, high=0.28)


@dataclass(frozen=True)
class Operation:
    """A call of `correct` or of `policy_loss`.

    Args:
        name: Its name in tables.
        spec: The correction; of a loss, the one that its weights come from.
        is_loss: Whether it is `policy_loss`, forward and backward, and not `correct`.
        scheme: Names of the metrics that are read.
        surrogate: Surrogate of a loss.
        mean: Of a loss.
    """

    name: str
    spec: Spec
    is_loss: bool = False
    scheme: str = "native"
    surrogate: rc.PPO = SURROGATE
    mean: rc.Mean = KEPT_TOKENS

    @property
    def clip(self) -> tuple[float, float, float]:
        """PPO's low, high and dual, infinite where that is off."""
        dual = self.surrogate.dual
        return self.surrogate.low, self.surrogate.high, math.inf if dual is None else dual


# verl compares -D with [log 0.999, log 1.001], so the ratios that it keeps lie in [1/1.001, 1/0.999].
GEOMETRIC = Criterion(
    "ratio", over="sequence", reduce="mean", lower=1.0 / 1.001, upper=1.0 / 0.999, label="seq_mean_k1"
)
TOKEN_SPEC = Spec(weight=Weight.token(upper=2.0), criteria=(GEOMETRIC,))

METRICS = Operation("metrics only", Spec())
TOKEN = Operation("token weights, rejection", TOKEN_SPEC)
PRODUCT = Operation("product weights", Spec(weight=Weight.product(upper=2.0)))
FULL = Operation("token weights, rejection, full", Spec(TOKEN_SPEC.weight, TOKEN_SPEC.criteria, detail="full"))
XTUNER = Operation("xtuner's shipped recipe", rc.spec("xtuner.reasoning"), scheme="xtuner")
BOTH = Operation("PPO loss, forward + backward", TOKEN_SPEC, is_loss=True)

# Of the CPU benchmark.
WORKLOADS = (METRICS, replace(TOKEN, name="weights + rejection"))

# Operations by case in the order in which a GPU is asked for them: first what has a promise.
Plan = tuple[tuple[str, tuple[Operation, ...]], ...]
PLAN: Plan = (
    ("32k in 256", (TOKEN, BOTH, XTUNER)),
    ("16M", (TOKEN, BOTH, PRODUCT, METRICS)),
    ("16M, bf16", (TOKEN,)),
    # More sequences than a second axis of a grid could hold.
    ("16M in 100,000", (TOKEN, BOTH)),
    ("64M", (TOKEN,)),
    ("xtuner's pack", (XTUNER,)),
    ("SkyRL's row", (PRODUCT, BOTH)),
    ("TRL's batch", (TOKEN, BOTH)),
    ("1024 x 8192 at 25 %", (TOKEN, METRICS)),
    ("64M", (BOTH,)),
    ("1M in 1", (TOKEN, PRODUCT)),
    ("1M", (TOKEN, BOTH)),
    ("2048 x 8192, int64", (TOKEN, BOTH)),
    ("16M", (FULL,)),
    ("16M, bf16", (PRODUCT, BOTH)),
    ("16M in 100,000", (PRODUCT,)),
    ("32k in 256", (METRICS, PRODUCT)),
)
# Timed together with torch.compile by hand, which takes tens of seconds each where nothing is cached.
COMPILED: Plan = (("32k in 256", (TOKEN, BOTH)), ("16M", (TOKEN, BOTH)))


def planned(tiny: bool, cases: Sequence[str] | None = None, plan: Plan = PLAN) -> Iterator[tuple[Case, Operation]]:
    """Yield the cases and operations of a plan in order, of all cases or the named ones."""
    for name, wanted in plan:
        if cases is None or name in cases:
            case = CASES[name]
            yield from ((case.tiny() if tiny else case, operation) for operation in wanted)


def bytes_per_slot(batch: Batch, operation: Operation) -> int:
    """Bytes of one slot with each input read once and each output written once.

    Anything smaller than one number a slot is left out. Padding counts: its mask has to be read and its outputs have to
    be written.
    """
    logp = batch.old.element_size()
    mask = 0 if batch.mask is None else batch.mask.element_size()
    spec = operation.spec
    if operation.is_loss:
        # new, old and advantages; weights and a training mask; the gradient.
        return 2 * logp + 4 + mask + 4 + max(mask, 1) + logp
    written = (4 if spec.weight is not None else 0) + (max(mask, 1) if spec.criteria else 0)
    return 2 * logp + mask + written


def required_bytes(batch: Batch, operation: Operation) -> int:
    """Bytes of the whole batch, see `bytes_per_slot`."""
    return batch.slots * bytes_per_slot(batch, operation)


def log_bounds(criterion: Criterion) -> tuple[float, float]:
    """Return a ratio criterion's bounds in log space."""
    low = -math.inf if not criterion.lower else math.log(criterion.lower)
    return low, math.inf if criterion.upper is None else math.log(criterion.upper)


# What verl's compute_rollout_correction_and_rejection_mask is given for a spec, and the preset of the same name as its
# classmethod, whose metrics are verl's.
IN_VERL: Mapping[Spec, tuple[Mapping[str, object], str]] = {
    METRICS.spec: ({"rollout_is": None, "rollout_rs": None}, "verl.disabled"),
    TOKEN.spec: (
        {
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_rs": "seq_mean_k1",
            "rollout_rs_threshold": "0.999_1.001",
        },
        "verl.decoupled_geo_rs_token_tis",
    ),
}
