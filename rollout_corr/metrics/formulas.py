"""Formulas of metrics, a text each: "('ratio' + n) / n". It is compiled once, evaluated, and shown as it stands.

A quoted name is a sum or an extremum of `Statistics`, `n` the count of the units that the metric is over, and `v` all
statistics, for functions that read a histogram. `a / b` is 0 where b is. `FUNCTIONS` are the others that a text may
name. A metric of nothing, where n is 0, is 0 without being evaluated, unless it counts by itself.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..specs.caches import cached
from .histogram import HISTOGRAM_OF_WEIGHTS, beyond, interpolated, percentile

Values = Mapping[str, float]


# --- texts that metrics share ---


def plain(name: str) -> str:
    """A sum as it is."""
    return f"'{name}'"


def mean(name: str) -> str:
    """The mean, from a sum."""
    return f"'{name}' / n"


def mean_around(center: float, name: str) -> str:
    """The mean, from a sum of differences from a center, 0 or 1."""
    return f"('{name}' + {'n' if center else '0.0'}) / n"


def std(name: str) -> str:
    """Population standard deviation, from the sums NAME and NAME2 around any center near the mean."""
    return f"root('{name}2' / n - squared('{name}' / n))"


def std_of_weight(name: str, around_one: str) -> str:
    """Population standard deviation of a weight, from the sums NAME and NAME2, and squares around 1 by their name."""
    return f"root(variance_of_weight('{name}', '{name}2', '{around_one}', n))"


def maximum(name: str, center: float = 0.0) -> str:
    """The maximum, from its difference from a center."""
    return f"'max_{name}' + {center}"


def minimum(name: str, center: float = 0.0) -> str:
    """The minimum, which travels negated, from its difference from a center."""
    return f"{center} - '-min_{name}'"


# --- functions of numbers ---


def ratio_of(total: float, count: float) -> float:
    """total / count, and 0 for 0 of 0."""
    return total / count if count else 0.0


def exp(x: float) -> float:
    """e^x as tensors have it: infinite where it overflows, and NaN of NaN."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log(x: float) -> float:
    """log x as tensors have it: -inf of 0, and NaN below."""
    if x > 0.0:
        return math.log(x)
    return -math.inf if x == 0.0 else math.nan


def squared(x: float) -> float:
    """x times x, infinite where it overflows; `x**2` raises there."""
    return x * x


def root(x: float) -> float:
    """The square root of a variance, which rounding may have left below 0."""
    return math.sqrt(max(x, 0.0))


def _fraction(x: float) -> float:
    """x within 0 and 1, which rounding may have left; NaN stays."""
    # The first argument is given back where the two do not compare.
    return max(min(x, 1.0), 0.0)


def variance_of_weight(total: float, squares: float, around_one: float, n: float) -> float:
    """The variance of a weight, from the sums of the weight, of its squares, and of its squares around 1.

    Where policies drifted apart all weights may lie next to 0, and sums around 1 cancel, as plain ones do next to 1.
    Rounding may leave the variance below 0.
    """
    average = ratio_of(total, n)
    off = average - 1.0
    return ratio_of(squares, n) - average * average if average < 0.5 else ratio_of(around_one, n) - off * off


def _population_std(total: float, squares: float, units: float) -> float:
    """Standard deviation over all units, from sums of x and x^2 around any center; 0 for a single one."""
    if units <= 1:
        return 0.0
    average = total / units
    return math.sqrt(max(squares / units - average * average, 0.0))


def _unbiased_std(total: float, squares: float, units: float) -> float:
    """Standard deviation divided by units - 1, from sums of x and x^2 around any center; 0 for a single one."""
    if units <= 1:
        return 0.0
    return math.sqrt(max(squares - total * total / units, 0.0) / (units - 1))


def _std_of_weight(total: float, squares: float, around_one: float, units: float) -> float:
    """Standard deviation of a weight from its sum, its squares, and those around 1; 0 for a single one."""
    return 0.0 if units <= 1 else root(variance_of_weight(total, squares, around_one, units))


def _unbiased_std_of_weight(total: float, squares: float, around_one: float, units: float) -> float:
    """Standard deviation of a weight divided by units - 1, from the sums of `_std_of_weight`; 0 for a single one."""
    if units <= 1:
        return 0.0
    return root(variance_of_weight(total, squares, around_one, units) * units / (units - 1))


def _correlation(p: float, q: float, p2: float, q2: float, pq: float, n: float) -> float:
    """Pearson correlation of two probabilities, from their sums; 0 where either is constant."""
    mean_p, mean_q = ratio_of(p, n), ratio_of(q, n)
    square_p, square_q = ratio_of(p2, n), ratio_of(q2, n)
    variance_p, variance_q = square_p - squared(mean_p), square_q - squared(mean_q)
    # The variance of a constant is rounding noise, and its correlation would say nothing.
    if variance_p <= 1e-12 * square_p or variance_q <= 1e-12 * square_q:
        return 0.0
    covariance = ratio_of(pq, n) - mean_p * mean_q
    return max(-1.0, min(1.0, ratio_of(covariance, math.sqrt(variance_p * variance_q))))


