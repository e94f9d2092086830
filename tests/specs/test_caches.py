"""Every cache in the sources is registered, and after `clear_caches` calls give the same."""

from __future__ import annotations

import ast

import torch

import rollout_corr as rc
from builders.sources import nodes, paths
from rollout_corr.metrics import schema
from rollout_corr.testing import example_batch

# Collections of modules that hold what nothing could compute again.
NO_CACHES = {
    "kernels/uploads.py:_CAPTURED": "memory that captured graphs read",
    "kernels/uploads.py:_STREAMS": "a stream for each device",
    "rollout_corr/backends/first_call.py:COMPARED": "the kinds of devices on which kernels were compared",
    "rollout_corr/eject/calls.py:CONFIG": "what a copied file was written for",
    "rollout_corr/frameworks/shared/imports.py:_waiting": "what is to be done after imports",
    "rollout_corr/frameworks/shared/preset.py:PRESETS": "a registry, filled by imports",
    "rollout_corr/frameworks/shared/preset.py:RECIPES": "a registry, filled by imports",
    "rollout_corr/frameworks/shared/preset.py:RENAMED": "a registry, filled by imports",
    "rollout_corr/frameworks/shared/settings.py:_warned": "warnings that were given",
    "rollout_corr/metrics/peers.py:_LOADED": "modules that existing statistics read",
    "rollout_corr/specs/caches.py:_CLEARED": "the list of caches itself",
    "rollout_corr/specs/correction.py:WHEN_REPORTING": "a registry, filled by imports",
}
EMPTY = ("{}", "[]", "dict()", "list()", "set()", "OrderedDict()", "WeakKeyDictionary()", "WeakValueDictionary()")


def test_caches_are_registered_or_known_as_none():
    """Functions by `specs.caches.cached`; a collection that is empty in the source is a cache by `registered({})`."""
    collections = set()
    for name, path in paths().items():
        used = set()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "functools":
                used.add(node.attr)
        assert name == "rollout_corr/specs/caches.py" or not {"lru_cache", "cache"} & used, name
        for node in nodes(path)[0].body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if ast.unparse(node.value).rpartition(".")[2] in EMPTY:
                    collections.add(f"{name}:{ast.unparse(target)}")
    assert collections == set(NO_CACHES)


def call():
    data = example_batch(seed=3)
    leaf = data.train_logp.clone().requires_grad_()
    spec = rc.Spec(
        weight=rc.Weight.token(upper=2.0), criteria=(rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1),)
    )
    layout = {"mask": data.mask, "cu_seqlens": data.cu_seqlens, "spec": spec}
    out = rc.correct(data.train_logp, data.rollout_logp, **layout)
    loss = rc.policy_loss(leaf, torch.ones_like(leaf), rollout_logp=data.rollout_logp, **layout)
    loss.value.backward()
    return [out.weights, out.keep, out.statistics.sums, loss.value.detach(), leaf.grad], [out.metrics(), loss.metrics()]


def test_calls_give_the_same_after_all_caches_are_empty():
    tensors, metrics = call()
    assert schema.layout.cache_info().currsize
    before = call()[1]
    rc.clear_caches()
    assert not schema.layout.cache_info().currsize
    again, metrics_again = call()
    assert all(torch.equal(x, y) for x, y in zip(tensors, again, strict=True))
    assert metrics == metrics_again == before


def test_results_of_before_can_be_read_after():
    data = example_batch(seed=1)
    spec = rc.Spec(weight=rc.Weight.token(upper=2.0), report=("native", "verl"))
    out = rc.correct(data.train_logp, data.rollout_logp, mask=data.mask, cu_seqlens=data.cu_seqlens, spec=spec)
    rc.clear_caches()
    assert out.metrics() and out.metrics(names="verl")
