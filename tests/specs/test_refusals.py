"""What the frozen types refuse, a row each: the call, and how its error begins. "…" is whatever stands there."""

from __future__ import annotations

import math

import pytest
import torch

import rollout_corr as rc
from rollout_corr.specs.choices import REDUCTIONS, STATS, WHEN

NAMES = {name: getattr(rc, name) for name in rc.__all__} | {"nan": math.nan, "inf": math.inf}
X = torch.zeros(2, 3)


def refused(python, error, message):
    with pytest.raises(error) as raised:
        eval(python, NAMES | {"X": X})
    first, *others = message.split("…")
    said = str(raised.value)
    assert said.startswith(first), said
    for piece in others:
        assert piece in said, str(raised.value)
        said = said.partition(piece)[2]


CHOICES = {
    'Weight({})': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix']",
    'Weight("sequence", {})': "Weight.reduce: expected one of ['sum', 'mean']",
    'Weight.product(over={})': "Weight.over: expected one of ['turn', 'sequence']",
    'Weight.token(outside={})': "Weight.outside: expected one of ['clamp', 'zero']",
    'Weight("prefix", reduce={})': "Weight.reduce: expected one of ['sum', 'mean', 'min']",
    'Weight("prefix", growth={})': "Weight.growth: expected one of ['sqrt']",
    'Weight.token(normalize={})': "Weight.normalize: expected one of ['batch', 'group', 'sequence']",
    'Criterion({}, upper=2)': f"Criterion.stat: expected one of {list(STATS)}",
    'Criterion("k1", upper=2, over={})': "Criterion.over: expected one of ['token', 'turn', 'sequence', 'prefix']",
    'Criterion("k1", upper=2, over="sequence", reduce={})': f"Criterion.reduce: expected one of {list(REDUCTIONS)}",
    'Criterion("k1", upper=2, when={})': f"Criterion.when: expected one of {list(WHEN)}",
    'Criterion("k1", upper=2, drop={})': "Criterion.drop: expected one of ['unit', 'sequence', 'token', 'rest']",
    'Criterion("k1", upper=2, of={})': "Criterion.of: expected one of ['train/rollout', 'new/rollout', 'new/old']",
    'Spec(rejected={})': "Spec.rejected: expected one of ['mask', 'zero', 'both']",
    'Spec(nonfinite={})': "Spec.nonfinite: expected one of ['reject', 'neutral', 'propagate']",
    'Spec(sums_over={})': "Spec.sums_over: expected one of ['valid', 'kept']",
    'Spec(detail={})': "Spec.detail: expected one of ['basic', 'full']",
}  # fmt: skip


@pytest.mark.parametrize("python", CHOICES)
def test_unknown_name_is_answered_with_the_known_ones(python):
    refused(python.format("'nonsense'"), ValueError, f"{CHOICES[python]}, got 'nonsense'")
    refused(python.format(3), TypeError, f"{CHOICES[python]}, got int 3")


