"""A random call of `correct` or `policy_loss`, and a record of what it answers."""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import rollout_corr as rc

from .generator import Drawn, needs_of, random_batch
from .runners import on_ranks

# By name what a call answered: text, or the numbers of a vector by their names.
Record = dict[str, Any]

# Elements from which on a tensor is written as a digest.
LARGE = 4096


@dataclass
class Call:
    """A call, ready to be made by any backend.

    Attributes:
        drawn: Its tensors.
        spec: None: a loss without one.
        loss: None: a call of `correct`.
        mode: Of a loss, the log-probs that it is given: "decoupled", "bypass", "both" (a surrogate of new/rollout that
            is given old_logp too) or "on-policy".
        correction: What a loss without a Spec is given in its place: "nothing", "factors", "mask" or "correction".
        given: Further fields of the Batch, which a loss alone reads.
        into: Weights and mask are written to tensors of the caller.
        ranks: The groups of ranks that the call is spread over, where it is.
        place: Puts what is made when the call is made where its tensors are.
    """

    drawn: Drawn
    spec: rc.Spec | None
    loss: rc.Loss | None = None
    mode: str = "decoupled"
    correction: str = "nothing"
    given: dict[str, Any] = field(default_factory=dict)
    into: bool = False
    ranks: rc.Ranks | None = None
    place: Callable[[Any], Any] = lambda x: x

    def digest(self) -> str:
        """Tell calls apart: a digest of everything that this one is given."""
        parts = [repr(self.spec), repr(self.loss), self.mode, self.correction, str(self.into)]
        for name, x in (self.drawn.tensors | self.drawn.batch | self.given).items():
            parts.append(f"{name} {_described(x)}")
        return digest_of(parts)

    def run(self, backend: str) -> Record:
        """Make the call."""
        return self._correct(backend) if self.loss is None else self._policy_loss(backend, self.loss)

    def _batch(self, **more: Any) -> rc.Batch:
        return rc.Batch(**(self.drawn.batch | more), **({} if self.ranks is None else {"ranks": self.ranks}))

    def _correct(self, backend: str) -> Record:
        assert self.spec is not None
        out = self.corrected(self.spec, backend)
        record = {"weights": shown(out.weights), "mask is the given": out.mask is self.drawn.batch.get("mask")}
        return record | _of_both(out) | _numbers(out, self.spec, self.drawn.batch)

    def corrected(self, spec: rc.Spec, backend: str) -> rc.Correction:
        """Correct its log-probs."""
        tensors = self.drawn.tensors
        train, rollout, advantages = tensors["train"], tensors["rollout"], tensors["advantages"]
        out = self._outputs(spec) if self.into else None
        return rc.correct(train, rollout, self._batch(), spec=spec, advantages=advantages, out=out, backend=backend)

    def _outputs(self, spec: rc.Spec) -> rc.Outputs:
        """Tensors full of garbage for what the Spec hands back."""
        shape, mask = self.drawn.laid.shape, self.drawn.batch.get("mask")
        weights = torch.full(shape, math.nan, dtype=self.drawn.computes) if spec.returns_weights else None
        kind = torch.bool if mask is None else mask.dtype
        return rc.Outputs(weights, torch.ones(shape, dtype=kind) if spec.edits_mask else None)

    def lost(self, backend: str, loss: rc.Loss) -> tuple[rc.PolicyLoss, Any, Any]:
        """Make the call of a loss; give its result, and the leaves that have a gradient: new_logp, entropy or None."""
        tensors, batch, more = self.drawn.tensors, self.drawn.batch, dict(self.given)
        new = _leaves(tensors["new"])
        entropy = _leaves(batch["entropy"]) if loss.entropy_bonus is not None else None
        if entropy is not None:
            more["entropy"] = entropy
        arguments: dict[str, Any] = {}
        if self.mode in ("decoupled", "both"):
            arguments["old_logp"] = tensors["train"]
        if self.mode in ("bypass", "both") or self.spec is not None:
            arguments["rollout_logp"] = tensors["rollout"]
        if loss.kl is not None:
            arguments["ref_logp"] = tensors["ref"]
        if self.spec is not None:
            arguments["spec"] = self.spec
        elif self.correction == "correction":
            arguments["correction"] = self.corrected(rc.Spec(rc.Weight.token(upper=2.0)), backend)
        elif self.correction != "nothing":
            weights = self.place(self.drawn.column("weights")) if self.correction == "factors" else None
            trains = self.place(self.drawn.laid.tensor(self.drawn.laid.tokens.columns["trains"], torch.int64, 1.0))
            arguments["correction"] = rc.Factors(weights=weights, mask=trains)
        out = rc.policy_loss(new, tensors["advantages"], self._batch(**more), loss, backend=backend, **arguments)
        return out, new, entropy

    def _policy_loss(self, backend: str, loss: rc.Loss) -> Record:
        out, new, entropy = self.lost(backend, loss)
        rows = [*_rows(new), *(() if entropy is None else _rows(entropy))]
        slopes = torch.autograd.grad(out.value, rows, allow_unused=True) if rows else ()
        record = {"value": shown(out.value.detach()), "gradient": shown(list(slopes)), "weights": shown(out.weights)}
        return record | _of_both(out) | _numbers(out, self.spec, self.drawn.batch)


