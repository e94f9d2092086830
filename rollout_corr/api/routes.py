"""Agreement of the routers of two engines: did the experts that sampled a token also score it?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..metrics.formulas import mean, plain
from ..metrics.rows import EACH, Metric, Over

# What is summed over a layer's choices, and what over tokens.
OF_LAYERS, OF_TOKENS = ("choices", "same", "common"), ("tokens", "tokens_same")
OF_WEIGHTS = ("gap", "same_apart")

SAME = Over("choices of the same experts", "same")
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
METRICS_OF_WEIGHTS = [
    Metric("route_weight_gap_mean", "mean total variation of the two routers' weights: half the sum of |differences| "
           "over the experts that either chose", "weight", CHOICES, "0 after a replay of weights", mean("gap")),
    Metric("route_weights_differing_fraction", "choices of the same experts in which a weight differs", "fraction",
           SAME, "0 after a replay of weights", mean("same_apart")),
]
# fmt: on


@dataclass(frozen=True, repr=False)
class RouteAgreement:
    """The sums that the agreement of two engines' routers is computed from.

    Attributes:
        layers: The number L of layers with a router.
        sums: [3 L + 2] float64, additive over batches, micro-batches and ranks: for each layer the recorded choices,
            for each layer the choices of the same experts, for each layer the summed share of common experts; then
            the tokens with every choice recorded, and the tokens with the same experts in every layer.
        weights: [2] float64, additive as well: the summed differences of the routers' weights, and the choices of the
            same experts with different weights; None if no weights were given.
    """

    layers: int
    sums: Tensor
    weights: Tensor | None = None

    def __repr__(self) -> str:
        """Name no value: reading one would wait for the device."""
        return f"RouteAgreement(layers={self.layers}, device={str(self.sums.device)!r})"

    def __add__(self, other: RouteAgreement) -> RouteAgreement:
        if self.layers != other.layers:
            raise ValueError(f"other: expected an agreement of {self.layers} layers, got one of {other.layers}")
        if self.weights is None or other.weights is None:
            if self.weights is not other.weights:
                raise ValueError("other: expected weights in both agreements or in neither")
            return RouteAgreement(self.layers, self.sums + other.sums)
        return RouteAgreement(self.layers, self.sums + other.sums, self.weights + other.weights)

    def overlap(self) -> Tensor:
        """Return the mean share of common experts by layer, [L] float64; 0 where nothing was recorded."""
        choices, _, common = self.sums[:-2].view(3, self.layers)
        return common / choices.clamp(min=1.0)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Compute the metrics of docs/metrics.md from one device-to-host copy; every key starts with `prefix`."""
        of_weights = OF_WEIGHTS if self.weights is not None else ()
        sums = (self.sums if self.weights is None else torch.cat([self.sums, self.weights])).tolist()
        values: dict[str, float] = {name: sums.pop() for name in reversed(of_weights)}
        by_layer = [sums[i * self.layers : (i + 1) * self.layers] for i in range(len(OF_LAYERS))]
        values |= {name: sum(x) for name, x in zip(OF_LAYERS, by_layer, strict=True)}
        values |= dict(zip(OF_TOKENS, sums[-len(OF_TOKENS) :], strict=True))
        choices, _, common = by_layer
        known = [(c / n, layer) for layer, (c, n) in enumerate(zip(common, choices, strict=True)) if n]
        values["overlap_min"], values["overlap_min_layer"] = min(known, default=(0.0, 0))
        return {f"{prefix}{key}": float(value) for key, value in metrics_of(values).items()}


