"""Errors of the backends: invalid bounds, groups, ranks, turns and labels, each named with what was expected."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import rollout_corr as rc
from builders.calls import bundled, bundled_loss, example

V, T = ValueError, TypeError
C = rc.Criterion
X, Z = torch.zeros(1, 3), torch.zeros(2, 4)
OF_BATCH = rc.Spec(criteria=(C("k2", upper=rc.Quantile(0.5)),))
OF_GROUP = rc.Spec(criteria=(C("abs", upper=rc.Quantile(0.6, within="group")),))
BY_GROUP = rc.Spec(rc.Weight.token(normalize="group"))
PREFIX, TURNS = rc.Spec(rc.Weight("prefix")), rc.Spec(turns=True)
OFFSETS = torch.tensor([0, 4, 6])


def correct(spec=rc.Spec(), x=X, **given):  # noqa: B008  (frozen)
    return rc.correct(x, x, **bundled(spec=spec, **given))


def split(group, n=4, spec=rc.Spec(), **given):  # noqa: B008  (frozen)
    """Two packed sequences over ranks, the second without a token."""
    zeros = torch.zeros(n)
    return rc.correct(
        zeros, zeros, **bundled(cu_seqlens=torch.tensor([0, n, n]), sequence_group=group, spec=spec, **given)
    )


def loss(advantages=Z, new=Z, **given):
    return rc.policy_loss(new, **bundled_loss(advantages=advantages, **given))


def turned(turns=None, n=6, spec=TURNS, **given):
    return rc.correct(torch.zeros(n), torch.zeros(n), **bundled(turns=turns, cu_seqlens=OFFSETS, spec=spec, **given))


def labeled(group, ids, n=4, **given):
    return split(group, n, labels={"e": ids}, label_names={"e": 3}, **given)


def two(*values):
    return torch.tensor(values)


BOUNDS = [
    (lambda _: correct(OF_BATCH, backend="triton"), V, "got 'triton': bounds that the batch decides run on plain torc"),
    (lambda g: correct(OF_BATCH, sequence_group=g), V, "spec: expected bounds that are numbers with ranks.sequence"),
    (lambda _: loss(X, X, spec=3, rollout_logp=X), T, "spec: expected a Spec or None, got int"),
    (lambda _: correct(OF_GROUP), V, "for a bound with within='group', got None"),
    (lambda _: rc.MeanBelow(1.0, within="rows"), V, "MeanBelow.within: expected one of"),
    (lambda _: rc.Quantile(0.5, within="groups"), V, "Quantile.within: expected one of ['batch', 'group']"),
    (lambda _: rc.Weight.token(upper=rc.Quantile(0.5, "group")), V, "a rule within='batch'"),
]
GROUPS = [
    (lambda _: correct(BY_GROUP), V, "groups: expected rc.Groups(index=...) or rc.Groups(size=...) for a weight with"),
    (lambda _: correct(BY_GROUP, group_index=two(1)), V, "groups.index: expected numbers from 0 to 0 (as many as sequ"),
    (lambda _: correct(BY_GROUP, group_index=two(2), group_count=2), V, "expected numbers from 0 to 1 (groups.count),"),
    (lambda _: correct(BY_GROUP, group_index=two(0, 0)), V, "groups.index: expected shape [1] or [1, 1], got [2]"),
    (lambda _: correct(BY_GROUP, group_index=[0]), T, "groups.index: expected a tensor, got list"),
    (lambda _: correct(BY_GROUP, group_index=two(0.0)), V, "groups.index: expected int32 or int64, got float32"),
    (lambda _: correct(BY_GROUP, group_size=2), V, "groups.size: expected a divisor of the 1 sequences, got 2"),
    (lambda _: correct(BY_GROUP, group_size=0), V, "groups.size: expected an integer above 0 or None, got 0"),
    (lambda _: correct(BY_GROUP, group_size=True), V, "groups.size: expected an integer above 0"),
    (lambda g: correct(BY_GROUP, group_index=two(0), batch_group=g), V, "groups.count: expected the number of groups"),
    (lambda _: split("cp"), T, "ranks.sequence: expected a torch.distributed process group or None, got str"),
    (lambda _: correct(batch_group=3), T, "ranks.batch: expected a torch.distributed process group or None, got int"),
    (lambda _: split(dist.GroupMember.NON_GROUP_MEMBER), T, "got a group that this rank does not belong to"),
    (lambda _: split(init_device_mesh("cpu", (1,))), T, "got DeviceMesh; take mesh.get_group(dimension)"),
    (lambda _: correct(x=DTensor.from_local(Z, init_device_mesh("cpu", (1,)))), T, "got a DTensor; pass train_logp.to"),
    (lambda g: loss(sequence_group=g, backend="triton"), V, "'auto' or 'torch' for a loss with ranks.sequence, got"),
    (lambda g: split(g, spec=PREFIX), V, "spec: expected no weight or criterion over prefixes with ranks.sequence"),
    (lambda g: labeled(g, two(0, 1, 1, 0), backend="triton"), V, "for labels with ranks.sequence, got 'triton'"),
    (lambda g: labeled(g, two(0, 1)), V, "labels['e']: expected shape [S, 1] with ranks.sequence, where [2] can"),
    (lambda g: labeled(g, two(0, 1, 2), 5, turns=two(0, 0, 4, 5)), V, "labels['e']: expected shape [3, 1] (per turn)"),
    (lambda g: split(g, advantages=torch.zeros(2)), V, "advantages: expected shape [S, 1] with ranks.sequence, where"),
    (lambda g: loss(torch.zeros(2, 1), sequence_group=g), V, "advantages: expected shape [S] with ranks.sequence, whe"),
    (lambda g: correct(sequence_group=g, cu_seqlens=two(0, 3), advantages=two([1.0])), V, "advantages: expected shape"),
    (lambda _: rc.warmup(*example()[:2], Z, spec=rc.Spec()), T, "batch: expected rc.Batch"),
    (lambda _: rc.warmup(*example(), spec=rc.Spec(), advantages=torch.zeros(5)), V, "advantages: expected"),
    (lambda _: rc.warmup(*example(), spec="token"), T, "spec: expected a Spec"),
    (lambda _: rc.backend_for(3), T, "tensor: expected a tensor, got int"),
    (lambda _: rc.backend_for(X, 3), T, "spec: expected a Spec or None"),
    (lambda _: rc.backend_for(X, surrogate=3), T, "surrogate: expected a surrogate such as"),
]
OF_TURNS = [
    (lambda _: turned(), V, "turns: expected offsets"),
    (lambda _: turned(two(0, 3, 6)), V, "turns: expected every sequence to begin with a turn, got none at 4"),
    (lambda _: turned(two(0, 4, 5)), V, "turns: expected offsets whose last is 6, where the last sequence ends"),
    (lambda _: turned(two(1, 4, 6)), V, "turns: expected offsets whose first is 0, where the first sequence begins"),
    (lambda _: turned(two(0, 4, 9)), V, "turns: expected offsets within [0, 6]"),
    (lambda _: turned(two(3, 3, 1, 1, 3)), V, "have the shape of the log-probs, [6], not [5]"),
    (lambda _: turned(two().long()), V, "turns: expected shape [turns + 1], got [0]"),
    (lambda _: turned(two(0, 0, 4, 4, 5, 6)), V, "turns: expected ids or offsets, got 6 values for as many tokens"),
    (lambda _: turned(torch.zeros(6)), V, "turns: expected a dtype among "),
    (lambda _: turned(torch.zeros(2, 3).long()), V, "turns: expected shape [6] (of train_logp), got [2, 3]"),
    (lambda _: turned("run"), V, "turns: expected offsets, ids or 'runs', got 'run'"),
    (lambda _: turned([1, 2]), T, "turns: expected a tensor or a list of tensors, got list of int"),
    (lambda _: turned(OFFSETS, max_turns=4), V, "turns.ids: expected ids or 'runs', got offsets [3]; pass them as tur"),
    (lambda _: turned("runs", max_turns=0), V, "turns.at_most: expected an integer above 0, got 0"),
    (lambda _: turned(torch.arange(6) + 7, max_turns=5), V, "turns.at_most: expected at least the 6 turns of the batc"),
    (lambda g: turned("runs", sequence_group=g), V, "turns: expected offsets with ranks.sequence"),
    (lambda _: loss(spec=TURNS, rollout_logp=Z), V, "turns: expected offsets"),
    (lambda _: loss(surrogate=rc.GSPO(over="turn"), rollout_logp=Z), V, "turns: expected offsets, ids or 'runs' for G"),
]


@pytest.mark.parametrize(("call", "kind", "message"), [*BOUNDS, *GROUPS, *OF_TURNS])
def test_what_cannot_be_is_refused(call, kind, message, alone):
    with pytest.raises(kind, match=re.escape(message)):
        call(alone)
