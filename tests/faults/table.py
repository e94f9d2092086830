"""The faults: a line of a file, what it is turned into, and the tests of its room that notice.

A row names as few tests as cover the line. A change that moves a line takes its row along; one that is red by other
tests than before names those.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A text that stands once in a file, the wrong one in its place, and the tests that fail then."""

    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.right.strip()} -> {self.wrong.strip()}"


def _in(file: str, *rows: tuple[str, str, str]) -> list[Fault]:
    """Faults of one file: the right text, the wrong one, and tests, with a space between them."""
    return [Fault(file, right, wrong, tuple(f"tests/{test}" for test in tests.split())) for right, wrong, tests in rows]


FAULTS = [
    *_in(
        "rollout_corr/definition/offsets.py",
        ("int(lengths.amax()) > most", "int(lengths.amin()) > most", "definition/test_offsets.py"),
        ("first < 0 or last > tokens", "first < 0 or last >= tokens", "definition/test_offsets.py"),
        ("offsets[1:] < offsets[:-1]).any()", "offsets[1:] <= offsets[:-1]).any()", "definition/test_offsets.py"),
    ),
    *_in(
        "rollout_corr/definition/bounds.py",
        ("(x >= lower) & (x <= upper)", "(x > lower) & (x <= upper)",
         "definition/test_numerics.py::test_bounds_are_inclusive_to_the_bit"),
        ("torch.where(within(log_ratio, low, high), ratio,", "torch.where(within(log_ratio, low, None), ratio,",
         "definition/test_correction.py"),
    ),
    *_in(
        "rollout_corr/definition/tokens.py",
        ("torch.where(d.abs() <= 0.5, series", "torch.where(d.abs() <= 5.0, series",
         "definition/test_numerics.py::test_k3_is_accurate_and_knows_no_neighbors"),
        ("logp.clamp(max=0.0).exp()", "logp.exp()", "kernels/test_values.py::test_log_probs_above_0"),
    ),
    *_in(
        "rollout_corr/definition/correction.py",
        ("total / n.clamp(min=1)", "total / (n + 1)", "definition/test_correction.py"),
        ('advantages < 0 if when == "negative_advantage" else advantages > 0',
         'advantages <= 0 if when == "negative_advantage" else advantages > 0', "definition/test_correction.py"),
        ("tokens.d.sign() > 0", "tokens.d.sign() >= 0", "definition/test_correction.py"),
        ("tokens.count(fails) > 0", "tokens.count(fails) > 1", "definition/test_correction.py"),
    ),
    *_in(
        "rollout_corr/definition/weights.py",
        ("aggregate / n.clamp(min=1)", "aggregate / n.clamp(min=2)", "definition/test_correction.py"),
    ),
    *_in(
        "rollout_corr/definition/normalize.py",
        ("~(mean <= SMALLEST_MEAN)", "~(mean < SMALLEST_MEAN)",
         "definition/test_numerics.py::test_a_mean_weight_is_divided_by_unless_it_is_1e_8_or_less"),
        ("(index >= 0) & (index < count)", "(index > 0) & (index < count)", "definition/test_normalize.py"),
    ),
    *_in(
        "rollout_corr/definition/turns.py",
        ("torch.where(inside == 1, FIRST, last)", "torch.where(inside == 0, FIRST, last)",
         "metrics/test_token_labels.py::test_a_turn_has_a_label definition/test_turns.py"),
    ),
    *_in(
        "rollout_corr/definition/prefix.py",
        ("units.running(_counted(tokens, among)) > _counted", "units.running(_counted(tokens, among)) >= _counted",
         "definition/test_units.py definition/test_prefix.py"),
    ),
    *_in(
        "rollout_corr/definition/loss.py",
        ('(n if objective.mean.over == "kept" else', '(n if objective.mean.over != "kept" else',
         "definition/test_loss.py::test_means"),
        ("value.clamp(max=term.value_clamp)", "value.clamp(min=term.value_clamp)", "definition/test_loss.py::test_kl"),
        ("torch.expm1(-at) * (k - at)", "torch.expm1(at) * (k - at)",
         "definition/test_loss.py::test_squares_and_penalties_saturate definition/test_loss.py::test_kl"),
    ),
    *_in(
        "rollout_corr/metrics/aggregates.py",
        (".log1p().mul_(0.5)", ".log1p().mul_(0.625)", "metrics/test_values.py"),
        ("f.tokens.size > f.spec.clamp", "f.tokens.size < f.spec.clamp", "metrics"),
        ("by.count(d.abs() > LOG_2)", "by.count(d > LOG_2)", "metrics/test_values.py"),
    ),
    *_in(
        "rollout_corr/metrics/statistics.py",
        ("torch.stack(counts).amin() == 0", "torch.stack(counts).amax() == 0", "metrics/test_statistics.py"),
        ("torch.maximum(self.maxima, other.maxima)", "torch.minimum(self.maxima, other.maxima)",
         "metrics/test_statistics.py metrics/test_labels.py"),
        ("loss.spec is not None", "loss.spec is None", "metrics/test_statistics.py"),
    ),
    *_in(
        "rollout_corr/metrics/extra.py",
        ("paired = among & train_logp.isfinite()", "paired = among", "metrics/test_values.py"),
        ("(counted > 0, counted < 0)", "(counted >= 0, counted < 0)", "api/test_staleness.py"),
    ),
    *_in(
        "rollout_corr/metrics/rows.py",
        ("if_low if average < 0.5 else if_not", "if_not if average < 0.5 else if_low",
         "definition/test_numerics.py::test_weights_near_0_keep_their_mean_spread_and_sample_size"),
        ("self.center * n, n)", "self.center, n)", "metrics"),
    ),
    *_in(
        "rollout_corr/metrics/histogram.py",
        ("positive = min(zeros, inside[0])", "positive = zeros", "metrics"),
        ("(edge(k + 1) if k < half - 1", "(edge(k) if k < half - 1", "metrics"),
    ),
    *_in(
        "rollout_corr/metrics/labels.py",
        ("(ids >= 0) & (ids < many)", "(ids > 0) & (ids < many)", "metrics/test_labels.py"),
    ),
    *_in(
        "rollout_corr/specs/bounds_of_batch.py",
        ("before.kept / before.all.double() < self.q", "before.kept / before.all.double() <= self.q",
         "specs/test_bounds_of_batch.py"),
        ("(before.all - before.kept) / before.all.double() > self.q",
         "before.kept / before.all.double() > self.q", "specs/test_bounds_of_batch.py"),
        ("return before.kept < self.count", "return before.kept <= self.count", "specs/test_bounds_of_batch.py"),
    ),
    *_in(
        "rollout_corr/backends/blocks.py",
        ("torch.where(valid.index_select(0, starts), starts, starts + left)",
         "torch.where(valid.index_select(0, starts), starts + left, starts)",
         "backends/test_blocks.py::test_compaction_takes_and_puts"),
    ),
    *_in(
        "rollout_corr/backends/search.py",
        ("torch.where(self.before.view(-1) > 0, nearer, found)", "torch.where(self.before.view(-1) > 1, nearer, found)",
         "backends/test_search.py"),
    ),
    *_in(
        "rollout_corr/backends/sees_batch.py",
        ("whole, fraction = whole + (fraction >> FRACTION)", "whole, fraction = whole - (fraction >> FRACTION)",
         "backends/test_sees_batch.py"),
    ),
    *_in(
        "rollout_corr/backends/turns.py",
        ("runs & (earlier >= sequence) & (earlier >= 0)", "runs & (earlier > sequence) & (earlier >= 0)",
         "backends/test_turns.py::test_a_masked_stretch_belongs_to_the_turn_before_it definition/test_turns.py"),
    ),
    *_in(
        "rollout_corr/backends/normalize.py",
        ("counted = (totals[3] > 0) & groups.first()", "counted = groups.first()",
         "backends/test_normalize.py definition/test_normalize.py"),
    ),
    *_in(
        "rollout_corr/backends/split.py",
        ("total = whole + (high + low / GRID) / GRID", "total = whole + high / GRID",
         "backends/test_split.py::test_sums_travel_to_the_nearest_76th_bit"),
    ),
    *_in(
        "rollout_corr/backends/loss_operators.py",
        ('of_sums = size * max(1.0, math.sqrt(values["loss_valid_tokens"]))', "of_sums = 0.0",
         "backends/test_first_call.py"),
    ),
    *_in(
        "rollout_corr/api/groups.py",
        ("torch.where(count == 1.0, 1.0, std)", "torch.where(count == 0.0, 1.0, std)", "api/test_groups.py"),
        ("centered = torch.where(keep, given - mean, 0.0)", "centered = given - mean", "api/test_groups.py"),
    ),
    *_in(
        "rollout_corr/api/per_token.py",
        ("alpha = torch.where((age > 0)", "alpha = torch.where((age >= 0)", "api/test_proximal.py"),
        ("0.5 ** (1.0 / half_life)", "0.5 ** half_life", "api/test_position_weights.py"),
    ),
    *_in(
        "rollout_corr/api/dump.py",
        ("(most is not None and number > most)", "(most is not None and number >= most)",
         "api/test_dump.py::test_wrong_arguments_of_dump api/test_dump.py::test_values_that_numbers_can_have"),
    ),
    *_in(
        "rollout_corr/frameworks/shared/scripts.py",
        ("stripped[0] == stripped[-1] and", "stripped[0] != stripped[-1] and", "frameworks/test_check.py"),
    ),
    *_in(
        "rollout_corr/frameworks/shared/run_files.py",
        ('elif token in "}]":\n            around.pop()', 'elif token in "}":\n            around.pop()',
         "frameworks/test_check.py"),
    ),
    *_in(
        "rollout_corr/frameworks/verl/options.py",
        ("return 1.0 / upper, upper", "return 0.0, upper", "frameworks/test_read.py"),
    ),
    *_in(
        "rollout_corr/frameworks/shared/metrics.py",
        ("math.sqrt(max(squares / units - average * average, 0.0))", "math.sqrt(max(squares / units, 0.0))",
         "metrics/test_peers.py"),
    ),
    *_in(
        "rollout_corr/diagnose/doctor/wrong_values.py",
        ("{'late' if shift < 0 else 'early'}", "{'late' if shift > 0 else 'early'}", "diagnose/test_doctor.py"),
        ("count < 0.05 * evidence.far", "count < 5.0 * evidence.far", "diagnose/test_doctor.py"),
    ),
    *_in(
        "rollout_corr/diagnose/doctor/wrong_policies.py",
        ('"trainer" if slope > 0 else "engine"', '"trainer" if slope < 0 else "engine"', "diagnose/test_doctor.py"),
        ("{min(versions, default=0):g}", "{max(versions, default=0):g}", "diagnose"),
    ),
    *_in(
        "rollout_corr/diagnose/doctor/conditions.py",
        ('"<=": operator.le', '"<=": operator.lt', "diagnose/test_job.py diagnose/test_report.py"),
    ),
    *_in(
        "rollout_corr/diagnose/remaining_bias.py",
        ("max(1, len(replicates) - 1)", "max(1, len(replicates) + 99)", "diagnose/test_remaining_bias.py"),
    ),
    *_in(
        "rollout_corr/eject/correction.py",
        ("keep = keep & all_finite", "keep = keep",
         "eject/test_files.py::test_a_correction_is_the_package_for_any_settings"),
    ),
    *_in(
        "rollout_corr/eject/loss.py",
        (" & advantages.isfinite()", "", "eject/test_files.py::test_files_are_the_package_on_random_batches"),
    ),
    *_in(
        "kernels/tiles.py",
        ("span = tl.minimum(step - 1, span - forward)", "span = tl.minimum(step - 2, span - forward)",
         "kernels/test_correct.py::test_many_sequences kernels/test_correct.py::test_starts"),
        ("tl.maximum(version.to(tl.int64), -LARGEST_VERSION)", "tl.maximum(version.to(tl.int64), 0)",
         "kernels/test_correct.py::test_ages_of_tokens_and_of_sequences"),
    ),
    *_in(
        "kernels/sums.py",
        ("tl.where(x < 0.0, -0.5, 0.5)", "tl.where(x < 0.0, 0.5, 0.5)",
         "kernels/test_values.py::test_sums_that_decide_are_rounded_to_the_nearest_step"),
        ("(owner == 0) | (owner > extents.sequences)", "(owner > extents.sequences)",
         "kernels/test_correct.py::test_dtypes_of_offsets"),
    ),
    *_in(
        "kernels/tokens.py",
        ("return (x >= lower) & (x <= upper)", "return (x > lower) & (x <= upper)",
         "kernels/test_values.py::test_bounds_are_inclusive_to_the_bit"),
        ("(small_d * small_d), e - 1.0 - d)", "(small_d * small_d), e - 1.0 + d)",
         "kernels/test_correct.py::test_layouts kernels/test_values.py"),
    ),
    *_in(
        "kernels/gather.py",
        ("mask=low < high, other=0) < turn", "mask=low < high, other=0) <= turn", "kernels/test_turns.py"),
    ),
    *_in(
        "kernels/correct/criteria.py",
        ("return measured & (advantage > 0)\n", "return measured & (advantage >= 0)\n",
         "kernels/test_values.py::test_odd_advantages kernels/test_correct.py"),
        ("tl.where((one > other) | (one != one), one, other)", "tl.where((one < other) | (one != one), one, other)",
         "kernels/test_correct.py::test_variants"),
    ),
    *_in(
        "kernels/correct/decide.py",
        ("valid = tl.where(known, tl.maximum(valid, 0), 0)", "valid = tl.where(known, valid, 0)",
         "kernels/test_correct.py::test_dtypes_of_offsets kernels/test_correct.py"),
        ("mean = weights / tl.maximum(units, 1.0)", "mean = weights / tl.maximum(units, 9.0)",
         "kernels/test_correct.py"),
    ),
    *_in(
        "kernels/correct/measures.py",
        ("tl.where(inside, ratio_m1, -1.0)", "tl.where(inside, ratio_m1, 0.0)", "kernels/test_correct.py"),
        ("tl.where(tl.abs(d) > clamp, 1.0, 0.0)", "tl.where(d > clamp, 1.0, 0.0)",
         "kernels/test_values.py::test_statistics_of_tokens_beyond_the_clamp"),
    ),
    *_in(
        "kernels/correct/apply.py",
        ("    lost = states < 0\n", "    lost = states <= 0\n", "kernels/test_correct.py::test_layouts"),
    ),
    *_in(
        "kernels/policy_loss/formulas.py",
        ("slope = value\n            value = value * new", "slope = value\n            value = value * x",
         "kernels/test_policy_loss.py::test_surrogates"),
        ("square, pull, flows = saturated * saturated, saturated,", "square, pull, flows = saturated * saturated, x,",
         "kernels/test_policy_loss.py::test_squares_and_penalties_saturate"),
        ("flows = flows & (tl.abs(value) <= bound)", "flows = flows & (value <= bound)",
         "kernels/test_policy_loss.py::test_kl_and_regularizer"),
        ("if PLAN.kl_swapped:\n        slope = -slope", "if PLAN.kl_swapped:\n        slope = slope",
         "kernels/test_policy_loss.py::test_kl_and_regularizer"),
        ('if PLAN.option == "one_side":\n        high, low = high & (advantage > 0)',
         'if PLAN.option == "one_side":\n        high, low = high & (advantage < 0)',
         "kernels/test_policy_loss.py::test_surrogates"),
    ),
    *_in(
        "kernels/policy_loss/gradient.py",
        ("gradient += tl.where(held & flows, 2.0 * coefficient * saturated, 0.0)",
         "gradient += tl.where(held, 2.0 * coefficient * saturated, 0.0)",
         "kernels/test_policy_loss.py::test_squares_and_penalties_saturate"),
        ("coefficient * (slope * factor + value * factor_slope)", "coefficient * slope * factor",
         "kernels/test_policy_loss.py::test_kl_and_regularizer"),
    ),
]  # fmt: skip