def answer(call: Call | CallOfRanks, backend: str) -> Record:
    """Make a call; of one that is refused, record the argument that the error names."""
    try:
        return call.run(backend)
    except (TypeError, ValueError) as error:
        return {"refused": f"{type(error).__name__} {str(error).partition(':')[0]:.60}"}


@dataclass
class CallOfRanks:
    """A call that several ranks make together, each with its part of the tokens.

    `group` names the field of `rc.Ranks`: "sequence", whose tokens lie on all of them, or "batch".
    """

    calls: list[Call]
    group: str

    def digest(self) -> str:
        """Tell calls apart by what every rank is given."""
        return digest_of([self.group, *(call.digest() for call in self.calls)])

    def run(self, backend: str) -> Record:
        """Make the call of every rank at once."""

        def of_rank(rank: int, member: Any) -> Record:
            call = self.calls[rank]
            call.ranks = rc.Ranks(**{self.group: member})
            return call.run(backend)

        found = on_ranks(len(self.calls), of_rank)
        return {f"{name}{OF_RANK}{rank}": x for rank, record in enumerate(found) for name, x in record.items()}


OF_RANK = " of rank "


def _of_both(out: Any) -> Record:
    return {"mask": shown(out.mask), "keep": shown(out.keep), "keep_turns": shown(out.keep_turns)}


def _numbers(out: Any, spec: rc.Spec | None, batch: dict[str, Any]) -> Record:
    """Statistics, and metrics under every name that was asked for."""
    found = {"statistics": _in_hex(out.metrics_async().values()), "metrics": _in_hex(out.metrics())}
    if spec is not None:
        found |= {f"metrics of {name}": _in_hex(out.metrics(name)) for name in spec.report if name != "native"}
        found |= {f"metrics by {name}": _in_hex(out.metrics(by=name)) for name in batch.get("labels", ())}
    return found


def _leaves(x: Any) -> Any:
    if isinstance(x, list):
        return [row.clone().requires_grad_() for row in x]
    # A clone of a slice would lie otherwise.
    return x.detach().clone().requires_grad_() if x.is_nested else x.detach().requires_grad_()


def _rows(x: Any) -> list[Tensor]:
    return x if isinstance(x, list) else [x]


# --- text ---


