"""Ages of tokens for the oracle of a correction."""

from __future__ import annotations


def age_at(sequence, t):
    """current_version - version of a token."""
    version = sequence.versions[t] if isinstance(sequence.versions, list) else sequence.versions
    return float(sequence.current_version - version)


def beside(criterion, sequence, t):
    """Give the value that a statistic reads at a token besides log-probs."""
    if criterion.stat == "age":
        return age_at(sequence, t)
    if criterion.stat == "entropy":
        return sequence.external["entropy"][t]
    return sequence.external[criterion.name][t] if criterion.stat == "external" else None


def decayed(weight, spec, sequence, t):
    """A weight after the decay with age; a version of the future counts as the current one."""
    if not weight or spec.weight is None or spec.weight.decay is None:
        return weight
    return weight * spec.weight.decay ** max(age_at(sequence, t), 0.0)
