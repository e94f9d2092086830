"""Every case by its key: presets, recipes, declared variants, random Specs and Losses, large batches, several ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

import rollout_corr as rc

from .calls import Call, CallOfRanks, correct_call, loss_call
from .generator import SURROGATES, Layout, random_loss, random_spec

Draw = Callable[[], Call | CallOfRanks]

# Random Specs, Losses of each surrogate, those of log-ratios beyond every clamp, calls of several ranks.
SPECS, LOSSES, FAR, OF_RANKS = 400, 20, 6, 120


def every() -> Iterator[tuple[str, Draw]]:
    """All cases but those of large batches and of several ranks: keys, and what draws their calls."""
    for name in rc.spec_names():
        for i in range(2):
            yield f"preset/{name}/{i}", partial(_preset, name, i)
    for name in rc.recipe_names():
        for i in range(2):
            yield f"recipe/{name}/{i}", partial(_recipe, name, i)
    yield from _declared()
    for i in range(SPECS):
        yield f"spec/{i}", partial(_spec, i)
    for name in SURROGATES:
        for i in range(LOSSES):
            yield f"loss/{name}/{i}", partial(_loss, name, i)
    for name in SURROGATES:
        for i in range(FAR):
            yield f"far/{name}/{i}", partial(_far, name, i)


def _preset(name: str, i: int) -> Call:
    rng, spec = random.Random(f"preset {name} {i}"), rc.spec(name)
    if any(criterion.of != "train/rollout" for criterion in spec.criteria):
        return loss_call(rng, rc.Loss(), spec, "both")
    return correct_call(rng, spec)


def _recipe(name: str, i: int) -> Call:
    """With and without old_logp."""
    found = rc.recipe(name)
    return loss_call(random.Random(f"recipe {name} {i}"), found.loss, found.spec, ("both", "bypass")[i])


def _spec(i: int) -> Call:
    rng = random.Random(f"spec {i}")
    # Prefixes and rules, which run on plain torch, in half of them.
    units, rules = (("token", "sequence", "turn"), False) if i % 2 else (("token", "sequence", "turn", "prefix"), True)
    return correct_call(rng, random_spec(rng, units if i % 4 else units[:2], rules))


def _loss(name: str, i: int) -> Call:
    rng = random.Random(f"loss {name} {i}")
    spec = random_spec(rng, ("token", "sequence"), rules=i % 4 == 3, of_loss=True) if i % 2 else None
    if spec is not None and (len(spec.report) > 1 or i % 4 == 1):
        spec = random_spec(rng, ("token", "sequence"), rules=False)
    return loss_call(rng, random_loss(rng, name), spec)


def _far(name: str, i: int) -> Call:
    """A Loss with every term, of log-ratios beyond every clamp."""
    rng = random.Random(f"far {name} {i}")
    drawn, scopes = random_loss(rng, name), ("kept", "all")
    kl = rc.KL(rng.choice(("k1", "k2", "k3", "abs")), 0.1, scope=rng.choice(scopes), weight=rng.choice((None, "ratio")))
    loss = rc.Loss(drawn.surrogate, drawn.mean, kl, rc.SquaredLogRatio(0.1, rng.choice(scopes)))
    spec = random_spec(rng, ("token", "sequence"), rules=False) if i % 2 else None
    return loss_call(rng, loss, spec, far=True)


# --- declared variants ---


def _declared() -> Iterator[tuple[str, Draw]]:
    """The variants of the kernels, which the checkout declares in tests/lab/aot."""
    from lab.aot.loss_variants import LOSS_VARIANTS
    from lab.aot.variants import OF_NEW_VARIANTS, TURN_VARIANTS, VARIANTS

    for name, variant in (VARIANTS | TURN_VARIANTS | OF_NEW_VARIANTS).items():
        yield f"variant/{name}", partial(of_variant, variant)
    for name, variant in LOSS_VARIANTS.items():
        yield f"variant/loss_{name}", partial(_loss_variant, variant)


def _layout_of(variant) -> Layout:
    lie = "contiguous" if variant.wide else "step" if not variant.unit else "slice"
    return Layout("gaps" if variant.packed else "left", lie, variant.offsets)


def of_variant(variant, seed: str = "variant", kind: str | Sequence[int] = "small") -> Call:
    """A call of a variant of `correct`, or of a whole step, which has an objective too."""
    rng, wanted, spec = random.Random(f"{seed} {variant.name}"), getattr(variant, "objective", None), variant.spec
    given = {
        "kind": kind,
        "layout": _layout_of(variant),
        "dtypes": (variant.train if wanted is None else variant.new, variant.rollout),
        "mask": (variant.mask, 1.0),
        "per_sequence": variant.advantages == "sequence",
        "extras": 0.0,
    }
    if wanted is not None:
        loss = rc.Loss(wanted.surrogate, wanted.mean, wanted.kl, wanted.regularizer)
        call = loss_call(rng, loss, spec, "bypass" if variant.old is None else "decoupled", **given)
        call.given = {"total": 13.0} if variant.counted else {}
    elif any(criterion.of != "train/rollout" for criterion in spec.criteria):
        call = loss_call(rng, rc.Loss(), spec, "both", **given)
    else:
        call = correct_call(rng, spec, **given)
    return _with_mass(call, variant)


def _with_mass(call: Call, variant) -> Call:
    """Bring the mass that a variant takes from the log-probs of one policy: those of the other are of the kept set."""
    if variant.mass is not None:
        of = {"train": "rollout", "rollout": "train"}[variant.mass]
        call.drawn.batch["kept_mass"] = rc.KeptMass(call.drawn.column("log_mass"), of=of)
    return call


def _loss_variant(variant) -> Call:
    rng, wanted = random.Random(f"loss variant {variant.name}"), variant.objective
    loss = rc.Loss(wanted.surrogate, wanted.mean, wanted.kl, wanted.regularizer)
    call = loss_call(
        rng,
        loss,
        None,
        "on-policy" if variant.base is None else "decoupled" if variant.mass is None else "bypass",
        layout=_layout_of(variant),
        dtypes=(variant.new, variant.base or variant.new),
        mask=(variant.mask, 1.0),
        per_sequence=variant.advantages == "sequence",
        extras=0.0,
    )
    call.correction = "nothing"
    if variant.weights is not None or variant.trains is not None:
        call.correction = "mask" if variant.weights is None or variant.mass is not None else "factors"
    call.given = {"total": 13.0} if variant.counted else {}
    if variant.scales:
        call.given["scale"] = call.drawn.column("scale")
    return _with_mass(call, variant)


# --- large batches ---

# Some of what runs most, for which sizes decide how the CPU's blocks add up.
OF_SIZE = (
    "verl.decoupled_token_is", "verl.decoupled_geo_rs_seq_tis", "slime.mis", "skyrl.tldr", "xtuner.agentic",
    "areal.m2po",
)  # fmt: skip


def large() -> Iterator[tuple[str, Draw]]:
    """Batches of 6,000 and 80,000 tokens, one of them in more slots than a block has."""
    for kind in ("middle", "large"):
        for i, name in enumerate(OF_SIZE):
            yield f"size/{kind}/{name}", partial(_of_size, name, kind, i)
        for i, name in enumerate(("PPO", "GSPO", "Score", "ClipCov")):
            yield f"size/{kind}/{name}", partial(_loss_of_size, name, kind, i)


LARGE_LAYOUTS = (Layout("packed"), Layout("right"), Layout("left", "slice"), Layout("gaps"), Layout("holes"))


def _of_size(name: str, kind: str, i: int) -> Call:
    rng = random.Random(f"size {name} {kind}")
    return correct_call(rng, rc.spec(name), kind=kind, layout=LARGE_LAYOUTS[i % 5], dtypes=(torch.float32,) * 2)


def _loss_of_size(name: str, kind: str, i: int) -> Call:
    rng = random.Random(f"size {name} {kind}")
    spec = rc.spec("verl.decoupled_token_is") if i % 2 else None
    layout = LARGE_LAYOUTS[(i + 1) % 5]
    return loss_call(rng, random_loss(rng, name), spec, kind=kind, layout=layout)


# --- several ranks ---


def on_ranks() -> Iterator[tuple[str, Draw]]:
    """Calls that two or three ranks make together, each with its tokens of every sequence or with its sequences."""
    for i in range(OF_RANKS):
        yield f"ranks/{i}", partial(_of_ranks, i)


def _of_ranks(i: int) -> CallOfRanks:
    from builders import parts

    group = ("sequence", "batch")[i % 2]
    if i % 3 < 2:
        together = parts.correction(f"ranks {i}", group)
    else:
        together = parts.loss(f"ranks {i}", list(SURROGATES)[i // 3 % len(SURROGATES)])
    return CallOfRanks([together.call(rank) for rank in range(together.parts.count)], together.parts.group)
