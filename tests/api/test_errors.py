"""Bad input is refused with the argument's name, what was expected and what came, from metadata alone."""

from __future__ import annotations

import re

import pytest
import torch

import rollout_corr as rc
from builders.calls import bundled
from rollout_corr.backends import operators

NEGATIVE = rc.Spec(criteria=(rc.Criterion("k1", upper=1, when="negative_advantage"),))
ENTROPY = rc.Spec(criteria=(rc.Criterion("external", upper=1, name="entropy"),))
FLOATS = "float32, bfloat16, float16, float64"


def z(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(*shape, dtype=dtype, device=device)


def offsets(*values, dtype=torch.int64, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


def jagged(*lengths):
    return torch.nested.nested_tensor([z(n) for n in lengths], layout=torch.jagged)


def packed(train=5, rollout=5, mask=None, spec=rc.Spec(), cu_seqlens=(0, 2, 5), **others):  # noqa: B008  (frozen)
    """`correct` on packed log-probs; numbers stand for a float32 tensor of zeros of that length."""
    train, rollout, mask = (z(x) if isinstance(x, int) else x for x in (train, rollout, mask))
    cu_seqlens = offsets(*cu_seqlens) if isinstance(cu_seqlens, tuple) else cu_seqlens
    return rc.correct(train, rollout, **bundled(mask=mask, cu_seqlens=cu_seqlens, spec=spec, **others))


def padded(rollout=(2, 5), mask=(2, 5), spec=rc.Spec(), **others):  # noqa: B008  (frozen)
    """`correct` on [2, 5] log-probs; tuples stand for a float32 tensor of zeros of that shape."""
    rollout, mask = (z(*x) if isinstance(x, tuple) else x for x in (rollout, mask))
    return rc.correct(z(2, 5), rollout, **bundled(mask=mask, spec=spec, **others))


def listed(train=(2, 3), rollout=(2, 3), mask=None, spec=rc.Spec(), **others):  # noqa: B008  (frozen)
    """`correct` on lists of samples; tuples of lengths stand for lists of float32 zeros."""
    train, rollout, mask = ([z(n) for n in x] if isinstance(x, tuple) else x for x in (train, rollout, mask))
    return rc.correct(train, rollout, mask=mask, spec=spec, **others)


SHAPES = {
    "no offsets": (
        lambda: packed(cu_seqlens=None),
        "cu_seqlens: expected the offsets of the packed sequences for 1-D log-probs of shape [5], got None",
    ),
    "length": (lambda: packed(rollout=4), "rollout_logp: expected shape [5] (of train_logp), got [4]"),
    "row for vector": (lambda: packed(rollout=z(1, 5)), "rollout_logp: expected shape [5] (of train_logp), got [1, 5]"),
    "0-D": (lambda: packed(z(()), z(())), "train_logp: expected shape [N], [1, N] or [B, T], got []"),
    "3-D": (
        lambda: rc.correct(z(2, 3, 4), z(2, 3, 4)),
        "train_logp: expected shape [N], [1, N] or [B, T], got [2, 3, 4]",
    ),
    "width": (lambda: padded((2, 4)), "rollout_logp: expected shape [2, 5] (of train_logp), got [2, 4]"),
    "broadcast": (lambda: padded((2, 1)), "rollout_logp: expected shape [2, 5] (of train_logp), got [2, 1]"),
    "mask length": (lambda: packed(mask=4), "mask: expected shape [5] (of train_logp), got [4]"),
    "mask broadcast": (lambda: padded(mask=(2, 1)), "mask: expected shape [2, 5] (of train_logp), got [2, 1]"),
    "padded and offsets": (
        lambda: padded(cu_seqlens=offsets(0, 5)),
        "cu_seqlens: expected None with padded log-probs of shape [2, 5] (each row is a sequence), got",
    ),
    "offsets 2-D": (
        lambda: packed(cu_seqlens=offsets([0, 5])),
        "cu_seqlens: expected shape [sequences + 1], got [1, 2]",
    ),
    "offsets 0-D": (
        lambda: packed(cu_seqlens=torch.tensor(5)),
        "cu_seqlens: expected shape [sequences + 1], got []",
    ),
    "no offset at all": (lambda: packed(cu_seqlens=()), "cu_seqlens: expected "),
    "unsorted": (
        lambda: packed(cu_seqlens=(0, 4, 2, 5)),
        "cu_seqlens: expected offsets that do not decrease, got cu_seqlens[1]=4 > cu_seqlens[2]=2",
    ),
    "negative": (
        lambda: packed(cu_seqlens=(-1, 5)),
        "cu_seqlens: expected offsets within [0, 5] tokens, got cu_seqlens[0]=-1",
    ),
    "beyond": (
        lambda: packed(cu_seqlens=(0, 6)),
        "cu_seqlens: expected offsets within [0, 5] tokens, got cu_seqlens[1]=6",
    ),
    "differences wrap around": (
        lambda: packed(spec=rc.Spec(rc.Weight.product()), cu_seqlens=(0, 2**62, -(2**63), -(2**62), 0)),
        "cu_seqlens: expected offsets that do not decrease, got cu_seqlens[1]=4611686018427387904 > cu_seqlens[2]=-92",
    ),
    "lengths": (
        lambda: packed(40, 40, cu_seqlens=(10, 10, 10, 10)),
        "cu_seqlens: expected offsets, which add lengths up, got lengths: 4 times 10 of 40 tokens",
    ),
    "validate covers": (
        lambda: packed(cu_seqlens=(1, 4), validate=True),
        "cu_seqlens: expected to start at 0 and end at 5 tokens, got 1 to 4",
    ),
    "jagged and offsets": (
        lambda: rc.correct(jagged(2, 3), jagged(2, 3), cu_seqlens=offsets(0, 2, 5)),
        "cu_seqlens: expected None with a nested tensor",
    ),
    "jagged and dense": (
        lambda: rc.correct(jagged(2, 3), z(5)),
        "rollout_logp: expected a jagged nested tensor like train_logp, got shape [5]",
    ),
    "jagged rows": (
        lambda: rc.correct(jagged(2, 3), jagged(2, 2, 1)),
        "rollout_logp: expected 2 rows and 5 tokens (of train_logp), got 3 and 5",
    ),
    "jagged tokens": (
        lambda: rc.correct(jagged(2, 3), jagged(2, 2)),
        "rollout_logp: expected 2 rows and 5 tokens (of train_logp), got 2 and 4",
    ),
    "jagged mask": (
        lambda: rc.correct(jagged(2, 3), jagged(2, 3), mask=z(5)),
        "mask: expected a jagged nested tensor like train_logp, got shape [5]",
    ),
    "jagged 3-D": (
        lambda: rc.correct(*[torch.nested.nested_tensor([z(2, 4), z(3, 4)], layout=torch.jagged)] * 2),
        "train_logp: expected a contiguous jagged tensor [S, ragged], got 3 dimensions",
    ),
    "samples": (
        lambda: listed(rollout=(2,)),
        "rollout_logp: expected a list of 1-D tensors of lengths [2, 3] (of train_logp), got [2]",
    ),
    "sample length": (
        lambda: listed(rollout=(2, 2)),
        "rollout_logp: expected a list of 1-D tensors of lengths [2, 3] (of train_logp), got [2, 2]",
    ),
    "sample mask": (
        lambda: listed(mask=(2, 2)),
        "mask: expected a list of 1-D tensors of lengths [2, 3] (of train_logp), got [2, 2]",
    ),
    "sample 2-D": (lambda: listed([z(2, 2)], [z(2, 2)]), "train_logp[0]: expected a 1-D tensor, got shape [2, 2]"),
    "sample None": (
        lambda: listed(rollout=[z(2), None]),
        "rollout_logp: expected a list of 1-D tensors of lengths [2, 3] (of train_logp), got [2, None]",
    ),
    "list and offsets": (
        lambda: listed(cu_seqlens=offsets(0, 2, 5)),
        "cu_seqlens: expected None with a list of samples",
    ),
    "advantages": (
        lambda: padded(spec=NEGATIVE, advantages=z(3)),
        "advantages: expected shape [2, 5] (per token), [2] or [2, 1] (per sequence), got [3]",
    ),
    "advantages by column": (
        lambda: padded(spec=NEGATIVE, advantages=z(5)),
        "advantages: expected shape [2, 5] (per token), [2] or [2, 1] (per sequence), got [5]",
    ),
    "advantages packed": (
        lambda: packed(spec=NEGATIVE, advantages=z(3)),
        "advantages: expected shape [5] (per token), [2] or [2, 1] (per sequence), got [3]",
    ),
    "advantages of samples": (
        lambda: listed(spec=NEGATIVE, advantages=[z(2), z(2)]),
        "advantages: expected a list of 1-D tensors of lengths [2, 3] (of train_logp), got [2, 2]",
    ),
    "unneeded advantages": (
        lambda: padded(advantages=z(7)),
        "advantages: expected shape [2, 5] (per token), [2] or [2, 1] (per sequence), got [7]",
    ),
    "external": (
        lambda: padded(spec=ENTROPY, external={"entropy": z(2, 4)}),
        "external['entropy']: expected shape [2, 5] (of train_logp), got [2, 4]",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_wrong_shapes_and_lengths(case):
    call, message = SHAPES[case]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()


DTYPES = {
    "train_logp": (lambda dtype: packed(train=z(5, dtype=dtype)), FLOATS),
    "rollout_logp": (lambda dtype: packed(rollout=z(5, dtype=dtype)), FLOATS),
    "mask": (lambda dtype: packed(mask=z(5, dtype=dtype)), "bool, uint8"),
    "advantages": (lambda dtype: packed(spec=NEGATIVE, advantages=z(5, dtype=dtype)), FLOATS),
    "external['entropy']": (lambda dtype: packed(spec=ENTROPY, external={"entropy": z(5, dtype=dtype)}), FLOATS),
}


@pytest.mark.parametrize("argument", DTYPES)
def test_wrong_dtypes(argument):
    call, known = DTYPES[argument]
    refused = [torch.complex64, torch.float8_e4m3fn]
    refused += [torch.bool] if argument != "mask" else []
    refused += [torch.int64, torch.int32, torch.uint8] if argument.endswith("logp") else []
    for dtype in refused:
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(
            ValueError,
            match=f"^{re.escape(f'{argument}: expected a dtype among {known}')}.*, got {name}(; is it the mask.*)?$",
        ):
            call(dtype)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.bool])
def test_wrong_dtype_of_offsets(dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"^cu_seqlens: expected dtype int32 or int64, got {name}$"):
        packed(cu_seqlens=offsets(0, 1, dtype=dtype))


DEVICES = {
    "rollout_logp": lambda: padded(z(2, 5, device="meta")),
    "mask": lambda: padded(mask=z(2, 5, device="meta")),
    "advantages": lambda: padded(spec=NEGATIVE, advantages=z(2, 5, device="meta")),
    "external['entropy']": lambda: padded(spec=ENTROPY, external={"entropy": z(2, 5, device="meta")}),
    "cu_seqlens": lambda: packed(cu_seqlens=offsets(0, 5, device="meta")),
}


@pytest.mark.parametrize("argument", DEVICES)
def test_wrong_devices(argument):
    with pytest.raises(ValueError, match=rf"^{re.escape(argument)}: expected .*cpu \(of train_logp\), got meta$"):
        DEVICES[argument]()


@pytest.mark.parametrize("argument", ["train_logp", "rollout_logp", "mask"])
def test_samples_of_a_list_share_dtype_and_device(argument):
    where = ["train_logp", "rollout_logp", "mask"].index(argument)
    for odd, got in ((z(3, dtype=torch.int64), "int64 on cpu"), (z(3, device="meta"), "float32 on meta")):
        arguments = [(2, 3), (2, 3), (2, 3)]
        arguments[where] = [z(2), odd]
        with pytest.raises(ValueError, match=rf"^{argument}\[1\]: expected float32 on cpu .*, got {got}$"):
            listed(*arguments)


TYPES = {
    "train None": (lambda: packed(train=None), "train_logp: expected a tensor, got NoneType"),
    "train array": (lambda: packed(train=z(5).numpy()), "train_logp: expected a tensor, got ndarray"),
    "train number": (lambda: packed(train=1.0), "train_logp: expected a tensor, got float"),
    "rollout array": (lambda: packed(rollout=z(5).numpy()), "rollout_logp: expected a tensor, got ndarray"),
    "mask list": (lambda: padded(mask=[z(5), z(5)]), "mask: expected a tensor, got list"),
    "mask array": (lambda: padded(mask=z(2, 5).numpy()), "mask: expected a tensor, got ndarray"),
    "offsets list": (
        lambda: packed(cu_seqlens=[0, 2, 5]),
        "cu_seqlens: expected an int32 or int64 tensor, got list",
    ),
    "tensor for list": (
        lambda: listed(rollout=z(5)),
        "rollout_logp: expected a list of 1-D tensors like train_logp, got Tensor",
    ),
    "advantages number": (lambda: padded(spec=NEGATIVE, advantages=1.0), "advantages: expected a tensor, got float"),
    "external tensor": (lambda: padded(spec=ENTROPY, external=z(2, 5)), "external: expected a mapping"),
    "external number": (
        lambda: padded(spec=ENTROPY, external={"entropy": 1.0}),
        "external['entropy']: expected a tensor, got float",
    ),
    "external None": (
        lambda: padded(spec=ENTROPY, external={"entropy": None}),
        "external['entropy']: expected a tensor, got NoneType",
    ),
    "spec dict": (lambda: padded(spec={}), "spec: expected a Spec, got dict"),
    "spec None": (lambda: padded(spec=None), "spec: expected a Spec, got NoneType"),
    "spec name": (lambda: padded(spec="verl"), "spec: expected a Spec, got str"),
    "spec weight": (lambda: padded(spec=rc.Weight.token()), "spec: expected a Spec, got Weight"),
    "merge": (lambda: padded().statistics.merge(3), "other: expected Statistics, got int"),
}


@pytest.mark.parametrize("case", TYPES)
def test_wrong_types(case):
    call, message = TYPES[case]
    with pytest.raises(TypeError, match="^" + re.escape(message)):
        call()


VALUES = {
    "advantages missing": (
        lambda: padded(spec=NEGATIVE),
        "advantages: expected a tensor for the criterion with when='negative_advantage', got None",
    ),
    "external missing": (
        lambda: padded(spec=ENTROPY),
        "external: expected a tensor under the name 'entropy', got []",
    ),
    "external of another name": (
        lambda: padded(spec=ENTROPY, external={"surprise": z(2, 5)}),
        "external: expected a tensor under the name 'entropy', got ['surprise']",
    ),
    "policies of the loss": (
        lambda: padded(spec=rc.Spec(criteria=(rc.Criterion("ratio", upper=2, of="new/old"),))),
        "spec: criterion 'token_ratio_of_new_old' compares new/old, which exists only inside policy_loss; "
        "correct() knows train/rollout",
    ),
    "backend": (lambda: padded(backend="cuda"), "backend: expected one of ['auto', 'triton', 'torch'"),
    "backend number": (lambda: padded(backend=3), "backend: expected one of ['auto', 'triton', 'torch'"),
    "backend without kernels": (
        lambda: padded(backend="triton"),
        "backend: expected 'auto' or 'torch' for cpu tensors, got 'triton'",
    ),
    "scheme": (
        lambda: padded().metrics("verl"),
        "names: expected 'dashboard' or one of ['native'] (Spec.report), got 'verl'",
    ),
    "unknown scheme": (
        lambda: padded().metrics("trl"),
        "names: expected 'dashboard' or one of ['native'] (Spec.report), got 'trl'",
    ),
    "statistics of another spec": (
        lambda: padded().statistics.merge(padded(spec=rc.Spec(detail="full")).statistics),
        "other: expected statistics of the same Spec Spec(",
    ),
    "sum of nothing": (lambda: rc.Statistics.sum([]), "parts: expected at least one Statistics, got none"),
}


@pytest.mark.parametrize("case", VALUES)
def test_wrong_values(case, monkeypatch):
    # What a user sees: the tests run where Triton interprets, and there the kernels take CPU tensors.
    monkeypatch.setattr(operators, "interprets", lambda: False)
    call, message = VALUES[case]
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()


def grouped(rewards=(1.0, 2.0), keep=(True, True), group=(0, 0), alone="reward"):
    """`filter_groups`; tuples stand for tensors."""
    tensors = (torch.tensor(x) if isinstance(x, tuple) else x for x in (rewards, keep, group))
    return rc.filter_groups(*tensors, alone=alone)


GROUPS = {
    "rewards list": (lambda: grouped([1.0, 2.0]), TypeError, "rewards: expected a tensor, got list"),
    "keep list": (lambda: grouped(keep=[True, True]), TypeError, "keep: expected a tensor, got list"),
    "group list": (lambda: grouped(group=[0, 0]), TypeError, "group_index: expected a tensor, got list"),
    "rewards dtype": (lambda: grouped((1, 2)), ValueError, "rewards: expected a floating tensor of shape [S], got"),
    "rewards 2-D": (lambda: grouped(z(2, 1)), ValueError, "rewards: expected a floating tensor of shape [S], got"),
    "keep length": (lambda: grouped(keep=(True,)), ValueError, "keep: expected shape [2] (of rewards), got [1]"),
    "keep dtype": (lambda: grouped(keep=(1, 1)), ValueError, "keep: expected dtype bool, got int64"),
    "keep device": (
        lambda: grouped(keep=z(2, dtype=torch.bool, device="meta")),
        ValueError,
        "keep: expected device cpu (of rewards), got meta",
    ),
    "group length": (lambda: grouped(group=(0,)), ValueError, "group_index: expected shape [2] (of rewards), got [1]"),
    "group dtype": (
        lambda: grouped(group=(0.0, 0.0)),
        ValueError,
        "group_index: expected dtype int64 or int32, got float32",
    ),
    "group range": (lambda: grouped(group=(0, 2)), ValueError, "group_index: expected numbers from 0 to 1"),
    "group negative": (lambda: grouped(group=(0, -1)), ValueError, "group_index: expected numbers from 0 to 1"),
    "alone": (lambda: grouped(alone="keep"), ValueError, "alone: expected 'reward' or 'zero', got 'keep'"),
}


@pytest.mark.parametrize("case", GROUPS)
def test_wrong_groups(case):
    call, error, message = GROUPS[case]
    with pytest.raises(error, match="^" + re.escape(message)):
        call()


def test_missing_rollout_log_probs_name_the_switch_of_each_framework():
    with pytest.raises(ValueError, match=r"^rollout_logp: expected the log-probs of the engine .*, got None") as raised:
        padded(rollout=None)
    for framework in ("verl", "xtuner", "SkyRL", "TRL", "slime", "OpenRLHF", "NeMo", "vLLM", "SGLang"):
        assert framework in str(raised.value)
