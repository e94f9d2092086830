"""The functions for slime and miles beside plain loops: settings of mis.yaml, context parallelism, metrics."""

from __future__ import annotations

import itertools
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import rollout_corr as rc
from rollout_corr.frameworks.slime import config, functions

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [5, 1, 9, 4, 6]
MIS = {
    "use_tis": True,
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.7,
    "tis_upper_bound": 1.4,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 0.5,
    "tis_batch_normalize": True,
}


def settings(**changed):
    assert set(changed) <= set(MIS)
    return SimpleNamespace(**MIS | changed)


def batch(seed=0, dtype=torch.float64):
    made = torch.Generator().manual_seed(seed)

    def random(draw, n):
        return draw(n, generator=made, dtype=torch.float64)

    rollout = [random(torch.rand, n).log() for n in LENGTHS]
    train = [x + 0.3 * random(torch.randn, x.shape[0]) for x in rollout]
    masks = [(random(torch.rand, n) < 0.8).int() for n in LENGTHS]
    masks[3] *= 0
    loss = random(torch.randn, sum(LENGTHS))
    given = {"train_log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks, "pg_loss": loss}
    for name in ("train_log_probs", "rollout_log_probs"):
        given[name] = [x.to(dtype) for x in given[name]]
    lengths = {"total_lengths": [n + 3 for n in LENGTHS], "response_lengths": LENGTHS}
    return given | lengths


def samples_of(given):
    """A list of (D, valid) a sample."""
    columns = (given["train_log_probs"], given["rollout_log_probs"], given["loss_masks"])
    return [
        [(o - r, bool(ok)) for o, r, ok in zip(*(x.tolist() for x in sample), strict=True)]
        for sample in zip(*columns, strict=True)
    ]


def ratios(sample, level):
    """The ratio of each token at a level."""
    d = [x for x, ok in sample if ok]
    whole = {"sequence": math.fsum(d), "geometric": math.fsum(d) / max(len(d), 1)}
    return [math.exp(whole.get(level, x)) for x, _ in sample]


def by_hand(given, args):
    """Weights before normalization and masks, as loops over samples and tokens."""
    weights, masks = [], []
    low, high = args.tis_lower_bound or 1 / args.tis_upper_bound, args.tis_upper_bound
    rs_low, rs_high = args.rs_lower_bound or low, args.rs_upper_bound or high
    for sample in samples_of(given):
        raw, tested = ratios(sample, args.tis_level), ratios(sample, args.rs_level)
        bounds = {"truncate": (0.0, high), "clip": (low, high), "mask": (0.0, math.inf)}[args.tis_mode]
        weights.append(
            [min(max(r, bounds[0]), bounds[1]) if ok else 0.0 for r, (_, ok) in zip(raw, sample, strict=True)]
        )
        keep = [ok for _, ok in sample]
        if args.tis_mode == "mask":
            keep = [ok and low <= r <= high for ok, r in zip(keep, raw, strict=True)]
        if args.use_rs:
            keep = [ok and rs_low <= r <= rs_high for ok, r in zip(keep, tested, strict=True)]
            veto = args.rs_veto_threshold
            if veto is not None and any(ok and math.exp(x) < veto for x, ok in sample):
                keep = [False] * len(keep)
        masks.append([float(ok) for ok in keep])
    return weights, masks


COMBINATIONS = [
    dict(zip(("tis_level", "tis_mode", "rs_level", "use_rs", "rs_veto_threshold"), values, strict=True))
    for values in itertools.product(config.LEVELS, config.MODES, config.LEVELS, (True, False), (None, 0.5))
]


@pytest.mark.parametrize("mode", config.MODES)
@pytest.mark.parametrize("level", config.LEVELS)
def test_weights_and_masks(level, mode):
    wide = {"token": (0.7, 1.4), "sequence": (0.5, 2.0), "geometric": (0.9, 1.1)}
    for combination in (c for c in COMBINATIONS if (c["tis_level"], c["tis_mode"]) == (level, mode)):
        rs = wide[combination["rs_level"]]
        bounds = dict(zip(("tis_lower_bound", "tis_upper_bound"), wide[level], strict=True))
        bounds |= {"rs_lower_bound": rs[0], "rs_upper_bound": rs[1]}
        given, args = batch(), settings(**combination, **bounds, tis_batch_normalize=False)
        loss, masks, _ = functions.mis(args, **given)
        weights, expected = by_hand(given, args)
        flat = torch.tensor([*itertools.chain(*weights)], dtype=torch.float64)
        torch.testing.assert_close(loss, given["pg_loss"] * flat, rtol=1e-12, atol=0.0)
        assert [mask.tolist() for mask in masks] == expected
        assert {mask.dtype for mask in masks} == {torch.float32}


@pytest.mark.parametrize("level", config.LEVELS)
def test_normalized(level):
    """Divided by the mean over tokens; above the token level each sample with a valid token counts once."""
    given, args = batch(), settings(tis_level=level)
    loss, _, metrics = functions.mis(args, **given)
    weights, _ = by_hand(given, args)
    flat = torch.tensor([*itertools.chain(*weights)], dtype=torch.float64)
    valid = torch.cat(given["loss_masks"]) != 0
    of_samples = [max(row) for row, mask in zip(weights, given["loss_masks"], strict=True) if mask.any()]
    mean = flat[valid].mean() if level == "token" else torch.tensor(of_samples, dtype=torch.float64).mean()
    torch.testing.assert_close(loss, given["pg_loss"] * flat / mean, rtol=1e-12, atol=0.0)
    assert metrics["mis_batch_norm_factor"].tolist() == pytest.approx([float(mean)] * sum(LENGTHS), rel=1e-6)


def test_metrics():
    """A value for each token of what the samples and the tokens say; checked where the mask is set."""
    given, args = batch(), settings(tis_batch_normalize=False)
    found = functions.mis(args, **given)[2]
    at = 0
    for i, sample in enumerate(samples_of(given)):
        d = [x for x, ok in sample if ok]
        train, rollout = (
            [x for x, (_, ok) in zip(given[name][i].tolist(), sample, strict=True) if ok]
            for name in ("train_log_probs", "rollout_log_probs")
        )
        for j, (x, ok) in enumerate(sample):
            if not ok:
                continue
            n, gap = len(d), math.fsum(rollout) / len(d) - math.fsum(train) / len(d)
            w = [min(math.exp(y), 1.4) for y in d]
            expected = {
                "training_log_ppl": -math.fsum(train) / n,
                "training_ppl": math.exp(-math.fsum(train) / n),
                "rollout_log_ppl": -math.fsum(rollout) / n,
                "rollout_ppl": math.exp(-math.fsum(rollout) / n),
                "log_ppl_diff": gap,
                "log_ppl_abs_diff": abs(gap),
                "ppl_ratio": math.exp(gap),
                "kl": -x,
                "k3_kl": math.expm1(x) - x,
                "chi2_token": math.fsum(math.exp(2 * y) for y in d) / n - 1,
                "chi2_seq": math.exp(2 * math.fsum(d)) - 1,
                "tis_weight_before_bound": math.exp(x),
                "tis_truncate_fraction": math.exp(x) > 1.4,
                "tis_weight_after_bound": min(math.exp(x), 1.4),
                "is_ratio_mean_after_tis_rs": min(math.exp(x), 1.4),
                "rs_mask_fraction_low": math.exp(x) < 0.7,
                "rs_mask_fraction_high": math.exp(x) > 1.4,
                "rs_catastrophic_token_fraction": math.exp(x) < 0.5,
                "rs_catastrophic_seq_fraction": any(math.exp(y) < 0.5 for y in d),
                "is_ratio_mean_final": math.fsum(w) / n,
                "is_ratio_min_final": min(w),
                "is_ratio_max_final": max(w),
            }
            values = {key.removeprefix("mis_"): float(value[at + j]) for key, value in found.items()}
            expected = {key: float(value) for key, value in expected.items()}
            assert values == pytest.approx(expected, rel=1e-9, abs=1e-12)
        at += len(sample)
    assert {value.shape for value in found.values()} == {(sum(LENGTHS),)}


def test_metrics_only():
    """Without --use-tis nothing is corrected, and eleven metrics of the mismatch are given."""
    given = batch()
    loss, masks, metrics = functions.mis(settings(use_tis=False), **given)
    assert loss is given["pg_loss"] and all(a is b for a, b in zip(masks, given["loss_masks"], strict=True))
    assert len(metrics) == 11


@pytest.mark.parametrize("function", [functions.tis, functions.icepop])
def test_per_token(function):
    given, args = batch(), SimpleNamespace(tis_clip=1.3, tis_clip_low=0.8)
    loss, masks, metrics = function(args, **given)
    ratio = (torch.cat(given["train_log_probs"]) - torch.cat(given["rollout_log_probs"])).exp()
    inside = (ratio >= 0.8) & (ratio <= 1.3)
    weight = ratio.clamp(0.8, 1.3) if function is functions.tis else torch.where(inside, ratio, 0.0)
    valid = torch.cat(given["loss_masks"]) != 0
    torch.testing.assert_close(loss[valid], (given["pg_loss"] * weight)[valid], rtol=1e-12, atol=0.0)
    assert not loss[~valid].any() and all(a is b for a, b in zip(masks, given["loss_masks"], strict=True))
    expected = {"tis": ratio, "tis_clipfrac": ~inside, "tis_abs": (ratio - 1).abs()}
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(metrics[key][valid].double(), value[valid].double(), rtol=3e-6, atol=3e-7)


def test_gradient():
    """Through the loss alone."""
    given = batch()
    given["pg_loss"].requires_grad_()
    given["train_log_probs"][0].requires_grad_()
    for function, args in (
        (functions.mis, settings()),
        (functions.tis, SimpleNamespace(tis_clip=2.0, tis_clip_low=0.0)),
    ):
        loss, _, metrics = function(args, **given)
        assert loss.requires_grad and not any(value.requires_grad for value in metrics.values())
        loss.sum().backward()
    assert given["pg_loss"].grad.any() and given["train_log_probs"][0].grad is None


def test_nonfinite():
    """A token without a log-prob takes its sample along; behind the mask it is nothing."""
    given = batch()
    expected = functions.mis(settings(tis_batch_normalize=False), **given)
    behind = int((given["loss_masks"][2] == 0).nonzero()[0])
    given["rollout_log_probs"][2][behind] = math.nan
    found = functions.mis(settings(tis_batch_normalize=False), **given)
    assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
    given["rollout_log_probs"][2][:] = math.nan
    loss, masks, metrics = functions.mis(settings(), **given)
    assert not masks[2].any() and loss.isfinite().all() and all(value.isfinite().all() for value in metrics.values())


class Tools(ModuleType):
    """Context parallelism over two ranks, of which this is the first: it has the first half of each response."""

    def __init__(self, name, wholes, *layout):
        super().__init__(name)
        self.wholes, self.layout = wholes, layout

    def slice_log_prob_with_cp(self, x, total, response, *layout):
        assert len(x) == response == total - 3 and layout == self.layout
        return x[: (response + 1) // 2]

    def all_gather_with_cp(self, x, total, response, *layout):
        assert layout == self.layout
        (whole,) = (y for y in self.wholes if len(y) == response and torch.equal(y[: len(x)], x))
        return whole


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("name", functions.CONTEXT_PARALLEL)
def test_context_parallel(name, qkv_format, monkeypatch):
    """A rank gets the part of its tokens of what one rank alone gets; the masks are whole.

    The conformance rows do it with slime's and miles's own tools.
    """
    given = batch()
    alone = {"mis": functions.mis(settings(), **given)}
    bounds = SimpleNamespace(tis_clip=1.3, tis_clip_low=0.8)
    alone["tis"] = functions.tis(bounds, **given)
    here = torch.cat([torch.arange(n) < (n + 1) // 2 for n in LENGTHS])
    part = dict(given, pg_loss=given["pg_loss"][here])
    for key in ("train_log_probs", "rollout_log_probs"):
        part[key] = [x[: (len(x) + 1) // 2] for x in given[key]]
    layout = ("bshd", 16) if qkv_format == "bshd" else ()
    tools = Tools(name, [*given["train_log_probs"], *given["rollout_log_probs"]], *layout)
    monkeypatch.setitem(sys.modules, name, tools)
    for function, args in (("mis", settings()), ("tis", bounds)):
        args.qkv_format = qkv_format
        if layout:
            with pytest.raises(ValueError, match="max_seq_lens: expected the padded lengths"):
                getattr(functions, function)(args, **part)
            part["max_seq_lens"] = [16] * len(LENGTHS)
        loss, masks, metrics = getattr(functions, function)(args, **part)
        part.pop("max_seq_lens", None)
        expected = alone[function]
        torch.testing.assert_close(loss, expected[0][here], rtol=1e-12, atol=0.0)
        assert all(map(torch.equal, masks, expected[1]))
        for key, value in metrics.items():
            torch.testing.assert_close(value, expected[2][key][here], rtol=1e-6, atol=1e-7)


def test_is_the_preset():
    """mis.yaml as it is shipped is the preset."""
    args = settings(tis_lower_bound=0.5, tis_upper_bound=2.0, rs_veto_threshold=1e-4)
    spec = config.mis_spec(config.mis_settings(args))
    preset = rc.spec("slime.mis")
    assert spec.weight == preset.weight
    bounds = [(c.stat, c.over, c.reduce, c.lower, c.upper, c.drop) for c in spec.criteria]
    assert bounds == [(c.stat, c.over, c.reduce, c.lower, c.upper, c.drop) for c in preset.criteria]


def test_errors():
    given = batch()
    for change, message in (
        ({"tis_level": "word"}, "tis_level: expected one of"),
        ({"tis_mode": "word"}, "tis_mode: expected one of"),
        ({"rs_level": "word"}, "rs_level: expected one of"),
        ({"tis_upper_bound": 0.0}, "tis_upper_bound: expected a number > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            functions.mis(settings(**change), **given)
    given["loss_masks"][1] = torch.ones(2)
    with pytest.raises(ValueError, match=r"loss_masks: expected samples of lengths .*, got \[5, 2, 9, 4, 6\]"):
        functions.mis(settings(), **given)