def digest_of(parts: Iterable[str]) -> str:
    """Sixteen hexadecimal digits of texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def shown(x: Any) -> str | None:
    """Tensors as dtype, shape and bytes; every NaN is the same one, and 0.0 and -0.0 are not."""
    if x is None:
        return None
    if isinstance(x, (list, tuple)):
        return " | ".join(str(shown(row)) for row in x)
    if x.is_nested:
        return f"jagged {shown(x.values())}"
    kind, shape = str(x.dtype).removeprefix("torch."), "x".join(map(str, x.shape))
    if x.is_floating_point():
        x = torch.where(x.isnan(), math.nan, x)
    # A tensor of one element is contiguous whatever its stride.
    row = x.new_empty(x.numel()).copy_(x.reshape(-1))
    of_bytes = row.view(torch.uint8).cpu().numpy().tobytes()
    if x.numel() > LARGE:
        return f"{kind} {shape} sha256 {hashlib.sha256(of_bytes).hexdigest()}"
    return f"{kind} {shape} {of_bytes.hex()}"


def _described(x: Any) -> str:
    """An argument: its tensors with their strides, whatever holds them."""
    if isinstance(x, Tensor) and not x.is_nested:
        return f"{x.stride()} {shown(x)}"
    if isinstance(x, Tensor) or (isinstance(x, list) and all(isinstance(row, Tensor) for row in x)):
        return str(shown(x))
    if isinstance(x, dict):
        return " ".join(f"{name} {_described(value)}" for name, value in x.items())
    fields = getattr(x, "__dataclass_fields__", None) or getattr(x, "_fields", None)
    if fields is not None:
        return " ".join(f"{name} {_described(getattr(x, name))}" for name in fields)
    return repr(x)


def _in_hex(numbers: dict[str, float]) -> dict[str, str]:
    return {name: struct.pack(">d", math.nan if x != x else x).hex() for name, x in numbers.items()}


# --- what is the same on every machine ---


def is_count(name: str) -> bool:
    """Tell whether a statistic is a number of tokens or units."""
    if name in ("clip_low", "clip_high", "clip_dual", "loss_valid_tokens", "loss_valid_sequences"):
        return True
    name = name.removeprefix("loss_")
    return name.startswith(("tokens", "sequences", "histogram_")) or name.endswith(("/tokens", "/sequences", "/units"))


def exact(record: Record) -> Record:
    """Masks, decisions and counts of a record, without what an exponential is in."""
    found: Record = {}
    for name, x in record.items():
        quantity = name.partition(OF_RANK)[0]
        if quantity in ("refused", "mask", "keep", "keep_turns"):
            found[name] = x
        elif quantity == "statistics":
            found[name.replace("statistics", "counts")] = {key: count for key, count in x.items() if is_count(key)}
    return found


# --- drawing ---


def correct_call(rng: random.Random, spec: rc.Spec, **of_batch: Any) -> Call:
    """A call of `correct` for a Spec; `of_batch` are arguments of `random_batch`."""
    drawn = random_batch(rng, needs_of(spec), **of_batch)
    return Call(drawn, spec, into=drawn.laid.layout.kind not in ("list", "jagged") and rng.random() < 0.15)


def loss_call(
    rng: random.Random, loss: rc.Loss, spec: rc.Spec | None, mode: str | None = None, **of_batch: Any
) -> Call:
    """A call of `policy_loss` for a Loss, with a Spec or without; None: any mode that goes with them."""
    if mode is None:
        of_new = spec is not None and any(criterion.of == "new/old" for criterion in spec.criteria)
        mode = rng.choice(("decoupled", "decoupled", "both" if of_new else "bypass"))
        if spec is None and rng.random() < 0.1:
            mode = "on-policy"
        if loss.surrogate.of is not None:
            mode = "both"
    correction = rng.choice(("nothing", "factors", "correction", "mask"))
    if mode != "decoupled" and correction != "nothing":
        correction = "mask"
    drawn = random_batch(rng, needs_of(spec, loss), **of_batch)
    call = Call(drawn, spec, loss, mode, "nothing" if spec is not None else correction)
    tokens = drawn.laid.tokens
    if rng.random() < 0.15:
        scale = torch.tensor(tokens.of_sequences["scale"], dtype=torch.float64).to(drawn.computes)
        per_token = rng.random() < 0.5 or len(tokens.lengths) == sum(tokens.lengths)
        call.given["scale"] = drawn.column("scale") if per_token else scale
    if loss.mean.of != "sum" and loss.mean.over == "original" and rng.random() < 0.2:
        call.given["total"] = rng.choice((13.0, torch.tensor(41.0)))
    return call
