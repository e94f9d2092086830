"""Agreement of two engines' routers on the experts: sums that add up over batches and ranks, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rollout_corr.metrics.rows import Metric, Over, mean, plain

# What is summed over a layer's choices, and what over tokens.
OF_LAYERS, OF_TOKENS = ("choices", "same", "common"), ("tokens", "tokens_same")

CHOICES, TOKENS = Over("recorded choices", "choices"), Over("tokens with every choice recorded", "tokens")

# fmt: off
METRICS = [
    Metric("route_choices", "recorded choices: of a token in a layer, by both engines", "choices", Over("-", None), "-",
           plain("choices")),
    Metric("route_overlap_mean", "mean share of the chosen experts that both engines chose", "fraction", CHOICES,
           "> 0.98", mean("common")),
    Metric("route_same_fraction", "choices of the same experts, in any order", "fraction", CHOICES, "> 0.9",
           mean("same")),
    Metric("route_tokens_same_fraction", "tokens with the same experts in every layer", "fraction", TOKENS,
           "falls with the number of layers", mean("tokens_same")),
    Metric("route_overlap_min", "`route_overlap_mean` of the layer where it is lowest", "fraction", CHOICES,
           "near the mean", plain("overlap_min")),
    Metric("route_overlap_min_layer", "that layer, from 0", "layer", CHOICES, "-", plain("overlap_min_layer")),
]
# fmt: on


@dataclass(frozen=True, repr=False)
class RouteAgreement:
    """The sums that the agreement of two engines' routers is computed from.

    Attributes:
        layers: The number L of layers with a router.
        sums: [3 L + 2] float64, additive over batches, micro-batches and ranks: by layer the recorded choices, those of
            the same experts, and the shares of experts in common; then tokens with every choice recorded, and those
            of them with the same experts in every layer.
    """

    layers: int
    sums: Tensor

    def __repr__(self) -> str:
        """Name no value: reading one would wait for the device."""
        return f"RouteAgreement(layers={self.layers}, device={str(self.sums.device)!r})"

    def __add__(self, other: RouteAgreement) -> RouteAgreement:
        if self.layers != other.layers:
            raise ValueError(f"other: expected an agreement of {self.layers} layers, got one of {other.layers}")
        return RouteAgreement(self.layers, self.sums + other.sums)

    def overlap(self) -> Tensor:
        """[L] float64: the mean share of experts in common, by layer; 0 where nothing was recorded."""
        choices, _, common = self.sums[:-2].view(3, self.layers)
        return common / choices.clamp(min=1.0)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Compute named floats from one device-to-host copy, each key behind the prefix; see docs/metrics.md."""
        sums = self.sums.tolist()
        by_layer = [sums[i * self.layers : (i + 1) * self.layers] for i in range(len(OF_LAYERS))]
        values: dict[str, float] = {name: sum(x) for name, x in zip(OF_LAYERS, by_layer, strict=True)}
        values |= dict(zip(OF_TOKENS, sums[-len(OF_TOKENS) :], strict=True))
        choices, _, common = by_layer
        known = [(c / n, layer) for layer, (c, n) in enumerate(zip(common, choices, strict=True)) if n]
        values["overlap_min"], values["overlap_min_layer"] = min(known, default=(0.0, 0))
        return {f"{prefix}{key}": float(value) for key, value in metrics_of(values).items()}


def metrics_of(values: Mapping[str, float]) -> dict[str, float]:
    """The metrics from merged sums by name."""
    return {row.key: row.read(values) for row in METRICS}
