"""Bad input is refused with the argument's name, what was expected and what came, and with what was meant."""

from __future__ import annotations

import itertools
import math
import pickle
import re

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled, bundled_loss, example
from rollout_corr.backends import operators

V, T, A = ValueError, TypeError, AttributeError
C, W = rc.Criterion, rc.Weight
NEGATIVE = rc.Spec(criteria=(C("k1", upper=1, when="negative_advantage"),))
ENTROPY = rc.Spec(criteria=(C("external", upper=1, name="entropy"),))
OF_ENTROPY = rc.Spec(criteria=(C("entropy", upper=1.0),))
AGES = rc.Spec(criteria=(C("age", upper=1),))
SPEC = rc.Spec(W.token(upper=2.0), (C("ratio", over="sequence", reduce="mean", lower=0.99, upper=1.01),))
FLOATS = "expected a dtype among float32, bfloat16, float16, float64"
N = 12
OFFSETS, LOGP, ONES = torch.tensor([0, 5, 5, N]), -torch.rand(N), torch.ones(N)
MASK = torch.arange(N) % 4 != 3
BATCH = rc.Batch(mask=MASK, cu_seqlens=OFFSETS)
X = -torch.rand(2, 3)
LOSS = rc.policy_loss(X, torch.ones(2), old_logp=X)
ROUTES, ROUTED = torch.zeros(4, 2, 3, dtype=torch.int32), torch.zeros(4, 2, 3)
IDS = torch.zeros(2, 3, dtype=torch.int64)


