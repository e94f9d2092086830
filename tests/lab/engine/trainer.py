"""Log-probs of a Hugging Face model for answers of an engine, laid out right or with a bug that trainers have."""

from collections.abc import Iterator

import torch

from lab.engine.models import PAD
from lab.engine.rollouts import Answer


def logp(model, answers: list[Answer], **layout) -> list[torch.Tensor]:
    """One float32 tensor of log-probs for each answer, by `distributions`."""
    found = zip(answers, distributions(model, answers, **layout), strict=True)
    return [rows.gather(1, torch.tensor(answer.ids)[:, None])[:, 0] for answer, rows in found]


def entropy(model, answers: list[Answer]) -> torch.Tensor:
    """The entropy of the distribution of each token, packed."""
    return torch.cat([-(rows.exp() * rows).sum(1) for rows in distributions(model, answers)])


@torch.no_grad()
def distributions(
    model, answers, temperature=1.0, left=False, bug: str | None = None, rows=32
) -> Iterator[torch.Tensor]:
    """The log-softmax of every token of each answer.

    Args:
        model: Of Hugging Face.
        answers: Of an engine.
        temperature: Divides the logits.
        left: Pad on the left.
        bug: "positions" (they count the padding), "no mask" (padding is attended to), "gap" (padding between prompt and
            answer, counted by the positions), "packed" (sequences of one row attend to each other), "late" (the logits
            of the next place).
        rows: Answers of one batch, or of one packed row.
    """
    for start in range(0, len(answers), rows):
        part = answers[start : start + rows]
        logits, places = _packed(model, part) if bug == "packed" else _padded(model, part, left, bug)
        for row, columns in places:
            columns = (columns + (bug == "late")).clamp(max=logits.shape[1] - 1)
            yield (logits[row, columns].float() / temperature).log_softmax(-1)


def _padded(model, answers, left, bug):
    """The logits of a padded batch, and where those that predict each answer lie: a row and its columns."""
    wide = max(len(a.prompt) for a in answers) if bug == "gap" else None
    width = (wide or 0) + max(len(a.ids) if wide else len(a.prompt + a.ids) for a in answers)
    ids, mask, places = torch.full((len(answers), width), PAD), torch.zeros(len(answers), width).long(), []
    for row, answer in enumerate(answers):
        begin = width - len(answer.prompt + answer.ids) if left else 0
        last, first = begin + len(answer.prompt) - 1, wide or begin + len(answer.prompt)
        for at, part in ((begin, answer.prompt), (first, answer.ids)):
            ids[row, at : at + len(part)] = torch.tensor(part)
            mask[row, at : at + len(part)] = 1
        places.append((row, torch.tensor([last, *range(first, first + len(answer.ids) - 1)])))
    positions = torch.arange(width).expand(len(answers), -1) if bug else (mask.cumsum(1) - 1).clamp(min=0)
    return model(ids, attention_mask=None if bug == "no mask" else mask, position_ids=positions).logits, places


def _packed(model, answers):
    """The same for one row of all sequences, with right positions and a mask that is causal over the whole row."""
    lengths = [len(a.prompt + a.ids) for a in answers]
    ids = torch.tensor([[token for a in answers for token in a.prompt + a.ids]])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    causal = torch.ones(1, 1, sum(lengths), sum(lengths), dtype=torch.bool).tril()
    ends = torch.tensor(lengths).cumsum(0).tolist()
    places = [(0, torch.arange(end - len(a.ids) - 1, end - 1)) for end, a in zip(ends, answers, strict=True)]
    return model(ids, position_ids=positions, attention_mask=causal).logits, places
