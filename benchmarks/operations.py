"""What is done to a batch, and the bytes that it cannot do without."""

from __future__ import annotations

import math
from dataclasses import dataclass

import rollout_corr as rc
from benchmarks.batches import Batch
from benchmarks.cases import GEOMETRIC
from rollout_corr import Spec, Weight

# verl's own defaults.
SURROGATE = rc.PPO(low=0.2, high=0.2, dual=3.0)


@dataclass(frozen=True)
class Operation:
    """A call.

    Args:
        name: What tables call it.
        spec: The correction; of a loss the one that its weights come from.
        part: "" for `correct`; of `policy_loss` "forward" (with the gradient wanted), "backward" or "both".
        scheme: Whose metrics are read.
        fused: A loss that corrects in the same call.
        surrogate: Of a loss.
        denominator: Of a loss that is not fused; a fused one is a plain sum, as SkyRL's is.
    """

    name: str
    spec: Spec
    part: str = ""
    scheme: str = "native"
    fused: bool = False
    surrogate: rc.PPO = SURROGATE
    denominator: str = "kept"

    @property
    def clip(self) -> tuple[float, float, float]:
        """PPO's low, high and dual, infinite where that is off."""
        dual = self.surrogate.dual
        return self.surrogate.low, self.surrogate.high, math.inf if dual is None else dual


TOKEN_SPEC = Spec(weight=Weight("token", upper=2.0), criteria=(GEOMETRIC,))

METRICS = Operation("metrics only", Spec())
TOKEN = Operation("token weights, rejection", TOKEN_SPEC)
PRODUCT = Operation("product weights", Spec(weight=Weight("product", upper=2.0)))
FULL = Operation("token weights, rejection, full", Spec(TOKEN_SPEC.weight, TOKEN_SPEC.criteria, detail="full"))
XTUNER = Operation("xtuner's shipped recipe", rc.preset("xtuner.reasoning"), scheme="xtuner")
SKYRL = Operation("SkyRL's recommended recipe", rc.preset("skyrl.tldr"), scheme="skyrl")
TRL = Operation("TRL's default correction", rc.preset("trl.default"))
FORWARD = Operation("PPO loss, forward", TOKEN_SPEC, "forward")
BACKWARD = Operation("PPO loss, backward", TOKEN_SPEC, "backward")
BOTH = Operation("PPO loss, forward + backward", TOKEN_SPEC, "both")
SKYRL_STEP = Operation("SkyRL's step, forward + backward", SKYRL.spec, "both", "skyrl", fused=True)
# Of xtuner and of TRL the correction happens once for a whole batch, and their loss is given its results.
XTUNER_LOSS = Operation("xtuner's loss, forward + backward", XTUNER.spec, "both")
TRL_LOSS = Operation(
    "TRL's loss, forward + backward", TRL.spec, "both", surrogate=rc.PPO(0.2, 0.2), denominator="original"
)
OPERATIONS = (
    METRICS, TOKEN, PRODUCT, FULL, XTUNER, SKYRL, TRL, FORWARD, BACKWARD, BOTH, SKYRL_STEP, XTUNER_LOSS, TRL_LOSS
)  # fmt: skip

# What is done to which case, in the order in which it is measured: what was promised stands first.
Plan = tuple[tuple[str, tuple[Operation, ...]], ...]
PLAN: Plan = (
    ("32k in 256", (TOKEN, BOTH, XTUNER)),
    ("16M", (TOKEN, BOTH, PRODUCT, METRICS)),
    ("16M, bf16", (TOKEN,)),
    ("16M in 100,000", (TOKEN,)),
    ("64M", (TOKEN,)),
    ("xtuner's pack", (XTUNER, XTUNER_LOSS)),
    ("SkyRL's row", (SKYRL, SKYRL_STEP)),
    ("TRL's batch", (TRL, TRL_LOSS)),
    ("1024 x 8192 at 25 %", (TOKEN, METRICS)),
    ("64M", (BOTH,)),
    ("1M in 1", (TOKEN, PRODUCT)),
    ("1M", (TOKEN, BOTH)),
    ("2048 x 8192, int64", (TOKEN, BOTH)),
    ("16M", (FORWARD, BACKWARD, FULL)),
    ("16M, bf16", (PRODUCT, BOTH)),
    ("16M in 100,000", (PRODUCT,)),
    ("32k in 256", (METRICS, PRODUCT, FORWARD, BACKWARD)),
)
# What our reference is compiled for, which takes tens of seconds each where nothing is cached: what was promised first.
TRACED: Plan = (("32k in 256", (TOKEN, BOTH)), ("16M", (TOKEN, BOTH)))


def bytes_per_slot(batch: Batch, operation: Operation) -> int:
    """Each input read once, each output written once, of one slot.

    What is smaller than one number a slot is left out. Padding counts: its mask has to be read, and its outputs have
    to be written. A backward of its own reads the gradient that the forward left, and writes it scaled.
    """
    logp = batch.old.element_size()
    mask = 0 if batch.mask is None else batch.mask.element_size()
    spec = operation.spec
    if operation.part == "backward":
        return 2 * logp
    if operation.part:
        # new, old and advantages; weights and a training mask if they are given, or the engine's log-probs.
        read = 2 * logp + 4 + mask + (logp if operation.fused else 4 + max(mask, 1))
        return read + (logp if operation.part == "both" else 0)
    written = (4 if spec.weight is not None else 0) + (max(mask, 1) if spec.criteria else 0)
    return 2 * logp + mask + written


def required_bytes(batch: Batch, operation: Operation) -> int:
    """Of the whole batch."""
    return batch.slots * bytes_per_slot(batch, operation)
