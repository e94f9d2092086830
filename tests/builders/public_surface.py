"""The surface that users may rely on, as text: public names and parameters, keys of metrics, columns, operators.

`PYTHONPATH=tests python -m builders.public_surface` writes it to tests/package/public_surface.json, whose differences a
reviewer reads. docs/maintaining.md has the rule.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import tempfile
from pathlib import Path

import torch

import rollout_corr as rc

FILE = Path(__file__).resolve().parents[1] / "package" / "public_surface.json"
TRAIN, ROLLOUT = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
OFFSETS = torch.tensor([0, 2, 3])
# With everything that has metrics of its own: every way to weigh has the same keys.
SPEC = rc.Spec(
    rc.Weight("token", upper=2.0),
    (rc.Criterion("k1", over="sequence", reduce="mean", upper=1.0), rc.Criterion("abs", upper=3.0)),
)

LABELS = {"labels": {"environment": torch.tensor([0, 1])}, "label_names": {"environment": ["a", "b"]}}
# What adds metrics of its own to those of SPEC.
GIVEN = {
    "detail='full'": {"spec": dataclasses.replace(SPEC, detail="full")},
    "turns": {
        "spec": dataclasses.replace(SPEC, criteria=(rc.Criterion("k1", over="turn", reduce="mean", upper=1.0),)),
        "turns": torch.tensor([0, 1, 2, 3]),
    },
    "prefixes": {
        "spec": rc.Spec(
            rc.Weight("prefix", reduce="sum", upper=2.0), (rc.Criterion("k1", over="prefix", reduce="sum", upper=3.0),)
        )
    },
    "versions": {"versions": torch.tensor([7, 6]), "current_version": 7},
}


def surface():
    """Everything, sorted."""
    return {
        "names": {name: described(getattr(rc, name)) for name in sorted(rc.__all__)},
        "operators": operators(),
        "metrics": metrics(),
        "dump": dumped(),
    }


def described(x):
    """A function as its parameters, a class as its fields and public members, else its kind."""
    if inspect.isfunction(x):
        return parameters(x)
    if not inspect.isclass(x):
        return type(x).__name__
    if dataclasses.is_dataclass(x):
        made = [f"{field.name}{'' if required(field) else ' = ...'}" for field in dataclasses.fields(x) if field.init]
    else:
        made = list(getattr(x, "_fields", ()))
    members = [name for name in dir(x) if not name.startswith("_") and name not in ("count", "index")]
    return {"made of": [name for name in made if not name.startswith("_")], "members": members}


def parameters(function):
    """Name the parameters, with defaults, and where those that need a keyword begin."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is parameter.empty else f" = {shown(parameter.default)}"
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        by_keyword = ", by keyword" if parameter.kind == parameter.KEYWORD_ONLY else ""
        found.append(f"{star}{parameter.name}{default}{by_keyword}")
    return found


def shown(value):
    """Write a default so that it does not depend on the version of Python."""
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def required(field):
    """Tell whether a field of a dataclass has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def operators():
    """Schemas of the operators of torch."""
    names = ("correct", "policy_loss", "scale_gradient")
    return [str(getattr(torch.ops.rollout_corr, name).default._schema) for name in names]


def metrics():
    """Keys by who reports them; those of a loss without those of its correction."""
    found = {}
    for scheme in ("native", "verl", "skyrl", "xtuner"):
        spec = dataclasses.replace(SPEC, report=tuple(dict.fromkeys(("native", scheme))))
        keys = correct(spec).metrics()
        found[scheme] = sorted(set(keys) - set(found.get("native", ())))
    for name, given in GIVEN.items():
        keys = rc.correct(TRAIN, ROLLOUT, **{"cu_seqlens": OFFSETS, "spec": SPEC, **given}).metrics()
        found[name] = sorted(set(keys) - set(found["native"]))
    labelled = rc.correct(TRAIN, ROLLOUT, cu_seqlens=OFFSETS, spec=SPEC, **LABELS)
    found["labels"] = sorted(set(labelled.metrics()) - set(found["native"]))
    found["metrics(by=...)"] = sorted(
        key for key in labelled.metrics(by="environment") if key.startswith("environment/a/")
    )
    new = TRAIN.clone().requires_grad_()
    loss = rc.policy_loss(
        new,
        torch.ones(2),
        cu_seqlens=OFFSETS,
        old_logp=TRAIN,
        correction=correct(SPEC),
        surrogate=rc.PPO(0.2),
        kl=rc.KL("k3", coef=0.1),
        ref_logp=ROLLOUT,
    )
    found["policy_loss"] = sorted(loss.metrics())
    return found


def correct(spec):
    """Correct the batch of this file."""
    return rc.correct(TRAIN, ROLLOUT, cu_seqlens=OFFSETS, spec=spec)


def dumped():
    """Columns of a line of a .jsonl file and of a shard of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"cu_seqlens": OFFSETS, "step": 1, "sequences": None, "token_ids": torch.tensor([5, 6, 7])}
        given |= {"turns": torch.tensor([0, 0, 1]), "versions": torch.tensor([7, 6])}
        for path in (Path(folder, "x.jsonl"), Path(folder, "shards")):
            rc.dump(path, TRAIN, ROLLOUT, mask=torch.tensor([True, True, False]), **given).result(60)
        line = json.loads(Path(folder, "x.jsonl").read_text(encoding="utf-8").splitlines()[0])
        (shard,) = Path(folder, "shards").glob("*.pt")
        return {"jsonl": sorted(line), "pt": sorted(torch.load(shard, weights_only=True))}


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