WRONG_TYPES = {
    "Spec(turns=1)": "Spec.turns: expected True or False, got int 1",
    'Weight.token(upper="2")': "Weight.upper: expected a number, got the string '2'",
    'Weight.token(upper="0.5_2")': "Weight.upper: expected a number, got the string '0.5_2' ('low_high' strings are "
    "a framework's grammar: use rc.spec)",
    'Weight.token(upper=True)': "Weight.upper: expected a number, got bool True",
    'Weight.token(lower=[1])': "Weight.lower: expected a number, got list [1]",
    'Weight.token(token_clamp="5")': "Weight.token_clamp: expected a number, got the string '5'",
    'Spec(weight="token")': "Spec.weight: expected a Weight or None, got str 'token'",
    'Spec(criteria=Criterion("ratio", upper=2))': "Spec.criteria: expected a tuple of Criterion, got Criterion",
    'Spec(criteria=({"stat": "ratio"},))': "Spec.criteria: expected Criterion, got dict",
    "Spec(apply=1)": "Spec.apply: expected True or False, got int 1",
    'Spec(report="verl")': "Spec.report: expected a tuple of names, got str 'verl'",
    "Spec(clamp=True)": "Spec.clamp: expected a number, got bool True",
    'Spec.from_dict({"weight": "token"})': "Spec.weight: expected a mapping, got str 'token'",
    'Spec.from_dict({"criteria": {"stat": "ratio"}})': "Spec.criteria: expected a list of mappings, got dict",
    'Spec.from_dict({"criteria": ["ratio"]})': "Spec.criteria[0]: expected a mapping, got str 'ratio'",
    "Spec.from_dict([])": "Spec: expected a mapping, got list",
    "Quantile('0.9')": "Quantile.q: expected a number, got the string '0.9'",
    "MeanBelow(mean=1.0)": "MeanBelow: …did you mean below=",
    "TopK(0.5)": "TopK.count: expected a whole number, got float 0.5",
    "TopK(True)": "TopK.count: expected a whole number, got bool True",
    "TopK(k=3)": "TopK: …unknown argument 'k', …did you mean count=?",
    "Quantile(share=0.5)": "Quantile: …unknown argument 'share', …did you mean q=?",
    "KeepESS(ess=0.5)": "KeepESS: …did you mean floor=?",
    "CISPO(high='2')": "CISPO.high: expected a number, got the string '2'",
    "PPO(low=None)": "PPO.low: expected a number, got NoneType None",
}  # fmt: skip
WRONG_VALUES = {
    'Weight.token(upper=nan)': "Weight.upper: expected a number, got nan",
    'Weight.token(lower=-1)': "Weight.lower: expected a number >= 0, got -1.0",
    'Weight.token(upper=0)': "Weight.upper: expected a number > 0, got 0.0",
    'Weight.token(lower=2, upper=1)': "Weight: expected lower <= upper, got lower=2.0, upper=1.0",
    'Weight.token(token_clamp=0)': "Weight.token_clamp: expected a finite number > 0, got 0.0",
    'Criterion("ratio", upper=2, over="sequence")': "Criterion.reduce: expected one of ['sum', 'mean', 'max', 'min'] "
    "with over='sequence', got None",
    'Criterion("ratio")': "Criterion: expected lower, upper or both, got neither",
    'Criterion("ratio", lower=2, upper=1)': "Criterion: expected lower <= upper, got lower=2.0",
    'Criterion("k2", lower=-0.1)': "Criterion.lower: expected a number >= 0, got -0.1",
    'Criterion("external", upper=1, name="")': "Criterion.name: expected the key of an external tensor, got ''",
    'Criterion("ratio", upper=2, name="a")': "Criterion.name: expected None unless stat='external', got 'a'",
    'Criterion("ratio", upper=2, label="a/b")': "Criterion.label: expected a string without '/', got 'a/b'",
    'Criterion("ratio", upper=2, eps=0)': "Criterion.eps: expected a finite number > 0, got 0.0",
    'Criterion("ratio", upper=2, eps=nan)': "Criterion.eps: expected a number, got nan",
    'Criterion("ratio", upper=2, token_clamp=-5)': "Criterion.token_clamp: expected a finite number > 0, got -5.0",
    'Spec(criteria=(Criterion("ratio", upper=2), Criterion("ratio", upper=3)))': "Spec.criteria: expected different "
    "labels, got 'token_ratio' twice; set Criterion.label",
    'Weight("product")': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix'], got 'product'; "
    "write Weight.product(...)",
    'Weight("geometric")': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix'], got 'geometric'; "
    "write Weight.geometric(...)",
    'Weight("seq", "sum")': "Weight.over: expected one of ['token', 'turn', 'sequence', 'prefix'], got 'seq'; write "
    "'sequence'",
    'Weight.product("sample")': "Weight.over: expected one of ['turn', 'sequence'], got 'sample'; write 'sequence'",
    'Weight("sequence", "geometric")': "Weight.reduce: expected one of ['sum', 'mean'], got 'geometric'; write 'mean'",
    'Weight("prefix", "product")': "Weight.reduce: expected one of ['sum', 'mean', 'min'], got 'product'; write 'sum'",
    'Criterion("ratio", over="seq", reduce="mean", upper=2)': "Criterion.over: expected one of ['token', 'turn', "
    "'sequence', 'prefix'], got 'seq'; write 'sequence'",
    'Criterion("ratio", over="geometric", upper=2)': "Criterion.over: expected one of ['token', 'turn', 'sequence', "
    "'prefix'], got 'geometric'; write stat='ratio', over='sequence', reduce='mean'",
    'Criterion("ratio", over="sequence", reduce="geometric", upper=2)': "Criterion.reduce: expected one of ['sum', "
    "'mean', 'max', 'min'], got 'geometric'; write stat='ratio', over='sequence', reduce='mean'",
    'Criterion("product", upper=2)': f"Criterion.stat: expected one of {list(STATS)}, got 'product'; write "
    "stat='ratio', over='sequence', reduce='sum'",
    'Criterion("kl", upper=2)': f"Criterion.stat: expected one of {list(STATS)}, got 'kl'; write 'k1', which is -D, or",
    'Criterion("k1", reduce="mean", upper=2)': "Criterion.reduce: expected None with over='token', got 'mean'; for a "
    "value of all the tokens of a sequence write over='sequence'",
    'Weight("token", "sum")': "Weight.reduce: expected None with over='token', got 'sum'",
    'Weight("token", 2.0)': "Weight.reduce: expected None with over='token', got 2.0; write bounds as ",
    'Weight("turn")': "Weight.reduce: expected 'sum', the product of the ratios, or 'mean', their geometric mean, with "
    "over='turn', got None",
    'Weight("sequence", "min")': "Weight.reduce: expected one of ['sum', 'mean'] unless over='prefix', got 'min'",
    'Weight("turn", "sum", within="turn")': "Weight.within: expected 'sequence' unless over='prefix', got 'turn'",
    'Weight.product("token")': "Weight.over: expected one of ['turn', 'sequence'], got 'token'",
    'Spec(Weight.product(over="turn"), report=("verl",))': "Spec.report: expected ('native',) with a weight or ",
    'Spec(report=("trl",))': "Spec.report: expected one of ['native', 'verl', 'xtuner', 'skyrl'], got 'trl'",
    "Spec(clamp=41)": "Spec.clamp: expected a finite number > 0 and <= 40, got 41.0",
    "Spec(clamp=nan)": "Spec.clamp: expected a number, got nan",
    'Spec.from_dict({"wieght": None})': "Spec: unknown key 'wieght', expected some of ['weight', 'criteria'",
    'Spec.from_dict({"weight": {"over": "token", "uper": 2}})': "Spec.weight: unknown key 'uper', expected some of "
    "['over', 'reduce', 'lower', 'upper', 'outside', 'normalize', 'token_clamp', 'growth', 'within', 'decay', ",
    'Spec.from_dict({"weight": {"upper": 2}})': "Spec.weight: expected the key 'over', got ['upper']",
    'Spec.from_dict({"criteria": [{"stat": "k1", "upper": 2}, {"upper": 2}]})': "Spec.criteria[1]: expected the key "
    "'stat'",
    'Spec.from_dict({"criteria": [{"stat": "k1", "bounds": [1, 2], "upper": 2}]})': "Spec.criteria[0].bounds: expected "
    "either bounds or lower and upper, got both",
    'Spec.from_dict({"weight": {"over": "token", "bounds": [1, 2, 3]}})': "Spec.weight.bounds: expected a pair "
    "[lower, upper], got [1, 2, 3]",
    'Spec.from_dict({"weight": {"over": "token", "bounds": "ab"}})': "Spec.weight.bounds: expected a pair [lower, "
    "upper], got 'ab'",
    'Spec.from_dict({"weight": {"over": "token", "bounds": 2}})': "Spec.weight.bounds: expected a pair [lower, "
    "upper], got 2",
    "Quantile(1.0)": "Quantile.q: expected a number above 0 and below 1, got 1.0",
    "MeanBelow(0.0)": "MeanBelow.below: expected a finite number > 0, got 0.0",
    "Bottom()": "Bottom: expected count or share, got count=None, share=None",
    "TopK(0)": "TopK.count: expected a number >= 1, got 0",
    "TopK(2 ** 63)": "TopK.count: expected a number >= 1 and <= 9223372036854775807, got 9223",
    "Bottom(share=nan)": "Bottom.share: expected a number, got nan",
    "KeepESS(1.0)": "KeepESS.floor: expected a finite number > 0 and <= 0.999999, got 1.0",
    "Criterion('ratio', upper=KeepESS(0.5))": "Criterion.upper: expected a number or another rule, got KeepESS(0.5), "
    "which bounds a Weight alone",
    "Weight.token(upper=MeanBelow(0.5))": "Weight.upper: expected a number or another rule, got MeanBelow(0.5), "
    "which bounds a Criterion",
    "Weight.token(lower=KeepESS(0.5))": "Weight.lower: …upper=KeepESS(...)",
    "Weight.token(upper=KeepESS(0.5), outside='zero')": "Weight.upper: expected outside='clamp' with KeepESS(0.5), "
    "got 'zero'",
    "Weight.token(lower=Quantile(0.1), upper=KeepESS(0.5))": "Weight.lower: expected a number or None with "
    "upper=KeepESS(0.5), got Quantile(0.1)",
    "Weight('prefix', upper=Quantile(0.5), growth='sqrt')": "Weight.upper: expected a number with growth='sqrt', got "
    "Quantile(0.5)",
    "Spec(Weight.token(upper=Quantile(0.5)), (Criterion('abs', upper=1.0, label='weight'),))": "Criterion.label: "
    "expected another label than 'weight' with a weight whose bounds the batch decides",
    "Spec.from_dict({'criteria': [{'stat': 'abs', 'bounds': {'rule': 'Quantile', 'q': 0.5}}]})":
        "Spec.criteria[0].bounds: expected a pair [lower, upper], got the mapping …as lower or upper",
    "Criterion('abs', upper=TopK(3))": "Criterion.upper: …lower=TopK(...)",
    "Criterion('abs', lower=Bottom(3))": "Criterion.lower: …upper=Bottom(...)",
    "Criterion('k2', lower=MeanBelow(1))": "Criterion.lower: …upper=MeanBelow(...)",
    "Criterion('abs', over='prefix', reduce='max', upper=Quantile(0.5))": "Criterion.upper: expected a number with "
    "over='prefix', got Quantile(0.5)",
    "Spec(criteria=(Criterion('k2', upper=MeanBelow(0.02)),), report=('verl',))": "Spec.report: expected ('native',) "
    "with bounds that the batch decides",
    "Spec.from_dict({'criteria': [{'stat': 'abs', 'upper': {'rule': 'Half'}}]})": "Spec.criteria[0].upper: expected "
    "a number or the key 'rule' with one of ['Quantile'",
    "Spec.from_dict({'criteria': [{'stat': 'abs', 'upper': {'rule': 'Quantile', 'p': 0.5}}]})":
        "Spec.criteria[0].upper (Quantile): unknown key 'p', expected some of ['q', 'within']",
    "Spec.from_dict({'criteria': [{'stat': 'abs', 'upper': {'rule': 'Quantile'}}]})": "Spec.criteria[0].upper "
    "(Quantile): expected the key 'q', got []",
    "CISPO(-0.1)": "CISPO.low: expected a number >= 0, got -0.1",
    "TIS(0.0)": "TIS.upper: expected a number > 0, got 0.0",
    "TIS(over='prefix')": "TIS.over: expected one of ['token', 'turn', 'sequence'], got 'prefix'",
    "MIS(2.0, over='rows')": "MIS.over: expected one of ['token', 'turn', 'sequence'], got 'rows'",
    "M2PO(-1)": "M2PO.threshold: expected a finite number > 0, got -1.0",
    "TOPR(positive=inf)": "TOPR.positive: expected a number >= 0 and <= 3.4…, got inf",
    "VESPO(k_positive=inf)": "VESPO.k_positive: expected a number >= 0 and <= 3.4…, got inf",
    "Score(lower=inf)": "Score.lower: expected a finite number, got inf",
    "Weight.token(lower=inf)": "Weight.lower: expected a finite number, got inf",
    "Weight.token(upper=1e39)": "Weight.upper: expected a number that float32 holds, got 1e+39",
    "Weight.token(upper=5e-324)": "Weight.upper: expected a number that float32 holds, got 5e-324",
    "Weight.token(lower=1e-45 / 2)": "Weight.lower: expected a number that float32 holds, got 5e-46",
    "AveragePPO(level='token')": "AveragePPO.level: expected one of ['average', 'geometric_average'], got 'token'",
    "PPO(low=2)": "PPO.low: expected a number >= 0 and <= 1, got 2.0",
    "DPPO(upper=0.5)": "DPPO.upper: expected a number >= 1, got 0.5",
    "GSPO(through='x')": "GSPO.through: expected one of ['sequence', 'token'], got 'x'",
    "DRO(beta=0)": "DRO.beta: expected a finite number > 0, got 0.0",
    "policy_loss(X, X, Batch(total=10**400), old_logp=X)": "total: expected a number that a float holds, got an "
    "integer of many",
    "correct(X, X, spec=Spec(), backend=10**5000)": "backend: expected one of",
}  # fmt: skip


@pytest.mark.parametrize("python", [*WRONG_TYPES, *WRONG_VALUES])
def test_what_is_wrong_is_named_with_expected_and_got(python):
    of_types = python in WRONG_TYPES
    refused(python, TypeError if of_types else ValueError, (WRONG_TYPES if of_types else WRONG_VALUES)[python])
