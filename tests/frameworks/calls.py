"""Every drop-in called in one way: on padded log-probs and settings of its framework, for weights, mask and metrics."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace

import torch

import rollout_corr as rc
from rollout_corr.frameworks.slime.config import MIS

ROLLOUT = -torch.rand(4, 60, generator=torch.Generator().manual_seed(0)) - 0.1
TRAIN = ROLLOUT.roll(1, 1)  # the bug that the doctor is to find in what was dumped
MASK = torch.ones(4, 60)


def batch(dtype=torch.float32, mask_dtype=torch.float32):
    """Rows with holes, one of them empty."""
    made = torch.Generator().manual_seed(3)
    rollout = torch.rand(6, 9, generator=made).log()
    train = rollout + 0.2 * torch.randn(6, 9, generator=made)
    mask = torch.rand(6, 9, generator=made) < 0.7
    mask[4] = False
    return train.to(dtype), rollout.to(dtype), mask.to(mask_dtype)


class DataProto(SimpleNamespace):
    """As much of verl's as the drop-in uses: tensors by name."""

    @classmethod
    def from_dict(cls, tensors):
        return cls(batch=dict(tensors))

    def union(self, other):
        return type(self)(batch={**self.batch, **other.batch})


def by_verl(dropin, train, settings=None, rollout=ROLLOUT, mask=MASK, **switches):
    given = train, rollout, mask
    proto, mask, metrics = dropin.compute_rollout_correction_and_rejection_mask(*given, **settings or {}, **switches)
    return proto and proto.batch["rollout_is_weights"], mask, metrics


def by_verl_metrics(dropin, train, **switches):
    return None, MASK, dropin.compute_rollout_corr_metrics_from_logprobs(train, ROLLOUT, MASK, **switches)


def by_trl(dropin, train, settings=None, rollout=ROLLOUT, mask=MASK, **switches):
    return dropin.importance_sampling_ratio(train, rollout, mask, **settings or {}, **switches), mask, {}


def by_async_trl(dropin, train, **switches):
    segments = torch.arange(4).repeat_interleave(60)
    packed = train.reshape(-1), ROLLOUT.reshape(-1), torch.ones(240), segments, MASK.reshape(-1)
    function = import_module("rollout_corr.frameworks.trl.asynchronous").packed_policy_loss
    function(*packed, tokens=240.0, **{"spec": rc.Spec(), **switches})
    return None, MASK, {}


def by_skyrl(dropin, train, settings=None, rollout=ROLLOUT, mask=MASK, **switches):
    config = SimpleNamespace(**{"tis_ratio_type": "token"} if settings is None else settings)
    weights, metrics, mask = dropin.compute_off_policy_correction(train, rollout, mask, config, **switches)
    return weights, mask, metrics


def by_xtuner(dropin, train, settings=None, rollout=ROLLOUT, mask=MASK, **switches):
    rows, width = train.shape
    packed = [x if x is None else x.reshape(1, -1) for x in (train, rollout)]
    function = dropin.compute_rollout_importance_weights_and_metrics
    config, lengths = SimpleNamespace(**settings or {}), [width] * rows
    weights, mask, metrics, more = function(config, *packed, lengths, mask.reshape(1, -1), **switches)
    return None if weights is None else weights.view(rows, width), mask.view(rows, width), metrics | more


def by_areal(dropin, train, settings=None, rollout=ROLLOUT, mask=MASK, **switches):
    fields = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}
    config = SimpleNamespace(**fields | (settings or {}))
    found = dropin.apply_rejection_sampling(train, rollout, mask, None, config, **switches)
    return found.behave_imp_weight, found.loss_mask, {"filtered": found.filtered_fraction}


def by_openrlhf(dropin, train, settings=None, spec=None, **switches):
    spec = spec or (rc.Spec(weight=rc.Weight.token(upper=2.0)) if settings is None else None)
    fields = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": None, "policy_loss_type": "ppo"}
    loss = SimpleNamespace(token_level_loss=True, **fields, **settings or {})
    new = train.clone().requires_grad_()

    def theirs(*given):
        return 0.0, "clip_ratio", "ppo_kl", None, None

    given = loss, new, train, torch.ones(4, 60), MASK, ROLLOUT
    _, _, _, *logged = dropin.replaced(theirs, spec, **switches)(*given)
    return (
        None,
        MASK,
        {} if spec is None else dict(zip(("vllm_kl", "is_filter_ratio"), map(float, logged), strict=True)),
    )


def by_slime(dropin, train, settings=None, **switches):
    flags = {**dict.fromkeys(MIS), "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token"}
    flags |= {"tis_mode": "truncate", "tis_upper_bound": 2.0, "tis_batch_normalize": True} | (settings or {})
    given = {"pg_loss": TRAIN.reshape(-1), "train_log_probs": [*train], "rollout_log_probs": [*ROLLOUT]}
    import_module("rollout_corr.frameworks.slime.functions").mis(SimpleNamespace(**flags), **given, loss_masks=[*MASK])
    return None, MASK, {}


CALLS = {
    "verl": by_verl,
    "verl, metrics": by_verl_metrics,
    "trl": by_trl,
    "trl, asynchronous": by_async_trl,
    "skyrl": by_skyrl,
    "xtuner": by_xtuner,
    "areal": by_areal,
    "openrlhf": by_openrlhf,
    "slime": by_slime,
}


def drop_in_of(name):
    module = "functions" if name == "slime" else "dropin"
    return import_module(f"rollout_corr.frameworks.{name.partition(',')[0]}.{module}")


def put(targets, function_of, monkeypatch):
    """Put modules there that hold the functions of a drop-in's targets: the holder, the name and the function of each.

    `function_of` makes the function of a target; a method takes `self`.
    """
    found = {}
    for target in targets:
        module = sys.modules.get(target.module) or ModuleType(target.module)
        monkeypatch.setitem(sys.modules, target.module, module)
        owner, _, name = target.name.rpartition(".")
        if owner:
            vars(module).setdefault(owner, type(owner, (), {}))
        holder, function = getattr(module, owner) if owner else module, function_of(target)
        method = not owner or "self" in function.__code__.co_varnames[: function.__code__.co_argcount]
        setattr(holder, name, function if method else staticmethod(function))
        found[target.path] = holder, name, function
    return found
