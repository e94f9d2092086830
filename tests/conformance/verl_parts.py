"""Stand-ins for verl's containers, and its whole loss under a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from conformance.batches import Batch
from conformance.rows import Result
from conformance.sources import Source


class Settings(SimpleNamespace):
    """A configuration as verl and SkyRL have it: attributes, and `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if there is none."""
        return getattr(self, name, default)


class Stranger:
    """Stands for a class that no configuration here is of."""


class Proto(SimpleNamespace):
    """As much of DataProto as the correction uses."""

    @classmethod
    def from_dict(cls, tensors: dict[str, Tensor]) -> Proto:
        """Hold tensors by name."""
        return cls(batch=dict(tensors))

    def union(self, other: Proto) -> Proto:
        """Join the tensors of two."""
        return type(self)(batch={**self.batch, **other.batch})


def actor(**changed: Any) -> Settings:
    """Make an ActorConfig with its defaults."""
    fields = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "global_batch_info": {},
        "policy_loss": Settings(dro_beta=None),
    }
    return Settings(**fields | changed)


def or_raises(call: Callable[[], Result]) -> Result:
    """Return what verl returns, or that it divides by zero."""
    try:
        return call()
    except ZeroDivisionError:
        return {"raises": "ZeroDivisionError"}


def weights_of(held: Proto | None) -> Tensor | None:
    """Return the weights that a DataProto holds."""
    return None if held is None else held.batch["rollout_is_weights"]


class Data(dict[str, Any]):
    """As much of a TensorDict as the loss uses."""

    def select(self, *names: str) -> Data:
        """Return some of the fields."""
        return Data({name: self[name] for name in names})

    def to_padded_tensor(self) -> Data:
        """Return the fields, which are padded already."""
        return self


class Metric(SimpleNamespace):
    """Stands for a metric and its aggregation, which nothing here reads."""

    MEAN = SUM = None

    @classmethod
    def from_dict(cls, found: dict[str, Any], aggregation: None) -> dict[str, Any]:
        """Return the metrics as they are."""
        return found


def whole_loss(
    source: Source, path: str, functions: dict[str, Any], correct: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Return verl's `ppo_loss` after its correction, under a whole configuration."""
    made = source.cut(
        path,
        "ppo_loss",
        no_padding_2_padding=lambda x, data: x,
        get_policy_loss_fn=lambda mode: functions[mode],
        Metric=Metric,
        AggregationType=Metric,
        TensorDict=Data,
    )

    def run(given: Batch, actor_rollout_ref: dict[str, Any], algorithm: dict[str, Any]) -> Tensor:
        block = dict(algorithm["rollout_correction"])
        bypass, loss_type = block.pop("bypass_mode"), block.pop("loss_type")
        settings = dict(actor_rollout_ref["actor"])
        policy = Settings(**settings.pop("policy_loss"))
        data = Data(
            response_mask=given.mask,
            old_log_probs=given.rollout if bypass else given.old,
            advantages=given.token_advantages,
            ref_log_prob=given.ref,
            dp_size=1,
            batch_num_tokens=given.mask.sum(),
            global_batch_size=len(given.mask),
        )
        if bypass:
            policy.loss_mode = "bypass_mode"
            policy.rollout_correction = Settings(**block, loss_type=loss_type)
        elif given.mask.any():
            found = or_raises(
                lambda: dict(
                    zip(("held", "mask"), correct(given.old, given.rollout, given.mask, **block)[:2], strict=True)
                )
            )
            if "raises" in found:
                return given.new.sum() * math.nan
            data["response_mask"] = found["mask"]
            if found["held"] is not None:
                data["rollout_is_weights"] = weights_of(found["held"])
        config = actor(**settings | {"policy_loss": policy})
        try:
            value: Tensor = made(config, {"log_probs": given.new}, data)[0]
        except ZeroDivisionError:
            return given.new.sum() * math.nan
        return value

    return run
