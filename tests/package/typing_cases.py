"""Right and wrong uses of the public types, for type checkers: each line marked `# wrong` has to be an error.

test_typing.py runs the checkers on this file; nothing imports it.
"""

from __future__ import annotations

from typing import cast

import torch

import rollout_corr as rc
from builders.calls import bundled_loss

x = torch.zeros(2, 3)

# Right.
rc.Weight.token(upper=2.0, outside="zero", normalize="batch")
rc.Criterion("k3", over="sequence", reduce="mean", upper=0.1, when="outward", drop="token", of="new/old")
rc.Spec(rejected="both", nonfinite="neutral", sums_over="kept", detail="full", report=("native", "verl"))
rc.Spec.from_dict({"weight": {"over": "token"}})
rc.correct(x, x, spec=rc.Spec(), backend="torch")
rc.policy_loss(x, x, loss=rc.Loss(rc.PPO(), mean=rc.Mean("sum", over="kept")), old_logp=x, backend="torch")
rc.filter_groups(x[0], x[0] > 0, x[0].long(), alone="zero")
rc.route_agreement(x.long()[None], x.long()[None]).metrics()["route_overlap_mean"]
rc.warmup("cpu", None, layouts=("packed",), advantages="sequence")
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

# Wrong.
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
rc.policy_loss(x, x, loss=rc.Loss(rc.PPO()), old_logp=x, backend="compiled")  # wrong
rc.policy_loss(x, x, **bundled_loss(old_logp=x, reduction="mean"))  # wrong
rc.policy_loss(x, x, loss=rc.Loss(mean=rc.Mean(over="all")), old_logp=x)  # wrong
rc.policy_loss(x, x, loss=rc.Loss("ppo"), old_logp=x)  # wrong
rc.filter_groups(x[0], x[0] > 0, x[0].long(), alone="mean")  # wrong
rc.warmup("cpu", None, layouts=("jagged",))  # wrong
rc.warmup("cpu", None, advantages="row")  # wrong
rc.PPO(of="old")  # wrong
rc.GSPO(through="both")  # wrong
rc.Score(outside="clip")  # wrong
rc.DPPO("js")  # wrong
rc.KL("full", 0.1)  # wrong
rc.KL("k1", 0.1, gradient="k5")  # wrong
rc.KL("k1", 0.1, weight="weight")  # wrong
rc.SquaredLogRatio(0.1, "some")  # wrong
