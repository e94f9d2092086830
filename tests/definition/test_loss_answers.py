"""Masks and statistics that a policy loss returns, and arguments that it refuses."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled_loss
from builders.rounding import near
from rollout_corr.specs.surrogate import Surrogate

pytestmark = pytest.mark.usefixtures("one_thread")


def z(*shape):
    return torch.zeros(*shape)


def test_masks_that_come_back():
    new, mask = z(2, 3).requires_grad_(), torch.tensor([[1.0, 0.3, 0.0], [1.0, 1.0, 1.0]])
    trains = torch.tensor([[1, 1, 1], [0, 1, 0]])
    assert rc.policy_loss(new, new, mask=mask).mask is mask
    assert rc.policy_loss(new, new).mask.all()
    out = rc.policy_loss(new, new, mask=mask, correction=rc.Factors(mask=trains))
    assert out.mask.dtype == mask.dtype and out.mask.tolist() == [[1.0, mask[0, 1].item(), 0.0], [0.0, 1.0, 0.0]]
    assert rc.policy_loss(new, new, correction=rc.Factors(mask=trains)).mask.tolist() == trains.bool().tolist()
    assert out.weights is None and out.keep is None and out.warnings() == []
    spec = rc.Spec(rc.Weight.token())
    out = rc.policy_loss(new, new, mask=mask, rollout_logp=new, spec=spec)
    assert out.weights.tolist() == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]] and out.keep.tolist() == [True, True]
    rows = [z(3), z(2)]
    out = rc.policy_loss(rows, rows, rollout_logp=rows, spec=spec)
    assert [row.shape[0] for row in out.weights] == [3, 2] and len(out.mask) == 2


def test_statistics_merge_and_name_what_differs():
    generator = torch.Generator().manual_seed(0)
    new, advantages, rollout = (torch.randn(4, 5, generator=generator) for _ in range(3))
    spec = rc.Spec(rc.Weight.token(upper=2.0))
    whole = rc.policy_loss(new, advantages, rollout_logp=rollout, spec=spec)
    parts = [
        rc.policy_loss(new[i : i + 2], advantages[i : i + 2], rollout_logp=rollout[i : i + 2], spec=spec)
        for i in (0, 2)
    ]
    merged = rc.Statistics.sum(part.statistics for part in parts)
    assert merged.metrics().keys() == whole.metrics().keys()
    assert merged.metrics() == near(whole.metrics(), torch.float32)
    assert whole.metrics_async().result() == whole.metrics()
    assert whole.statistics.to("cpu").metrics() == whole.metrics()
    other = rc.policy_loss(new, advantages, loss=rc.Loss(rc.GPG()), rollout_logp=rollout, spec=spec)
    with pytest.raises(ValueError, match=r"^other: expected statistics of the same objective Objective\(PPO"):
        whole.statistics.merge(other.statistics)
    with pytest.raises(ValueError, match=r"^names: expected 'dashboard' or one of \['native'\]"):
        rc.policy_loss(new, advantages).metrics("verl")


def call(*given, **options):
    """A loss of two sequences of three tokens."""
    given = given or (z(2, 3), z(2))
    return rc.policy_loss(*given, **bundled_loss(**options))


ROWS, SPEC, WEIGHTED = z(2, 3), rc.Spec(), rc.Spec(rc.Weight.token())
OLD_NEW = rc.Spec(criteria=(rc.Criterion("ratio", upper=1.0, of="new/old"),))
V, T = ValueError, TypeError
REFUSED = [
    (lambda: call(ROWS, None), V, "advantages: expected one per token or per sequence, got None"),
    (lambda: call(ROWS, z(3)), V, "advantages: expected shape [2, 3] (per token), [2] or [2, 1] (per sequence), got ["),
    (lambda: call(z(1, 2, 3), z(2)), V, "new_logp: expected shape [N], [1, N] or [B, T], got [1, 2, 3]"),
    (lambda: call(old_logp=z(3, 2)), V, "old_logp: expected shape [2, 3] (of new_logp), got [3, 2]"),
    (lambda: call(kl=rc.KL("k1", 0.1)), V, "ref_logp: expected a value, because Loss.kl is given, got None"),
    (lambda: call(ref_logp=ROWS), V, "Loss.kl: expected a value, because ref_logp is given, got None"),
    (lambda: call(weights=z(2)), V, "Factors.weights: expected shape [2, 3] (of new_logp), got [2]"),
    (lambda: call(scale=z(3)), V, "scale: expected shape [2, 3] (per token), [2] or [2, 1] (per sequence), got [3]"),
    (lambda: call(scale=z(2), surrogate=rc.GMPO(), backend="triton"), V, "backend: expected 'auto' or 'torch', got 't"),
    (lambda: call(rollout_logp=ROWS, weights=ROWS), V, "correction: expected no weights in bypass mode, where PPO's o"),
    (lambda: call(train_mask=z(2)), V, "Factors.mask: expected shape [2, 3] (of new_logp), got [2]"),
    (lambda: call(total=7.0, mean=rc.Mean(over="kept")), V, "total: expected None with Mean(over='kept'), got both"),
    (lambda: call(old_logp=ROWS, spec=SPEC), V, "rollout_logp: expected the log-probs of the engine that sampled"),
    (lambda: call(rollout_logp=ROWS, spec=OLD_NEW), V, "old_logp: expected log-probs for criterion 'token_ratio_of_ne"),
    (lambda: call(surrogate=rc.PPO(of="new/rollout"), old_logp=ROWS), V, "rollout_logp: expected log-probs for a surr"),
    (
        lambda: call(surrogate=rc.Score(upper=2.0), rollout_logp=ROWS, spec=WEIGHTED),
        V,
        "Loss.surrogate: expected Score() w",
    ),
    (lambda: rc.Mean("mean"), V, "Mean.of: expected one of ['token', 'sequence', 'sequence_sum', 'sum'], got 'mean'"),
    (lambda: rc.Mean(over="all"), V, "Mean.over: expected one of ['original', 'kept', 'rows'], got 'all'"),
    (lambda: rc.Mean("sum", "kept"), V, "Mean.over: expected its default with of='sum', which does not divide, got 'k"),
    (lambda: call(total=z(2)), V, "total: expected a number or a tensor that holds one, got float32 of shape [2]"),
    (lambda: call(backend="compiled"), V, "backend: expected one of ['auto', 'triton', 'torch'] for policy_loss, got "),
    (lambda: rc.PPO(dual=0.5), V, "PPO.dual: expected a number >= 1, got 0.5"),
    (lambda: rc.PPO(of="old"), V, "PPO.of: expected one of ['new/old', 'new/rollout'], got 'old'"),
    (lambda: rc.PPO(clamp=50.0), V, "PPO.clamp: expected a finite number > 0 and <= 40, got 50.0"),
    (lambda: rc.Score(2.0, 1.0), V, "Score: expected lower <= upper, got lower=2.0, upper=1.0"),
    (lambda: rc.DPPO("js"), V, "DPPO.divergence: expected one of ['tv', 'kl'], got 'js'"),
    (lambda: rc.SAPO(0.0), V, "SAPO.positive: expected a finite number > 0, got 0.0"),
    (lambda: rc.KL("full", 0.1), V, "KL.kind: expected one of ['k1', 'k2', 'k3', 'abs'], got 'full'"),
    (lambda: rc.KL("k1", -0.1), V, "KL.coef: expected a finite number >= 0, got -0.1"),
    (lambda: rc.SquaredLogRatio(0.1, "some"), V, "SquaredLogRatio.scope: expected one of ['kept', 'all'], got 'some'"),
    (lambda: call(surrogate="ppo"), T, "Loss.surrogate: expected a surrogate such as PPO(), got str"),
    (lambda: call(kl=0.1, ref_logp=ROWS), T, "Loss.kl: expected KL(...) or None, got float"),
    (lambda: call(regularizer=0.1), T, "Loss.regularizer: expected SquaredLogRatio(...) or None"),
    (lambda: call(rollout_logp=ROWS, spec={}), T, "spec: expected a Spec or None, got dict"),
    (lambda: call(correction=(1, 2)), T, "correction: expected what correct() gives, or rc.Factors, got tuple"),
    (lambda: Surrogate(), T, "Surrogate: expected one of its kinds"),
]


@pytest.mark.parametrize(("made", "kind", "message"), REFUSED)
def test_what_is_wrong_is_named(made, kind, message):
    with pytest.raises(kind, match="^" + re.escape(message)):
        made()