def _percentile_of_weights(v: Values, low: float, high: float, percent: float) -> float:
    """Interpolate a percentile of the logarithms of weights, between their known ends."""
    return interpolated([v[name] for name in HISTOGRAM_OF_WEIGHTS], 0.0, (low, high), percent)


FUNCTIONS: dict[str, Callable[..., float]] = {
    "ratio_of": ratio_of,
    "exp": exp,
    "log": log,
    "squared": squared,
    "root": root,
    "fraction": _fraction,
    "larger": max,
    "smaller": min,
    "within": lambda x, bound: max(-bound, min(bound, x)),
    "variance_of_weight": variance_of_weight,
    "population_std": _population_std,
    "unbiased_std": _unbiased_std,
    "std_of_weight": _std_of_weight,
    "unbiased_std_of_weight": _unbiased_std_of_weight,
    "correlation": _correlation,
    "beyond": beyond,
    "percentile": percentile,
    "percentile_of_weights": _percentile_of_weights,
}


# --- the same of tensors, float64; a formula with another function needs its values on the host ---


def _ratio_of_tensors(total: Tensor, count: Tensor) -> Tensor:
    return torch.where(count == 0, 0.0, total / torch.where(count == 0, 1.0, count))


def _variance_of_weights(total: Tensor, squares: Tensor, around_one: Tensor, n: Tensor) -> Tensor:
    average = _ratio_of_tensors(total, n)
    off = average - 1.0
    low, high = _ratio_of_tensors(squares, n) - average * average, _ratio_of_tensors(around_one, n) - off * off
    return torch.where(average < 0.5, low, high)


OF_TENSORS: dict[str, Callable[..., Any]] = {
    "ratio_of": _ratio_of_tensors,
    "squared": lambda x: x * x,
    "root": lambda x: x.clamp(min=0.0).sqrt(),
    "fraction": lambda x: x.clamp(0.0, 1.0),
    "larger": lambda x, y: torch.where(y > x, y, x),
    "variance_of_weight": _variance_of_weights,
    "beyond": beyond,
}


# --- compiling ---


class Formula(NamedTuple):
    """A text that was compiled."""

    names: tuple[str, ...]  # of the statistics that it quotes, in order
    value: Callable[[Values, float], float]
    of_tensors: Callable[[Mapping[str, Tensor], Any], Tensor] | None  # None: it reads values
    total: str | None = None  # the statistic that it is, if it is nothing else
    averaged: str | None = None  # the statistic whose mean it is, if it is nothing else
    around_one: bool = False  # what it quotes is a difference from 1
    counts: bool = False  # it finds nothing by itself: a rank may have tokens and not their count


class _Compiler(ast.NodeTransformer):
    """Makes Python of a text: a quoted name looks a statistic up, `/` is `ratio_of`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.functions: set[str] = set()
        self.around_one = False

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, str):
            return node
        if node.value not in self.names:
            self.names.append(node.value)
        return ast.Subscript(ast.Name("v", ast.Load()), node, ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        self.functions.add(node.func.id)
        return ast.Call(node.func, [self.visit(each) for each in node.args], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        ends = ast.unparse(node.left), ast.unparse(node.right)
        adds = isinstance(node.op, ast.Add) and ends[1] in ("n", "1.0")
        self.around_one |= adds or (isinstance(node.op, ast.Sub) and ends[0] == "1.0")
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Div):
            return ast.Call(ast.Name("ratio_of", ast.Load()), [left, right], [])
        return ast.BinOp(left, node.op, right)


@cached(maxsize=1024)
def compiled(text: str) -> Formula:
    """Compile a formula, once for all metrics that have it."""
    compiler, tree = _Compiler(), ast.parse(f"lambda v, n: {text}", mode="eval")
    assert isinstance(tree.body, ast.Lambda)
    body = tree.body.body
    quoted = body.left if isinstance(body, ast.BinOp) and isinstance(body.op, ast.Div) else body
    name = quoted.value if isinstance(quoted, ast.Constant) and isinstance(quoted.value, str) else None
    tree.body.body = compiler.visit(body)
    if unknown := compiler.functions - FUNCTIONS.keys():
        raise ValueError(f"formula {text!r}: expected functions among {list(FUNCTIONS)}, got {sorted(unknown)}")
    code = compile(ast.fix_missing_locations(tree), f"<{text}>", "eval")
    on_tensors = compiler.functions <= OF_TENSORS.keys()
    return Formula(
        tuple(compiler.names),
        eval(code, dict(FUNCTIONS)),
        eval(code, dict(OF_TENSORS)) if on_tensors else None,
        name if text == f"'{name}'" else None,
        name if text == f"'{name}' / n" else None,
        compiler.around_one,
        text.startswith("percentile("),
    )
