"""Right and wrong uses of the public types, for type checkers: each line marked `# wrong` has to be an error.

test_typing.py runs the checkers on this file; nothing imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from typing_extensions import assert_type

import rollout_corr as rc

x, spec, batch = torch.zeros(2, 3), rc.Spec(), rc.Batch(mask=torch.ones(2, 3))
out, loss = rc.correct(x, x, batch, spec=spec), rc.policy_loss(x, x, batch, old_logp=x)

# Right.
rc.Weight.token(upper=2.0, outside="zero", normalize="batch")
rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1, when="outward", drop="token", of="new/old")
rc.Spec(rejected="both", nonfinite="neutral", sums_over="kept", detail="full", report=("native", "verl"))
rc.Spec.from_dict({"weight": {"over": "token"}})
rc.correct(x, x, spec=rc.Spec(), backend="torch")
rc.policy_loss(x, x, batch, rc.Loss(rc.PPO(), rc.Mean("sum", over="kept")), old_logp=x, correction=out, backend="torch")
rc.policy_loss(x, x, old_logp=x, correction=rc.Factors(weights=out.weights, mask=out.mask))
rc.Batch(labels={"environment": rc.Labels(x, ["math", "code"])}, groups=rc.Groups(size=4), turns="runs", total=8)
rc.Batch(kept_mass=rc.KeptMass(x, of="train"), versions=rc.Versions(x, 3), ranks=rc.Ranks())
rc.filter_groups(x[0], x[0] > 0, x[0].long(), alone="zero")
rc.selection(x[0] > 0, x[0].long(), rewards=x[0]).metrics()["kept/length_mean"]
rc.route_agreement(x.long()[None], x.long()[None]).metrics()["route_overlap_mean"]
rc.warmup(x, x, batch, spec=spec, loss=rc.Loss(), advantages=x)
rc.GSPO(through="token", of="new/rollout")
rc.Score(upper=2.0, outside="zero")
rc.DPPO("kl")
rc.KL("k3", 0.1, gradient="k2", weight="ratio", scope="all")
rc.SquaredLogRatio(0.1, "kept")
rc.EntropyBonus(0.01, scope="all")
rc.spec("verl.decoupled_token_is", upper=3.0).explain()
rc.spec("verl", {"rollout_is": "token"}, k1_bounds="ratio").explain()
rc.spec(cast(rc.SpecName, input())).explain()
rc.recipe("trl.dapo", epsilon_high=0.28)
rc.recipe("trl", object())
rc.doctor("dumps", by="environment").findings[0].numbers["slope"]
rc.doctor(["a.jsonl", "b.jsonl"], limit=100, on_policy=True).counts["error"]
rc.doctor([x[0]], [x[0]], mask=[x[0]], token_ids=[x[0].long()]).to_dict()
rc.report(x, x, mask=x, page="page.html", compare=rc.doctor(x, x)).save("page.html").exists()
one: rc.SpecName = "areal.kpop"
over: str = rc.Weight.product().over
report: tuple[str, ...] = rc.Spec().report

# The types of results: the layout that was given, and None without a Spec.
samples, either = [x], cast(Tensor | list[Tensor], x)
assert_type(out, rc.Correction[Tensor, Tensor])
assert_type(out.weights, Tensor)
assert_type(rc.correct(x, x), rc.Correction[Tensor, None])
assert_type(rc.correct(samples, samples, mask=samples, spec=spec).mask, list[Tensor])
assert_type(rc.correct(either, either, spec=spec).weights, Tensor | list[Tensor])
assert_type(rc.correct_async(x, x, batch, spec=spec).result().weights, Tensor)
assert_type(rc.correct_async(samples, samples), rc.PendingCorrection[list[Tensor], None])
assert_type(loss.value, Tensor)
assert_type(loss.weights, None)
assert_type(rc.policy_loss(samples, samples, rollout_logp=samples, spec=spec).weights, list[Tensor])
assert_type(rc.policy_loss(x, x, rollout_logp=x, spec=cast(rc.Spec | None, spec)).weights, Tensor | None)
assert_type(rc.future_kl_weights(x, x), Tensor)
assert_type(rc.early_token_weights(samples), list[Tensor])
assert_type(rc.proximal(x, x, batch, interpolation="linear"), Tensor)
any_of_them: list[rc.Correction] = [out, rc.correct(x, x), rc.correct(samples, samples, spec=spec)]
assert_type(any_of_them[0].mask, Tensor | Sequence[Tensor])

# Slips: each would be an error when it runs, too.
rc.corect(x, x)  # wrong
rc.correct(x, x, masks=x)  # wrong
rc.correct(x, x, x)  # wrong
rc.correct(x, x, spec)  # wrong
rc.correct(x, x, {"mask": x})  # wrong
rc.correct(x, x, attention_mask=x)  # wrong
rc.correct(x, x, turns=x)  # wrong
rc.correct(x, x, spec="verl.decoupled_token_is")  # wrong
rc.correct(x, x, spec=None)  # wrong
rc.correct(x, x, spec=rc.Loss())  # wrong
rc.correct(x, x, spec=rc.Weight.token())  # wrong
rc.correct(x, x).weights.sum()  # wrong
out.weigths.sum()  # wrong
out.metric()  # wrong
rc.Batch(x)  # wrong
rc.Batch(cu_seqlen=x)  # wrong
rc.Batch(labels=x)  # wrong
rc.Batch(labels={"environment": x})  # wrong
rc.Batch(groups=x)  # wrong
rc.Batch(versions=(x, 3))  # wrong
rc.Batch(kept_mass=x)  # wrong
rc.Batch(ranks="world")  # wrong
rc.KeptMass(x, of="engine")  # wrong
rc.policy_loss(x, x, rc.Loss())  # wrong
rc.policy_loss(x, x, x)  # wrong
rc.policy_loss(x, x, loss=rc.PPO())  # wrong
rc.policy_loss(x, x, spec=rc.Loss())  # wrong
rc.policy_loss(x, x, surrogate=rc.PPO())  # wrong
rc.policy_loss(x, x, correction=out.weights)  # wrong
rc.policy_loss(x, x, weights=out.weights)  # wrong
rc.Loss(spec)  # wrong
rc.Loss(mean="token")  # wrong
rc.Mean("tokens")  # wrong
rc.Mean(over="keep")  # wrong
loss.backward()  # wrong
loss.value.backwards()  # wrong
rc.suggest(x, x, keep="0.95")  # wrong

# Wrong choices.
rc.doctor(3)  # wrong
rc.doctor("dumps", on_polcy=True)  # wrong
rc.doctor("dumps").findings = ()  # wrong
rc.doctor("dumps").counts["eror"]  # wrong
rc.report("dumps", compare=3)  # wrong
rc.spec("verl.decoupled_tokn_is")  # wrong
rc.spec("verl")  # wrong
rc.spec("megatron", {})  # wrong
rc.spec("trl.dapo")  # wrong
rc.spec(input())  # wrong
rc.spec("verl.decoupled_token_is", 3.0)  # wrong
rc.recipe("trl.default")  # wrong
rc.recipe("trl.dpao")  # wrong
rc.recipe("trl")  # wrong
rc.Weight("sequense", "sum")  # wrong
rc.Weight("sequence", "max")  # wrong
rc.Weight.product("token")  # wrong
rc.Weight.token(outside="clip")  # wrong
rc.Weight.token(normalize="mean")  # wrong
rc.Weight.token(upper="2")  # wrong
rc.Criterion("kl", upper=1.0)  # wrong
rc.Criterion("k1", upper=1.0, over="row")  # wrong
rc.Criterion("k1", over="sequence", reduce="avg", upper=1.0)  # wrong
rc.Criterion("k1", upper=1.0, when="always")  # wrong
rc.Criterion("k1", upper=1.0, drop="batch")  # wrong
rc.Criterion("k1", upper=1.0, of="train/old")  # wrong
rc.Spec(rejected="drop")  # wrong
rc.Spec(nonfinite="raise")  # wrong
rc.Spec(sums_over="all")  # wrong
rc.Spec(detail="some")  # wrong
rc.Spec(report=("trl",))  # wrong
rc.Spec(weight="token")  # wrong
rc.correct(x, x, spec=rc.Spec(), backend="gpu")  # wrong
rc.policy_loss(x, x, old_logp=x, backend="compiled")  # wrong
rc.Loss("ppo")  # wrong
rc.filter_groups(x[0], x[0] > 0, x[0].long(), alone="mean")  # wrong
rc.warmup("cpu", None)  # wrong
rc.warmup(x, x, advantages="row")  # wrong
rc.PPO(of="old")  # wrong
rc.GSPO(through="both")  # wrong
rc.Score(outside="clip")  # wrong
rc.DPPO("js")  # wrong
rc.KL("full", 0.1)  # wrong
rc.KL("k1", 0.1, gradient="k5")  # wrong
rc.KL("k1", 0.1, weight="weight")  # wrong
rc.SquaredLogRatio(0.1, "some")  # wrong
