"""Agreement of the routers of two engines: did the experts that sampled a token also score it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..metrics.rows import EACH, Metric, Over, mean, plain

# What is summed over a layer's choices, and what over tokens.
OF_LAYERS, OF_TOKENS = ("choices", "same", "common"), ("tokens", "tokens_same")

CHOICES, TOKENS = Over("recorded choices", "choices"), Over("tokens with every choice recorded", "tokens")

# fmt: off
METRICS = [
    Metric("route_choices", "recorded choices: of a token in a layer, by both engines", "choices", EACH, "-",
           plain("choices")),
    Metric("route_overlap_mean", "mean share of the chosen experts that both engines chose", "fraction", CHOICES,
           "> 0.98", mean("common")),
    Metric("route_same_fraction", "choices of the same experts, in any order", "fraction", CHOICES, "> 0.9",
           mean("same")),
    Metric("route_tokens_same_fraction", "tokens with the same experts in every layer", "fraction", TOKENS,
           "falls with the number of layers", mean("tokens_same")),
    Metric("route_layer_overlap_min", "`route_overlap_mean` of the layer where it is lowest", "fraction", CHOICES,
           "near the mean", plain("overlap_min")),
    Metric("route_layer_overlap_argmin", "that layer, from 0", "layer", CHOICES, "-", plain("overlap_min_layer")),
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


def route_agreement(train_routes: Tensor, rollout_routes: Tensor, mask: Tensor | None = None) -> RouteAgreement:
    """Compare the experts chosen by the trainer's routers and by the rollout engine's.

    A token that other experts score than those that sampled it gets a log-ratio that no rounding explains. This says
    how many there are, by layer: before the routes are replayed (R3), and afterwards, where all have to agree. It does
    not wait for the device.

    Args:
        train_routes: [N, L, K] or [B, T, L, K] integers: the K experts of each token in each of L layers, in any order;
            a negative number anywhere in a choice says that it was not recorded.
        rollout_routes: As `train_routes`, from the rollout engine: `routed_experts` of vLLM and SGLang, shifted to the
            tokens that the log-probs are of.
        mask: [N] or [B, T], bool, integer or floating; nonzero tokens count. None: all do.

    Returns:
        A `RouteAgreement`: add it up over micro-batches, all-reduce `sums` over ranks, then read `metrics()`.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        TypeError: An argument that is not a tensor.
    """
    for name, x in (("train_routes", train_routes), ("rollout_routes", rollout_routes), ("mask", mask)):
        if not isinstance(x, Tensor) and (x is not None or name != "mask"):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    shape = list(train_routes.shape)
    if len(shape) not in (3, 4) or shape[-1] == 0:
        raise ValueError(f"train_routes: expected [tokens, layers, experts] or [B, T, layers, experts], got {shape}")
    for name, x in (("train_routes", train_routes), ("rollout_routes", rollout_routes)):
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(f"{name}: expected the numbers of experts as integers, got {str(x.dtype)[6:]}")
        if x.shape != train_routes.shape:
            raise ValueError(f"{name}: expected shape {shape} (of train_routes), got {list(x.shape)}")
    for name, x in (("rollout_routes", rollout_routes), ("mask", mask)):
        if x is not None and x.device != train_routes.device:
            raise ValueError(f"{name}: expected device {train_routes.device} (of train_routes), got {x.device}")
    tokens = train_routes.shape[:-2]
    if mask is not None and mask.shape != tokens:
        raise ValueError(f"mask: expected shape {list(tokens)} (of the tokens of train_routes), got {list(mask.shape)}")

    recorded = (train_routes >= 0).all(-1) & (rollout_routes >= 0).all(-1)
    if mask is not None:
        recorded = recorded & (mask != 0).unsqueeze(-1)
    common = torch.zeros_like(recorded, dtype=torch.int16)
    experts = train_routes.shape[-1]
    # One expert of the engine at a time: all at once would take K times the memory of the routes.
    for k in range(experts):
        common += (train_routes == rollout_routes[..., k : k + 1]).any(-1)
    same = recorded & (common == experts)
    over_tokens = tuple(range(len(tokens)))
    by_layer = [x.sum(over_tokens, dtype=torch.float64) for x in (recorded, same, common.where(recorded, 0))]
    by_layer[2] = by_layer[2] / experts
    whole = recorded.all(-1)
    of_tokens = torch.stack([whole.sum(dtype=torch.float64), same.all(-1).sum(dtype=torch.float64)])
    return RouteAgreement(train_routes.shape[-2], torch.cat([*by_layer, of_tokens]))
