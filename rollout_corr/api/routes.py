"""Agreement of the routers of two engines: did the experts that sampled a token also score it?"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout_corr.metrics.routes import RouteAgreement as RouteAgreement


def route_agreement(train_routes: Tensor, rollout_routes: Tensor, mask: Tensor | None = None) -> RouteAgreement:
    """Compare the experts that the trainer's routers chose with those of the rollout engine.

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
        A `RouteAgreement`: add those of micro-batches, all-reduce `sums` over ranks, then read `metrics()`.

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
