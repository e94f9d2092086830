"""Stand-ins for verl's containers, which SkyRL's and others' are like."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor


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


def actor(**changed: Any) -> Settings:
    """Make an ActorConfig with its defaults."""
    clips = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    others = {"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}, "policy_loss": Settings(dro_beta=None)}
    return Settings(**clips | others | changed)