def z(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def jagged(*lengths):
    return torch.nested.nested_tensor([z(n) for n in lengths], layout=torch.jagged)


def packed(train=5, rollout=5, mask=None, cu_seqlens=(0, 2, 5), spec=rc.Spec(), **others):  # noqa: B008  (frozen)
    """`correct` on packed log-probs; a number stands for a tensor of zeros of that length."""
    train, rollout, mask = (z(x) if type(x) is int else x for x in (train, rollout, mask))
    cu_seqlens = torch.tensor(cu_seqlens) if isinstance(cu_seqlens, tuple) else cu_seqlens
    return rc.correct(train, rollout, **bundled(mask=mask, cu_seqlens=cu_seqlens, spec=spec, **others))


def padded(rollout=(2, 5), mask=None, spec=rc.Spec(), train=(2, 5), **others):  # noqa: B008  (frozen)
    """`correct` on padded log-probs; a tuple stands for a tensor of zeros of that shape."""
    train, rollout, mask = (z(*x) if isinstance(x, tuple) else x for x in (train, rollout, mask))
    return rc.correct(train, rollout, **bundled(mask=mask, spec=spec, **others))


def listed(train=(2, 3), rollout=(2, 3), mask=None, **others):
    """`correct` on lists of samples; a tuple of lengths stands for a list of zeros."""
    train, rollout, mask = ([z(n) for n in x] if isinstance(x, tuple) else x for x in (train, rollout, mask))
    return rc.correct(train, rollout, **bundled(mask=mask, **others))


def correct(*given, **named):
    return rc.correct(LOGP, LOGP, *given, **named)


def loss(*given, **named):
    return rc.policy_loss(LOGP, ONES, *given, **named)


def grouped(rewards=(1.0, 2.0), keep=(True, True), group=(0, 0), alone="reward"):
    """`filter_groups`; tuples stand for tensors."""
    tensors = (torch.tensor(x) if isinstance(x, tuple) else x for x in (rewards, keep, group))
    return rc.filter_groups(*tensors, alone=alone)


def aged(ids, current=1):
    return rc.correct(X, X, rc.Batch(versions=rc.Versions(ids, current)), spec=AGES)


def massed(log_mass, of="rollout", call=rc.correct):
    return call(X, X, rc.Batch(kept_mass=rc.KeptMass(log_mass, of)))


def dump(path="x.jsonl", batch=BATCH, rollout=LOGP, **more):
    return rc.dump(path, LOGP, rollout, batch, **more)


def routed(other=ROUTES, **weights):
    return rc.route_agreement(ROUTES, other, **weights)


def into(weights=None, mask=None, spec=SPEC, train=X, **given):
    return rc.correct(train, train, **bundled(spec=spec, out=rc.Outputs(weights, mask), **given))


SHAPES = [
    (lambda: packed(cu_seqlens=None), V, "cu_seqlens: expected the offsets of the packed sequences for 1-D log-probs"),
    (lambda: packed(rollout=4), V, "rollout_logp: expected shape [5] (of train_logp), got [4]"),
    (lambda: packed(z(()), z(())), V, "train_logp: expected shape [N], [1, N] or [B, T], got []"),
    (lambda: padded((2, 1)), V, "rollout_logp: expected shape [2, 5] (of train_logp), got [2, 1]"),
    (lambda: padded(mask=(2, 1)), V, "mask: expected shape [2, 5] (of train_logp), got [2, 1]"),
    (lambda: padded(cu_seqlens=OFFSETS), V, "cu_seqlens: expected None with padded log-probs of shape [2, 5] (each"),
    (lambda: packed(cu_seqlens=IDS), V, "cu_seqlens: expected shape [sequences + 1], got [2, 3]"),
    (lambda: packed(cu_seqlens=torch.tensor(5)), V, "cu_seqlens: expected shape [sequences + 1], got []"),
    (lambda: packed(cu_seqlens=(0, 4, 2, 5)), V, "expected offsets that do not decrease, got cu_seqlens[1]=4 > cu"),
    (lambda: packed(cu_seqlens=(-1, 5)), V, "expected offsets within [0, 5] tokens, got cu_seqlens[0]=-1"),
    (lambda: packed(cu_seqlens=(0, 6)), V, "expected offsets within [0, 5] tokens, got cu_seqlens[1]=6"),
    # Differences of these wrap around.
    (lambda: packed(cu_seqlens=(0, 2**62, -(2**63), 0)), V, "got cu_seqlens[1]=4611686018427387904 > cu_seqlens[2]=-9"),
    (lambda: packed(40, 40, None, (10,) * 4), V, "expected offsets, which add lengths up, got lengths: 4 times 10 of"),
    (lambda: packed(cu_seqlens=(1, 4), validate=True), V, "expected to start at 0 and end at 5 tokens, got 1 to 4"),
    (lambda: rc.correct(jagged(2, 3), jagged(2, 3), cu_seqlens=OFFSETS), V, "expected None with a nested tensor"),
    (lambda: rc.correct(jagged(2, 3), z(5)), V, "rollout_logp: expected a jagged nested tensor like train_logp, got"),
    (lambda: rc.correct(jagged(2, 3), jagged(2, 2, 1)), V, "expected 2 rows and 5 tokens (of train_logp), got 3 and 5"),
    (lambda: rc.correct(jagged(2, 3), jagged(2, 2)), V, "expected 2 rows and 5 tokens (of train_logp), got 2 and 4"),
    (lambda: rc.correct(jagged(2, 3), jagged(3, 2)), V, "expected rows of lengths [2, 3] (of train_logp), got [3, 2]"),
    (lambda: listed(rollout=(2,)), V, "rollout_logp: expected a list of 1-D tensors of lengths [2, 3] (of train_logp)"),
    (lambda: listed(mask=(2, 2)), V, "mask: expected a list of 1-D tensors of lengths [2, 3] (of train_logp), got [2,"),
    (lambda: listed([z(2, 2)], [z(2, 2)]), V, "train_logp[0]: expected a 1-D tensor, got shape [2, 2]"),
    (lambda: listed(rollout=[z(2), None]), V, "lengths [2, 3] (of train_logp), got [2, None]"),
    (lambda: listed(cu_seqlens=OFFSETS), V, "cu_seqlens: expected None with a list of samples"),
    (lambda: listed(rollout=[z(2), z(3).long()]), V, "rollout_logp[1]: expected float32 on cpu (of rollout_logp[0]),"),
    (lambda: listed(mask=[z(2), z(3, device="meta")]), V, "mask[1]: expected float32 on cpu (of mask[0]), got float32"),
    (lambda: padded(advantages=z(3)), V, "advantages: expected shape [2, 5] (per token), [2] or [2, 1] (per sequence)"),
    (lambda: packed(advantages=z(3)), V, "advantages: expected shape [5] (per token), [2] or [2, 1] (per sequence)"),
    (lambda: listed(advantages=[z(2), z(2)]), V, "advantages: expected a list of 1-D tensors of lengths [2, 3] (of"),
    (lambda: padded(spec=ENTROPY, external={"entropy": z(2, 4)}), V, "external['entropy']: expected shape [2, 5] (of"),
    (lambda: rc.correct(X[..., None], X), V, "logits.log_softmax(-1).gather(-1, token_ids[..., None])"),
]
DTYPES_AND_DEVICES = [
    (lambda: packed(train=z(5).long()), V, f"train_logp: {FLOATS}, got int64"),
    (lambda: packed(rollout=z(5).bool()), V, "is it the mask? Write mask=..., after train_logp and rollout_logp"),
    (lambda: packed(rollout=z(5, dtype=torch.complex64)), V, f"rollout_logp: {FLOATS}, got complex64"),
    (lambda: packed(mask=z(5, dtype=torch.complex64)), V, "mask: expected a dtype among bool, uint8"),
    (lambda: packed(spec=NEGATIVE, advantages=z(5).bool()), V, f"advantages: {FLOATS}, int64, int32, got bool"),
    (lambda: packed(spec=ENTROPY, external={"entropy": z(5).bool()}), V, f"external['entropy']: {FLOATS}, int64"),
    (lambda: packed(cu_seqlens=torch.tensor([0.0, 5.0])), V, "cu_seqlens: expected dtype int32 or int64, got float32"),
    (lambda: packed(cu_seqlens=torch.tensor([0, 5]).short()), V, "cu_seqlens: expected dtype int32 or int64, got int1"),
    (lambda: padded(z(2, 5, device="meta")), V, "rollout_logp: expected device cpu (of train_logp), got meta"),
    (lambda: padded(mask=z(2, 5, device="meta")), V, "mask: expected device cpu (of train_logp), got meta"),
    (lambda: padded(advantages=z(2, device="meta")), V, "advantages: expected device cpu, got meta"),
    (lambda: packed(cu_seqlens=OFFSETS.to("meta")), V, "cu_seqlens: expected the CPU or cpu (of train_logp), got meta"),
    (lambda: padded(z(2, 5).to_sparse()), V, "rollout_logp: expected a dense tensor, got layout torch.sparse_coo"),
]
TYPES = [
    (lambda: packed(train=None), T, "train_logp: expected a tensor, got NoneType"),
    (lambda: packed(rollout=z(5).numpy()), T, "rollout_logp: expected a tensor, got ndarray"),
    (lambda: padded(mask=[z(5), z(5)]), T, "mask: expected a tensor, got list"),
    (lambda: packed(cu_seqlens=[0, 2, 5]), T, "cu_seqlens: expected an int32 or int64 tensor, got list"),
    (lambda: listed(rollout=z(5)), T, "rollout_logp: expected a list of 1-D tensors like train_logp, got Tensor"),
    (lambda: padded(spec=NEGATIVE, advantages=1.0), T, "advantages: expected a tensor, got float"),
    (lambda: padded(spec=ENTROPY, external=z(2, 5)), T, "external: expected a mapping"),
    (lambda: padded(spec=ENTROPY, external={"entropy": None}), T, "external['entropy']: expected a tensor, got NoneT"),
    (lambda: padded(spec=None), T, "spec: expected a Spec, got NoneType"),
    (lambda: padded(validate=torch.ones(2)), T, "validate: expected True or False, got Tensor"),
    (lambda: torch.vmap(lambda x: rc.correct(x, X).keep)(torch.stack([X, X])), T, "inside torch.func.vmap; call corr"),
    (lambda: padded().statistics.merge(3), T, "other: expected Statistics, got int"),
    (lambda: rc.Statistics.sum([padded()]), T, "parts[0]: expected Statistics, got Correction; pass its .statistics"),
]
VALUES = [
    (lambda: padded(None), V, "rollout_logp: expected the log-probs of the engine that sampled the tokens, got None."),
    (lambda: padded(spec=NEGATIVE), V, "advantages: expected a tensor for the criterion with when='negative_advantage"),
    (lambda: padded(spec=ENTROPY), V, "external: expected a tensor under the name 'entropy', got []"),
    (lambda: padded(spec=ENTROPY, external={"x": X}), V, "external: expected a tensor under the name 'entropy', got ["),
    (lambda: padded(spec=rc.Spec(criteria=(C("ratio", upper=2, of="new/old"),))), V, "which exists only inside policy"),
    (lambda: padded(backend="cuda"), V, "backend: expected one of ['auto', 'triton', 'torch'"),
    (lambda: padded(backend="triton"), V, "backend: expected 'auto' or 'torch' for cpu tensors, got 'triton'"),
    (lambda: padded().metrics("verl"), V, "(Spec.report), got 'verl'; ask for them by Spec(report=('native', 'verl'))"),
    (lambda: padded().metrics("trl"), V, "names: expected 'dashboard' or one of ['native'] (Spec.report), got 'trl'"),
    (lambda: padded().metrics(by="tool"), V, "(the labels of the Batch)"),
    (lambda: padded().statistics + padded(spec=SPEC).statistics, V, "other: expected statistics of the same Spec Spec"),
    (lambda: padded().statistics.join(padded().statistics), V, "loss: expected statistics of a policy loss without a"),
    (lambda: rc.Statistics.sum([]), V, "parts: expected at least one Statistics, got none"),
]
RECORDS = [
    (lambda: correct(MASK), T, "batch: expected rc.Batch(mask=..., cu_seqlens=...) or None, got Tensor; a mask is mas"),
    (lambda: correct({"mask": MASK}), T, "got dict; write rc.Batch(mask=...)"),
    (lambda: correct(SPEC), T, "got Spec; write spec=..."),
    (lambda: correct(BATCH, mask=MASK), V, "mask: expected None with a Batch, got both; write rc.Batch(mask=...)"),
    (lambda: correct(BATCH, spec=rc.Loss()), T, "spec: expected a Spec, got Loss; a Loss is loss=... of policy_loss"),
    (lambda: correct(msk=MASK), T, "correct: unknown argument 'msk'"),
    (lambda: correct(cu_seqlens=OFFSETS, turns="runs"), T, "did you mean batch=rc.Batch(turns=...)?"),
    (lambda: correct(old_logp=LOGP), T, "did you mean train_logp=?"),
    (lambda: loss(train_logp=LOGP), T, "did you mean old_logp= (decoupled) or new_logp=?"),
    (lambda: correct(rc.recipe("verl.ppo")), T, "got Recipe; of a recipe pass loss=recipe.loss and spec=recipe.spec"),
    (
        lambda: correct(spec=rc.recipe("verl.ppo")),
        T,
        "expected a Spec, got Recipe; of a recipe pass its .spec, and",
    ),
    (lambda: rc.correct(X, X, rc.Batch(mask=X * math.nan, validate=True)), V, "mask: expected numbers, got NaN at 6"),
    (lambda: rc.GeoRS(0.9, 1.1, over="token"), V, "GeoRS.over: expected one of ['turn', 'sequence'], got 'token'"),
    (lambda: loss(BATCH, rc.PPO(), old_logp=LOGP), T, "loss: expected a rollout_corr.Loss, got PPO; write rc.Loss(PPO"),
    (lambda: loss(BATCH, SPEC), T, "loss: expected a rollout_corr.Loss, got Spec; a Spec is spec=..."),
    (lambda: loss(rc.Loss()), T, "got Loss; write loss=..."),
    (lambda: loss(BATCH, weights=ONES), T, "did you mean correction=rc.Factors(weights=...)?"),
    (lambda: loss(BATCH, correction=ONES), T, "or rc.Factors, got Tensor; weights are rc.Factors(weights=...)"),
    (lambda: loss(BATCH, correction=SPEC), T, "got Spec; a Spec is spec=..."),
    (lambda: loss(BATCH, correction=rc.Factors(ONES), spec=SPEC), V, "spec: expected None with a correction, got bo"),
    (lambda: loss(BATCH, reduction="token_mean"), T, "did you mean loss=rc.Loss(mean=rc.Mean(...))?"),
    (lambda: loss(rc.Batch(cu_seqlens=OFFSETS, total=3), rc.Loss(mean=rc.Mean("sum"))), V, "total: expected None with"),
    (lambda: loss(rc.Batch(cu_seqlens=OFFSETS, total=-1)), V, "total: expected a finite number >= 0"),
    (lambda: rc.Batch(MASK), T, "Batch: expected keywords, such as mask=..., got Tensor by position"),
    (lambda: rc.Batch(attention_mask=MASK), T, "did you mean mask=?"),
    (lambda: rc.Batch(current_version=3), T, "did you mean versions=rc.Versions(ids, current)?"),
    (lambda: rc.Batch(versions=ONES), T, "versions: expected rc.Versions(ids, current), got Tensor float32[12]"),
    (lambda: rc.Batch(kept_mass=ONES), T, "kept_mass: expected rc.KeptMass(log_mass"),
    (lambda: rc.Batch(groups=ONES), T, "groups: expected rc.Groups(index=...) or rc.Groups(size=...), got Tensor"),
    (lambda: rc.Batch(ranks="dp"), T, "ranks: expected rc.Ranks(batch=...)"),
    (lambda: rc.Batch(labels=ONES), T, "labels: expected a mapping of names to rc.Labels"),
    (lambda: rc.Batch(labels={"task": ONES}), T, "labels['task']: expected rc.Labels(ids, names), got Tensor"),
    (lambda: rc.Labels(ONES, label_names=["a"]), T, "did you mean names=?"),
    (lambda: rc.TurnIds("runs", max_turns=2), T, "did you mean at_most=?"),
    (lambda: rc.Factors(train_mask=MASK), T, "did you mean mask=?"),
    (lambda: rc.Groups(), V, "groups: expected index= or size=, got neither"),
    (lambda: rc.Groups(index=OFFSETS, count=0), V, "groups.count: expected an integer above 0 or None, got 0"),
    (lambda: rc.Groups(index=OFFSETS, size=2), V, "groups.index: expected None with groups.size, got both"),
    (lambda: rc.Groups(group_size=2), T, "did you mean size=?"),
    (lambda: rc.Loss(mean="token_mean"), T, "Loss.mean: expected a Mean, got str 'token_mean'; write rc.Mean('token')"),
    (lambda: rc.Loss(denominator="kept"), T, "did you mean mean=rc.Mean(..., over=...), or total= of the Batch?"),
    (lambda: rc.Loss(rc.PPO), T, "got the class PPO; write PPO()"),
    (lambda: rc.Loss(entropy_bonus=0.1), T, "Loss.entropy_bonus: expected EntropyBonus(...) or None, got float"),
    (lambda: rc.Loss.from_dict({"surrogate": {"name": ["PPO"]}}), V, "Loss.surrogate: expected a mapping with a name"),
    (lambda: rc.Mean("seq-mean-token-mean"), V, "got 'seq-mean-token-mean'; write Mean('sequence')"),
    (lambda: rc.Mean("token", length=8.0), V, "Mean.length: expected None with of='token', got 8.0"),
    (lambda: rc.Mean("token", over="rows"), V, "Mean.over: expected 'rows' with a mean over sequences"),
    (lambda: rc.Mean(reduction="token"), T, "Mean: unknown argument 'reduction'"),
    (lambda: rc.KL("k3", 0.1, mean=rc.Mean("sequence_sum", length=8.0)), V, "KL.mean: expected one without a length"),
    (lambda: rc.KL("k3", 0.1, reduction="token_mean"), T, "KL: unknown argument 'reduction', expected some of ['kind'"),
    (lambda: rc.EntropyBonus(math.nan), V, "EntropyBonus.coef: expected"),
    (lambda: rc.EntropyBonus(True), T, "EntropyBonus.coef"),
    (lambda: rc.EntropyBonus(0.1, "some"), V, "EntropyBonus.scope: expected one of ['kept', 'all']"),
]
HINTS = [
    (lambda: correct(spec="trl.dapo"), T, "rc.spec('trl.dapo')"),
    (lambda: loss(old_logp=LOGP, rollout_logp=LOGP, spec="verl.x"), T, "rc.spec('verl.x')"),
    (lambda: correct(spec={"rollout_is": "token"}), T, "rc.spec(framework, settings)"),
    (lambda: correct(spec=W.token(upper=2.0)), T, "write Spec(weight=Weight.token(upper=2.0))"),
    (lambda: correct(spec=C("ratio", upper=2.0)), T, 'criteria=(Criterion("ratio", upper=2.0),)'),
    (lambda: W("sequence"), V, "expected 'sum', the product of the ratios, or 'mean', their"),
    (lambda: W(level="token"), T, "unknown argument 'level', expected some of ['over', 'reduce'"),
    (lambda: W.token(clip_max=2), T, "Weight.token: unknown argument 'clip_max'"),
    (lambda: W.token(lower=-0.5, upper=0.5), V, "log-ratio of -0.5 pass 0.606531"),
    (lambda: W.token(threshold=2.0), T, "did you mean upper=?"),
    (lambda: W.token(decay=1.5), V, "Weight.decay"),
    (lambda: C("ratio", upper=-0.1), V, "log-ratio of -0.1 pass 0.904837"),
    (lambda: C("external", upper=1.0, name="\0"), V, "Criterion.name: expected the key"),
    (lambda: C("ratio", threshold=2.0), T, "did you mean upper= (and lower=)?"),
    (lambda: rc.Spec(weights=W.token()), T, "did you mean weight=Weight(...)?"),
    (lambda: rc.PPO(clip=0.2), T, "did you mean low= and high=?"),
    (lambda: rc.spec("verl.decoupled_token_is", uper=2.0), T, "did you mean upper=?"),
    (lambda: rc.spec("verl.decoupled_token_is", zzz=2.0), T, "; it takes ['upper'"),
    (lambda: rc.spec("verl"), V, "rc.spec('verl', config), or one of its names: verl."),
    (lambda: rc.spec("verl", {"rollout_is_treshold": 2}), V, "'rollout_is_threshold'?"),
    (lambda: rc.spec("trl.dapo"), V, "a whole loss: rc.recipe('trl.dapo')"),
    (lambda: rc.spec("megatron", {"x": 1}), V, "spec: expected a framework "),
    (lambda: rc.spec("megatron"), V, "spec: got the framework 'megatron' alone, expected one of its names: megat"),
    (lambda: rc.spec("verll", {}), V, "got 'verll', did you mean 'verl'?"),
    (lambda: rc.spec("trl.default", {"clip_max": 2.0}), V, "'trl.default' is built by name, "),
    (lambda: rc.recipe("verl", {}, {}), T, "expected a framework and one configuration, got 2"),
    (lambda: rc.recipe("trl"), V, "rc.recipe('trl', config), or one of its names: trl.async_"),
    (lambda: rc.recipe("trl.default"), V, "a correction without a loss: rc.spec('trl.default')"),
    (lambda: rc.recipe("verl.vanilla"), V, "'verl.vanilla'; verl has verl.bypass_pg_geo_rs, "),
    (lambda: rc.recipe("prime_rl.ppo"), V, "'prime_rl.dppo' or 'prime_rl.ipo'"),
    (lambda: rc.recipe("ppo"), V, ".ppo'"),
    (lambda: LOSS.backward(), A, "write .value.backward()"),
    (lambda: LOSS.item(), A, "write .value.item()"),
    (lambda: LOSS.values, A, "no attribute 'values'"),
]
TOGETHER = [
    (lambda: correct(rc.Batch(cu_seqlens=OFFSETS), spec=OF_ENTROPY), V, "entropy: expected the entropy of each token"),
    (lambda: rc.correct(X, X, rc.Batch(entropy=X[0])), V, "entropy: expected shape [2, 3] (of train_logp)"),
    (lambda: rc.correct(X, X, rc.Batch(entropy=X.long())), V, "entropy: expected a dtype among"),
    (lambda: rc.correct(X, X, rc.Batch(entropy=1.0)), T, "entropy: expected a tensor or a list of tensors, got float"),
    (lambda: rc.policy_loss(X, X, **bundled_loss(entropy_bonus=rc.EntropyBonus(1))), V, "entropy: expected a value, b"),
    (lambda: massed(z(2, 5)), V, "log_mass: expected shape [2, 3] (of train_logp), got"),
    (lambda: massed(IDS, call=rc.suggest), V, "log_mass: expected a dtype among"),
    (lambda: massed(0.5), T, "log_mass: expected a tensor, got float"),
    (lambda: massed(X, "both"), V, "kept_mass.of: expected one of"),
    (lambda: massed(z(2, 3) + 0.9), V, "log_mass: expected the log of a probability, at most 0, at every valid token"),
    (lambda: rc.correct(X, X, spec=AGES), V, "versions: expected rc.Versions(ids, current), because the Spec reads th"),
    (lambda: aged(X), V, "versions: expected a dtype among int64, int32, int16, int8, uint8, got float32"),
    (lambda: aged(IDS, 1.0), T, "versions.current: expected a whole number, got float"),
    (lambda: aged(IDS, True), T, "versions.current: expected a whole number, got bool"),
    (lambda: aged(IDS, 2**70), V, "versions.current: expected a number between -2^62 and 2^62, got"),
    (lambda: aged(IDS, 2**62), V, "versions.current: expected a number between -2^62 and 2^62, got"),
    (lambda: aged(IDS[:, :2]), V, "versions: expected shape [2, 3]"),
    (lambda: rc.proximal(LOGP, LOGP, BATCH), V, "versions: expected rc.Batch(versions=rc.Versions(ids, current)), got"),
    (lambda: rc.proximal(X, X, rc.Batch(versions=rc.Versions(IDS, 1)), interpolation="cubic"), V, "interpolation: exp"),
    (lambda: rc.proximal(X, X[:, :2], rc.Batch(versions=rc.Versions(IDS, 1))), V, "rollout_logp: expected shape"),
    (lambda: rc.future_kl_weights(X, X, half_life=0.0), V, "half_life: expected a finite number > 0, got 0.0"),
    (lambda: rc.future_kl_weights(X, X, lower=2.0), V, "lower: expected 0 <= lower <= upper, got lower=2.0, upper=1.2"),
    (lambda: rc.future_kl_weights(X, X, safety=4.0), V, "advantages: expected a value, because safety is given, got N"),
    (lambda: rc.future_kl_weights(X, X, mask=z(3)), V, "mask: expected shape [2, 3]"),
    (lambda: rc.early_token_weights(X, eps=0.0), V, "eps: expected a finite number > 0, got 0.0"),
    (lambda: rc.route_agreement(ROUTES.float(), ROUTES), V, "train_routes: expected integer expert indices"),
    (lambda: rc.route_agreement(ROUTES, ROUTES[..., :2]), V, "rollout_routes: expected shape [4, 2, 3]"),
    (lambda: rc.route_agreement(ROUTES[0], ROUTES[0]), V, "train_routes: expected [tokens, layers, experts]"),
    (lambda: rc.route_agreement(ROUTES, ROUTES, torch.ones(3)), V, "mask: expected shape [4]"),
    (lambda: rc.route_agreement(ROUTES, []), T, "rollout_routes: expected a tensor, got list"),
    (lambda: routed() + routed(train_weights=ROUTED, rollout_weights=ROUTED), V, "in both agreements or in neither"),
    (lambda: routed(rollout_weights=ROUTED), V, "train_weights: expected the weights of both engines"),
    (lambda: routed(train_weights=ROUTED, rollout_weights=[1.0]), T, "rollout_weights: expected a tensor, got list"),
    (lambda: routed(train_weights=ROUTED.to("meta"), rollout_weights=ROUTED), V, "train_weights: expected device cpu"),
    (
        lambda: routed(train_weights=ROUTED, rollout_weights=ROUTES),
        V,
        "rollout_weights: expected floating weights of sh",
    ),
    (
        lambda: rc.selection(z(3), z(3)) + rc.selection(z(3), z(3), rewards=z(3)),
        V,
        "other: expected the quantities ['le",
    ),
    (lambda: rc.selection(z(3), z(3)) + 3, T, "unsupported operand"),
    (lambda: rc.selection([True], ROUTES), T, "kept: expected a tensor, got list"),
    (lambda: rc.selection(z(2, 3), z(2)), V, "kept: expected shape [S], got [2, 3]"),
    (lambda: rc.selection(z(3), z(2)), V, "lengths: expected shape [3] (of kept), got [2]"),
    (lambda: rc.selection(z(3).long(), z(3)), V, "kept: expected dtype bool or floating, got int64"),
    (lambda: rc.selection(z(3), z(3), rewards=z(3).long()), V, "rewards: expected dtype floating, got int64"),
    (lambda: rc.selection(z(3), z(3), advantages=X), V, "advantages: expected shape [3] (of kept), got [2, 3]"),
    (lambda: rc.suggest(X, X, keep=1.0), V, "keep: expected a number between 0 and 1"),
    (lambda: rc.suggest(X, X, keep="0.9"), T, "keep"),
    (lambda: rc.suggest(X, X, mask=z(2, 3)), V, "mask: expected a valid token"),
    (lambda: rc.suggest(X, None), V, "rollout_logp: expected the log-probs of the engine"),
    (lambda: rc.warmup(*example(), spec=SPEC, mean_lengths=(5, 3)), V, "mean_lengths: expected"),
    (lambda: rc.warmup(*example(), loss=rc.PPO()), T, "loss: expected a rollout_corr.Loss, got PPO; write rc.Loss(PPO"),
    (lambda: grouped([1.0, 2.0]), T, "rewards: expected a tensor, got list"),
    (lambda: grouped((1, 2)), V, "rewards: expected a floating tensor of shape [S], got"),
    (lambda: grouped(keep=(True,)), V, "keep: expected shape [2] (of rewards), got [1]"),
    (lambda: grouped(keep=(1, 1)), V, "keep: expected dtype bool, got int64"),
    (lambda: grouped(group=(0.0, 0.0)), V, "group_index: expected dtype int64 or int32, got float32"),
    (lambda: grouped(group=(0, 2)), V, "group_index: expected numbers from 0 to 1"),
    (lambda: grouped(group=(0, -1)), V, "group_index: expected numbers from 0 to 1"),
    (lambda: grouped(alone="keep"), V, "alone: expected 'reward' or 'zero', got 'keep'"),
]
RECORDS_OF_TENSORS = [
    (
        lambda: rc.Batch(mask=[[1, 1, 1], [1, 0, 0]]),
        T,
        "mask: expected a tensor or a list of tensors, got list of list; ",
    ),
    (
        lambda: rc.Batch(mask=[MASK, None]),
        T,
        "mask: expected a tensor or a list of tensors, got list of NoneType; write",
    ),
    (
        lambda: rc.Batch(cu_seqlens=[0, 5, 12]),
        T,
        "cu_seqlens: expected a tensor, got list of int; write torch.tensor(..",
    ),
    (lambda: rc.Batch(cu_seqlens=[OFFSETS]), T, "cu_seqlens: expected a tensor, got list"),
    (
        lambda: rc.Batch(turns=(0, 2)),
        T,
        "turns: expected a tensor or a list of tensors, got tuple of int; write torch.t",
    ),
    (lambda: rc.Batch(scale=MASK.numpy()), T, "scale: expected a tensor or a list of tensors, got ndarray"),
    (
        lambda: rc.Batch(sequence_ids=[0, 1]),
        T,
        "sequence_ids: expected a tensor, got list of int; write torch.tensor(..",
    ),
    (lambda: rc.Batch(external=MASK), T, "external: expected a mapping of names to tensors, got Tensor"),
    (
        lambda: rc.Batch(external={"a": [1.0]}),
        T,
        "external['a']: expected a tensor or a list of tensors, got list of f",
    ),
    (
        lambda: rc.Batch(ranks=None),
        T,
        "ranks: expected rc.Ranks(batch=...) or rc.Ranks(sequence=...), got NoneType None",
    ),
    (lambda: rc.Batch(total="8"), T, "total: expected a number, got the string '8'"),
]
DUMPS = [
    (lambda: dump("x.parquet"), V, "path: expected a file name that ends in .jsonl, or a folder, which gets .pt files"),
    (lambda: dump(None), T, "path: expected a file name that ends in .jsonl, or a folder, got NoneType"),
    (lambda: dump(sequences=0), V, "sequences: expected a whole number >= 1 or None, got 0"),
    (lambda: dump(step=-5), V, "step: expected a whole number from 0 to 2**53 or None, got -5"),
    (lambda: dump(step=2**53 + 1), V, "step: expected a whole number from 0 to 2**53 or None, got 9007199254740993"),
    (lambda: dump(step=torch.ones((), device="meta")), V, "step: expected a whole number from 0 to 2**53 or None"),
    (lambda: dump(seed="x"), V, "seed: expected a whole number or None, got 'x'"),
    (lambda: dump(flags=MASK), V, "flags: expected a dtype among"),
    (lambda: dump(rollout=None), V, "rollout_logp: expected the log-probs of the engine"),
    (lambda: dump(batch=rc.Batch(cu_seqlens=OFFSETS, turns=torch.zeros(4))), V, "turns: expected shape"),
    (lambda: dump(batch=rc.Batch(mask=MASK)), V, "cu_seqlens: expected the offsets of the packed"),
    (lambda: dump(mask=MASK), V, "mask: expected None with a Batch"),
    (lambda: dump(lengths=ONES), V, "lengths: this name is taken"),
    (lambda: dump(turns=ONES), V, "turns: expected it in the Batch, rc.Batch(turns=...), got a column"),
    (lambda: dump(versions=ONES), V, "versions: expected it in the Batch, rc.Batch(versions=...), got a column"),
    (lambda: dump(label_names=["a"]), V, "label_names: expected it in the Batch, rc.Batch(labels=...), got a column"),
    (lambda: dump(token_ids=[1, 2]), T, "token_ids: expected a tensor, got list"),
    (lambda: dump(batch=rc.Batch(cu_seqlens=OFFSETS, labels={"mask": rc.Labels(z(3).long(), 2)})), V,
     "labels['mask']: expected another name, because a"),
    (lambda: dump(batch=rc.Batch(cu_seqlens=OFFSETS, external={"versions": ONES})), V,
     "external['versions']: expected another name"),
]  # fmt: skip
OWN = "expected memory of its own, got memory of"
OUTPUTS = [
    (lambda: rc.correct(X, X, out=(X,)), T, "out: expected rollout_corr.Outputs or None, got tuple"),
    (lambda: into([1.0]), T, "out.weights: expected a plain tensor or None, got list"),
    (lambda: into(z(6)), V, "out.weights: expected [2, 3] float32 on cpu (of train_logp), got [6] float32"),
    (lambda: into(X.double()), V, "out.weights: expected [2, 3] float32 on cpu (of train_logp), got [2, 3] float64"),
    (lambda: into(X.to("meta")), V, "(of train_logp), got [2, 3] float32 on meta"),
    (lambda: into(z(3, 2).T), V, "out.weights: expected a contiguous tensor, got strides (1, 2)"),
    (lambda: into(X.clone().requires_grad_()), V, "out.weights: expected a tensor that requires no grad"),
    (lambda: into(mask=IDS), V, "out.mask: expected [2, 3] bool on cpu"),
    (lambda: into(X.clone(), spec=rc.Spec()), V, "out.weights: expected None, because this Spec hands back no weights"),
    (lambda: into(mask=IDS, spec=rc.Spec()), V, "out.mask: expected None, because this Spec hands back the mask"),
    (lambda: into(X, train=list(X)), V, "out: expected None with a list of samples"),
    (lambda: into(X), V, f"out.weights: {OWN} train_logp"),
]


TABLES = (
    SHAPES, DTYPES_AND_DEVICES, TYPES, VALUES, RECORDS, HINTS, TOGETHER, RECORDS_OF_TENSORS, DUMPS, OUTPUTS,
)  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), [*itertools.chain(*TABLES)])
def test_a_mistake_names_the_argument_the_expectation_and_what_came(call, kind, message, monkeypatch, tmp_path):
    """In one line, and before anything is written."""
    monkeypatch.chdir(tmp_path)
    # What a user sees: the tests run where Triton interprets, and there the kernels take CPU tensors.
    monkeypatch.setattr(operators, "interprets", lambda: False)
    with pytest.raises(kind, match=re.escape(message)) as raised:
        call()
    assert "\n" not in str(raised.value) and list(tmp_path.iterdir()) == []


