"""The tokens of a label in what the oracle found of whole sequences, for its metrics of tokens."""

from __future__ import annotations

from dataclasses import replace


def of_label(answer, labels, label):
    """The answer, as if only the tokens of one label were valid: their weights and rejections stay what they were.

    Args:
        answer: Of `oracles.correction.correct`.
        labels: Per sequence, the label of each token.
        label: The label.
    """

    def chosen(rows, nothing):
        return [
            [value if own == label else nothing for value, own in zip(row, of_row, strict=True)]
            for row, of_row in zip(rows, labels, strict=True)
        ]

    outcomes = [
        replace(
            outcome,
            dropped=chosen(outcome.dropped, False),
            values=chosen(outcome.values, None) if criterion_per_token(outcome, labels) else outcome.values,
        )
        for outcome in answer.outcomes
    ]
    return replace(answer, tokens=chosen(answer.tokens, None), outcomes=outcomes)


def criterion_per_token(outcome, labels):
    """Tell whether a criterion has a value for each token."""
    return all(isinstance(row, list) for row in outcome.values)
