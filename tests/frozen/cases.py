"""What is called: presets, recipes, declared Specs and losses, labeled batches; and the arguments of each call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rollout_corr as rc
from frozen import adapter
from frozen.batches import Batch

DECLARED = Path(__file__).with_name("variants.jsonl")

# Beside declared Specs with labels: weights and criteria over tokens, products, means, prefixes, turns and ages.
LABELED = ("areal.m2po", "ctpo.cumprod", "open_instruct.vaco", "roll.segment", "skyrl.tldr", "slime.mis")
LABELED += ("verl.decoupled_seq_is_rs", "verl.decoupled_token_is", "xtuner.staleness")


@dataclass
class Case:
    """A call but for its batch.

    Attributes:
        name: "kind/name", stable over versions.
        spec: The Spec, or None for a loss without one.
        settings: Further arguments of a loss; None for a correction.
        given: The tensors that a loss gets, by the names of `Batch.tokens`.
        mass: "train" or "rollout": the kept mass is given, taken from this side.
        labeled: Labels are given.
        differentiable: A gradient is wanted.
    """

    name: str
    spec: rc.Spec | None
    settings: dict[str, Any] | None = None
    given: tuple[str, ...] = ()
    mass: str | None = None
    labeled: bool = False
    differentiable: bool = True
    traits: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.traits = _traits(self.spec)
        if self.settings is None and "new" in self.traits:
            # Criteria of the policy that trains need a loss.
            self.settings, self.given = {}, ("old", "rollout")

    @property
    def is_loss(self) -> bool:
        return self.settings is not None

    def arguments(self, batch: Batch) -> dict[str, Any]:
        """The arguments of the call, by the names of `adapter.correct` and `adapter.policy_loss`."""
        seed, tokens, traits = batch.seed, batch.tokens, self.traits
        made = {"mask": tokens["mask"], "cu_seqlens": batch.offsets}
        made["advantages"] = batch.either("advantages", seed % 2 == 1)
        if self.spec is not None:
            made["spec"] = self.spec
            if "external" in traits:
                made["external"] = {"entropy": tokens["surprise"], "surprise": tokens["surprise"]}
            if "age" in traits or "decay" in traits or seed % 5 == 1 or self.labeled:
                made["versions"] = batch.either("versions", seed % 4 == 2)
                made["current_version"] = batch.current_version
        settings = self.settings or {}
        alone = self.spec is None or self.spec.report == ("native",)
        if "turn" in traits or (seed % 6 == 2 and alone and self.spec is not None and "turns" not in settings):
            made["turns"] = batch.turns
        if "entropy" in traits or seed % 7 == 2 or _surrogate(settings) == "EntropyClip":
            made["entropy"] = tokens["entropy"]
        if "group" in traits or (_surrogate(settings) == "REAL" and "group_size" not in settings):
            made["group_index"] = batch.sequences["groups"]
        if self.mass is not None or (seed % 8 == 5 and not self.is_loss):
            made["log_mass"] = tokens["mass"]
            made["renormalized"] = "train" if self.mass == "rollout" else "rollout"
        if self.labeled:
            made |= _labels(batch)
        if not self.is_loss:
            return made | {"train_logp": tokens["old"], "rollout_logp": tokens["rollout"]}
        made |= {"new_logp": tokens["new"], **settings}
        if "group_size" in settings:
            count, most = len(batch.sequences["groups"]), settings["group_size"]
            made["group_size"] = max(size for size in range(1, most + 1) if count % size == 0)
        names = {"trains": "train_mask", "scale": "scale", "weights": "weights"}
        made |= {names.get(name, f"{name}_logp"): tokens[name] for name in self.given}
        if _surrogate(settings) in ("ClipCov", "KLCov") and seed % 2:
            made["sequence_ids"] = batch.sequences["ids"]
        if seed % 5 == 2:
            made["scale"] = tokens["scale"]
        if seed % 14 == 2:
            made["entropy_bonus"] = rc.EntropyBonus(0.01)
        return made


def _surrogate(settings: dict[str, Any]) -> str:
    return type(settings.get("surrogate")).__name__


def _labels(batch: Batch) -> dict[str, Any]:
    """Labels of sequences, of tokens, of ages, and of turns where these are given as offsets."""
    labels = {"environment": batch.sequences["label"], "kind": batch.tokens["label"]}
    names: dict[str, Any] = {"environment": ["math", "code", "chat"], "kind": 4, "age": ["new", "old", "older+"]}
    more: dict[str, Any] = {}
    if batch.turn_labels is not None:
        labels["part"], names["part"] = batch.turn_labels, 3
        more["turns"] = batch.turns
    return {"labels": labels, "label_names": names, **more}


def _traits(spec: rc.Spec | None) -> frozenset[str]:
    """What a Spec reads in addition to log-probs, from its plain data."""
    if spec is None:
        return frozenset()
    text = json.dumps(spec.to_dict())
    words = ("turn", "group", "age", "entropy", "external")
    found = {word for word in words if f'": "{word}"' in text}
    found |= {"turn"} if spec.turns else set()
    found |= {"decay"} if '"decay": ' in text else set()
    found |= {"new"} if '"new/' in text else set()
    named_entropy = '"name": "entropy"' in text and '"stat": "entropy"' not in text
    return frozenset(found - ({"entropy"} if named_entropy else set()))


def all_cases() -> Iterator[Case]:
    """Every case, in an order that names alone decide."""
    for name in sorted(rc.spec_names()):
        yield Case(f"preset/{name}", rc.spec(name))
    for name in sorted(rc.recipe_names()):
        recipe = rc.recipe(name)
        settings = adapter.settings_of_loss(recipe.loss) | adapter.settings_of_batch(recipe.batch)
        needs = tuple(need.removesuffix("_logp") for need in adapter.needs_of_recipe(name))
        yield Case(f"recipe/{name}", recipe.spec, settings, needs)
    for name in LABELED:
        yield Case(f"labels/{name}", rc.spec(name), labeled=True)
    yield Case("labels/full", rc.Spec(rc.Weight.token(upper=2.0), detail="full"), labeled=True)
    for line in DECLARED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield _variant(row) if row["kind"] == "variant" else _loss(row)


def _variant(row: dict[str, Any]) -> Case:
    """Read a declared correction."""
    spec = rc.Spec.from_dict(row["spec"])
    kind = "labels" if row.get("labeled") else "variant"
    return Case(f"{kind}/{row['name']}", spec, mass=row.get("mass"), labeled="labeled" in row)


def _loss(row: dict[str, Any]) -> Case:
    """Read a declared loss: what is compared with what, and how weights come in."""
    settings = dict(row["settings"])
    kind, fields = settings["surrogate"]
    settings["surrogate"] = getattr(rc, kind)(**fields)
    for name, build in (("kl", rc.KL), ("regularizer", rc.SquaredLogRatio), ("mean", rc.Mean)):
        if name in settings:
            settings[name] = build(**settings[name])
    if row.get("counted"):
        settings["total"] = 13.0
    given, spec = [name for name in row["given"] if name != "base"], None
    mass, replaces = row.get("mass"), row.get("weights_are_the_ratio", False)
    bypass = mass is not None or replaces
    if "base" in row["given"]:
        given.append("rollout" if bypass else "old")
    if bypass or "nonfinite" in row:
        weight = rc.Weight.token(upper=2.0) if "weights" in given else None
        spec = rc.Spec(weight, nonfinite=row.get("nonfinite", "reject"))
        given = [name for name in given if name not in ("weights", "trains")]
        given += [] if "rollout" in given else ["rollout"]
    return Case(
        f"loss/{row['name']}", spec, settings, tuple(given), mass, differentiable=row.get("differentiable", True)
    )