def test_a_loss_stays_an_ordinary_object():
    assert repr(pickle.loads(pickle.dumps(LOSS))) == repr(LOSS)
    assert not hasattr(LOSS, "__array__") and not hasattr(LOSS, "backward")
    assert pickle.loads(pickle.dumps(rc.correct)) is rc.correct


def test_a_loss_says_that_nothing_corrects_the_mismatch():
    """Only where rollout_logp is given and nothing reads it."""

    def said(surrogate=rc.PPO(), **given):  # noqa: B008  (frozen)
        new = X.clone().requires_grad_()
        loss = rc.policy_loss(new, torch.ones(2), loss=rc.Loss(surrogate), **given)
        return ["rollout_logp is not used" in one for one in loss.warnings()]

    assert said(old_logp=X, rollout_logp=X - 0.1) == [True]
    both, weights = {"old_logp": X, "rollout_logp": X - 0.1}, rc.Factors(weights=torch.ones(2, 3))
    for others in ({"old_logp": X}, {"rollout_logp": X - 0.1}, both | {"correction": weights}, both | {"spec": SPEC}):
        assert not any(said(**others)), others
    assert not said(rc.PPO(of="new/rollout"), **both)


def test_a_loss_says_that_it_has_no_gradient():
    """Of a policy that was detached, or computed under no_grad; torch's own error comes with backward."""
    new, (weight, graph) = X.clone().requires_grad_(), (torch.zeros(1, requires_grad=True), lambda x: X + x)
    for without, said in ((X, True), (new.detach(), True), (new, False), (graph(weight), False)):
        found = rc.policy_loss(without, torch.ones(2), old_logp=X).warnings()
        assert [one.startswith("new_logp requires no gradient") for one in found] == [True] * said


@pytest.mark.parametrize("total", [0, 0.0, torch.zeros(())])
def test_a_total_of_0_next_to_tokens_is_said(total):
    """It divides by 1, which is right where no rank has a token."""
    new = X.clone().requires_grad_()
    for mask, said in ((torch.ones(2, 3), True), (torch.zeros(2, 3), False)):
        found = rc.policy_loss(new, torch.ones(2), rc.Batch(mask=mask, total=total), old_logp=X)
        assert [one.startswith("total is 0 and 6 tokens train") for one in found.warnings()] == [True] * said


def test_the_repr_of_a_loss_is_short():
    assert repr(LOSS).startswith(f"PolicyLoss(value={LOSS.value.item():.6g}, mask=bool[2, 3], ")