def metrics_of(values: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics from merged sums by name."""
    rows = METRICS + (METRICS_OF_WEIGHTS if OF_WEIGHTS[0] in values else [])
    return {row.key: row.read(values) for row in rows}


def route_agreement(
    train_routes: Tensor,
    rollout_routes: Tensor,
    mask: Tensor | None = None,
    train_weights: Tensor | None = None,
    rollout_weights: Tensor | None = None,
) -> RouteAgreement:
    """Compare the experts chosen by the trainer's routers and by the rollout engine's.

    If different experts sample and score a token, its log-ratio is larger than rounding explains. The agreement counts
    such tokens by layer. Use it before routes are replayed (R3), and afterwards, when all must agree. It does not wait
    for the device.

    Args:
        train_routes: [N, L, K] or [B, T, L, K] integers: the K experts that the trainer chose for each token in each of
            L layers, in any order. A negative number marks the whole choice as not recorded.
        rollout_routes: The rollout engine's choices, shaped like `train_routes`: `routed_experts` of vLLM and SGLang,
            shifted so that each token has the choice made when its log-prob was computed.
        mask: [N] or [B, T], bool, integer or floating; nonzero tokens count. None: all tokens count.
        train_weights: The routing weights of `train_routes`, floating, same shape; None: not compared. A replay of
            routes need not replay their weights.
        rollout_weights: The routing weights of `rollout_routes`, floating, same shape.

    Returns:
        A `RouteAgreement`: add it up over micro-batches, all-reduce `sums` (and `weights`) over ranks, then read
        `metrics()`.

    Raises:
        ValueError: Shapes, dtypes or devices that do not fit together.
        TypeError: An argument that is not a tensor.
    """
    routes = {"train_routes": train_routes, "rollout_routes": rollout_routes}
    pair = {"train_weights": train_weights, "rollout_weights": rollout_weights}
    given: dict[str, Tensor | None] = {**routes, "mask": mask, **pair}
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name in routes):
            raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    shape = list(train_routes.shape)
    if len(shape) not in (3, 4) or shape[-1] == 0:
        raise ValueError(f"train_routes: expected [tokens, layers, experts] or [B, T, layers, experts], got {shape}")
    for name, x in routes.items():
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise ValueError(f"{name}: expected integer expert indices, got {str(x.dtype)[6:]}")
        if x.shape != train_routes.shape:
            raise ValueError(f"{name}: expected shape {shape} (of train_routes), got {list(x.shape)}")
    for name, x in given.items():
        if x is not None and x.device != train_routes.device:
            raise ValueError(f"{name}: expected device {train_routes.device} (of train_routes), got {x.device}")
    for name, x in pair.items():
        if (train_weights is None) != (rollout_weights is None):
            raise ValueError(f"{name}: expected the weights of both engines or of neither")
        if x is not None and (x.shape != train_routes.shape or not x.is_floating_point()):
            got = f"{str(x.dtype)[6:]} {list(x.shape)}"
            raise ValueError(f"{name}: expected floating weights of shape {shape} (of train_routes), got {got}")
    tokens = train_routes.shape[:-2]
    if mask is not None and mask.shape != tokens:
        raise ValueError(f"mask: expected shape {list(tokens)} (of the tokens of train_routes), got {list(mask.shape)}")

    recorded = (train_routes >= 0).all(-1) & (rollout_routes >= 0).all(-1)
    if mask is not None:
        recorded = recorded & (mask != 0).unsqueeze(-1)
    common = torch.zeros_like(recorded, dtype=torch.int16)
    experts = train_routes.shape[-1]
    # One expert of the engine at a time: all at once would take K times the memory of the routes.
    gap = None if train_weights is None else train_weights.double().abs().sum(-1)
    differs = torch.zeros_like(recorded)
    for k in range(experts):
        here = train_routes == rollout_routes[..., k : k + 1]
        common += here.any(-1)
        if gap is not None and train_weights is not None and rollout_weights is not None:
            ours = train_weights.double().where(here, 0.0).sum(-1)
            theirs = rollout_weights[..., k].double()
            # The trainer's own weight of this expert, 0 if it chose another, was counted in full at first.
            gap += (ours - theirs).abs() - ours.abs()
            differs |= ours != theirs
    same = recorded & (common == experts)
    over_tokens = tuple(range(len(tokens)))
    by_layer = [x.sum(over_tokens, dtype=torch.float64) for x in (recorded, same, common.where(recorded, 0))]
    by_layer[2] = by_layer[2] / experts
    whole = recorded.all(-1)
    of_tokens = torch.stack([whole.sum(dtype=torch.float64), same.all(-1).sum(dtype=torch.float64)])
    sums = torch.cat([*by_layer, of_tokens])
    if gap is None:
        return RouteAgreement(train_routes.shape[-2], sums)
    of_weights = [gap.where(recorded, 0.0).sum() / 2.0, (same & differs).sum(dtype=torch.float64)]
    return RouteAgreement(train_routes.shape[-2], sums, torch.stack(of_weights))
