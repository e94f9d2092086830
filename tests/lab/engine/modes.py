"""What a run of RL does with an engine, right and wrong: each mode gives rollouts and the log-probs of a trainer."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lab.engine import models
from lab.engine.models import ASSISTANT, BOS, EOS, PAD, TOOL, USER
from lab.engine.rollouts import Answer, engine, push, sample
from lab.engine.trainer import entropy, logp
from lab.engine.verdicts import CURRENT

BIAS = {22: 2.0, 30: -100.0}  # of the logits of the digits 1 and 9


@dataclass(frozen=True)
class Dump:
    """What one mode gives.

    Attributes:
        mode: Its name, a key of `verdicts.ACCEPTED`.
        answers: What the engine sampled, with its log-probs.
        train: The trainer's log-probs of each answer.
        columns: More columns of a dump, one value a token or a sequence.
    """

    mode: str
    answers: list[Answer]
    train: list[Tensor]
    columns: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, packed."""
        lengths = torch.tensor([0, *(len(a.ids) for a in self.answers)])
        found = {
            "train_logp": torch.cat(self.train).float(),
            "rollout_logp": torch.tensor([x for a in self.answers for x in a.logp]),
            "cu_seqlens": lengths.cumsum(0).int(),
            "token_ids": torch.tensor([x for a in self.answers for x in a.ids]),
        }
        if self.answers[0].mask is not None:
            found["mask"] = torch.tensor([x for a in self.answers for x in a.mask])
        return found | self.columns


class Study:
    """A model, a seed of sampling, and the prompts.

    Args:
        folder: Of the models.
        kind: The name of a model.
        seed: Of prompts and sampling.
        count: The number of prompts.
    """

    def __init__(self, folder: Path, kind: str, seed: int, count: int) -> None:
        self.kind, self.seed, self.model = kind, seed, folder / kind
        self.tokenizer = models.load_tokenizer(folder, kind)
        self.rng = random.Random(1000 + seed)
        self.prompts = [self.prompt(number) for number in range(count)]

    @cached_property
    def fp32(self):
        return models.load(self.model)

    @cached_property
    def bf16(self):
        return models.load(self.model, torch.bfloat16)

    @cached_property
    def text(self) -> str:
        kind = models.kind_of(self.kind)
        return kind.text()[kind.read :]

    def ask(self) -> list[int]:
        return [USER, *self.tokenizer.encode(models.problem(self.rng, True)[0]).ids, ASSISTANT]

    def prompt(self, number: int) -> list[int]:
        """A question, or the beginning of a text that the model continues."""
        if (number + 1) % models.kind_of(self.kind).asked == 0:
            return [BOS, *self.ask()]
        at = self.rng.randrange(len(self.text) - 400)
        return [BOS, *self.tokenizer.encode(self.text[at : at + self.rng.randrange(40, 200)]).ids]

    def sample(self, llm, prompts=None, **sampling) -> list[Answer]:
        limit = {"max_tokens": 128 if self.kind == "peaky" else 64}
        return sample(llm, prompts or self.prompts, self.seed, **(limit | sampling))

    def dump(self, mode: str, answers: list[Answer], train=None, **columns) -> Dump:
        """A dump of the mode; without `train` the float32 trainer scores the answers as it should."""
        return Dump(mode, answers, logp(self.fp32, answers) if train is None else train, columns)


def raw(study: Study) -> Iterator[Dump]:
    """An engine that returns the log-probs of the model."""
    with engine(study.model) as llm:
        base, cool, hot = (study.sample(llm, temperature=t) for t in (1.0, 0.7, 1.3))
        blind = {
            "top_p": study.sample(llm, top_p=0.9),
            "top_k": study.sample(llm, top_k=20),
            "min_p": study.sample(llm, min_p=0.05),
            "repetition_penalty": study.sample(llm, repetition_penalty=1.2),
            "presence_penalty": study.sample(llm, presence_penalty=1.0),
            "logit_bias": study.sample(llm, logit_bias=BIAS),
        }
        yield from turns(study, llm)
        yield from pushed(study, llm, base)
    yield study.dump("bf16", base)
    yield study.dump("bf16_both", base, logp(study.bf16, base))
    for name, answers in blind.items():
        yield study.dump(f"raw_{name}", answers)
    yield study.dump("raw_temperature_0.7", cool)
    for name, answers in {"bf16": base, "raw_temperature_0.7": cool, "raw_top_p": blind["top_p"]}.items():
        yield study.dump(f"{name}_with_entropy", answers, entropy=entropy(study.fp32, answers))
    for t, answers in ((0.7, cool), (1.3, hot)):
        train = logp(study.fp32, answers, temperature=t)
        yield study.dump(f"raw_temperature_{t}_trainer_too", answers, train)
    train = logp(study.fp32, base, temperature=0.7)
    yield study.dump("trainer_temperature_0.7", base, train)
    yield from layouts(study, base)
    yield from prompts(study, base)
    yield from weights(study, base)


def layouts(study: Study, base: list[Answer]) -> Iterator[Dump]:
    """Padding, packing, positions, shifts: what goes wrong between the tokens and the loss."""
    for name, options in (
        ("left_padded", {"left": True}),
        ("left_padded_positions", {"left": True, "bug": "positions"}),
        ("left_padded_no_mask", {"left": True, "bug": "no mask"}),
        ("position_gap", {"bug": "gap"}),
        ("packed_attends_across", {"bug": "packed", "rows": 6}),
        ("gathered_one_late", {"bug": "late"}),
    ):
        yield study.dump(name, base, logp(study.fp32, base, **options))
    right = logp(study.fp32, base)
    yield study.dump("slice_one_early", base, [torch.cat([x[1:], x[-1:]]) for x in right])
    yield study.dump("slice_one_late", base, [torch.cat([x.new_zeros(1), x[:-1]]) for x in right])
    pairs = [(a, b, min(len(a.ids), len(b.ids))) for a, b in zip(base, [*base[1:], base[0]], strict=True)]
    mixed = [a.but(ids=a.ids[:n], logp=b.logp[:n]) for a, b, n in pairs]
    yield study.dump("rows_swapped", mixed, [x[:n] for x, (*_, n) in zip(right, pairs, strict=True)])
    # Where no answer is cut they plant nothing.
    if any(a.cut for a in base):
        yield study.dump("eos_forced", [a.but(ids=[*a.ids[:-1], EOS]) if a.cut else a for a in base])
        added = [a.but(ids=[*a.ids, EOS], logp=[*a.logp, 0.0]) if a.cut else a for a in base]
        yield study.dump("eos_added", added)
    longest = max(len(a.ids) for a in base)
    rest = [longest - len(a.ids) for a in base]
    padded = [a.but(ids=a.ids + [PAD] * n, logp=a.logp + [0.0] * n) for a, n in zip(base, rest, strict=True)]
    train = [torch.cat([x, x.new_zeros(n)]) for x, n in zip(right, rest, strict=True)]
    yield study.dump("padding_not_masked", padded, train)


def prompts(study: Study, base: list[Answer]) -> Iterator[Dump]:
    """Another prompt in the trainer than in the engine."""
    changes: dict[str, Callable[[list[int]], list[int]]] = {
        "double_bos": lambda ids: [BOS, *ids],
        "no_bos": lambda ids: ids[1:],
        "no_assistant": lambda ids: [token for token in ids if token != ASSISTANT],
        "cut_left": lambda ids: ids[-8:],
    }
    for name, change in changes.items():
        changed = [a.but(prompt=change(a.prompt)) for a in base]
        yield study.dump(f"prompt_{name}", base, logp(study.fp32, changed))


@torch.no_grad()
def weights(study: Study, base: list[Answer]) -> Iterator[Dump]:
    """Other weights, or another architecture, in the trainer."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(study.fp32.config)
    rope = config.rope_parameters
    for one in rope.values() if "rope_theta" not in rope else [rope]:  # each kind of layer may have its own
        one["rope_theta"] = 1e6
    other = AutoModelForCausalLM.from_config(config).float().eval()
    other.load_state_dict(study.fp32.state_dict())
    yield study.dump("rope_theta", base, logp(other, base))
    for name in ("random", "old64"):
        other = copy.deepcopy(study.fp32)
        head = torch.randn_like(other.lm_head.weight) * 0.02
        if name == "old64":
            head = models.load(study.model / "old64").lm_head.weight
        other.lm_head.weight = torch.nn.Parameter(head.clone())
        yield study.dump(f"head_untied_{name}", base, logp(other, base))
    for strength, name in ((0.01, "lora_not_loaded"), (0.004, "weak_lora_not_loaded")):
        other = copy.deepcopy(study.fp32)
        draw = torch.Generator().manual_seed(study.seed)
        for layer in other.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.down_proj):
                rows, columns = part.weight.shape
                low = torch.randn(rows, 8, generator=draw) @ torch.randn(8, columns, generator=draw)
                part.weight += strength * low
        yield study.dump(name, base, logp(other, base))


def pushed(study: Study, llm, base: list[Answer]) -> Iterator[Dump]:
    """Weights of earlier steps or of fewer bits pushed into the engine: into all replicas, or into one of two."""
    half = len(base) // 2
    for age in models.AGES:
        push(llm, models.load(study.model / f"old{age}").state_dict())
        old = study.sample(llm)
        yield study.dump(f"stale_{age}", old)
        if age < 16:
            continue
        mixed = old[:half] + base[half:]
        replica = torch.tensor([0] * half + [1] * (len(mixed) - half))
        train = logp(study.fp32, mixed)
        versions = CURRENT - age * (1 - replica)
        yield study.dump(f"versions_mixed_{age}", mixed, train, versions=versions)
        yield study.dump(f"replica_stale_{age}", mixed, train)
        yield study.dump(f"replica_stale_{age}_labelled", mixed, train, replica=replica)
    for form in ("fp8", "int4", "int3"):
        push(llm, models.rounded(study.fp32, form))
        yield study.dump(f"{form}_weights", study.sample(llm))
    push(llm, study.fp32.state_dict())


def turns(study: Study, llm) -> Iterator[Dump]:
    """Two answers with the output of a tool and a question between them."""
    first = study.sample(llm, [[BOS, *study.ask()] for _ in study.prompts], max_tokens=64)
    tool = [[TOOL, *study.tokenizer.encode(str(study.rng.randrange(10_000))).ids, *study.ask()] for _ in first]
    second = study.sample(llm, [a.prompt + a.ids + b for a, b in zip(first, tool, strict=True)], max_tokens=64)

    def whole(between: list[list[int]], masked: bool = True) -> list[Answer]:
        found = []
        for a, b, c in zip(first, between, second, strict=True):
            parts = (len(a.ids), len(b), len(c.ids))
            spread = [number for number, length in enumerate(parts) for _ in range(length)]
            mask = [int(not masked or number != 1) for number in spread]
            found.append(Answer(a.prompt, a.ids + b + c.ids, a.logp + [0.0] * len(b) + c.logp, c.cut, mask, spread))
        return found

    def column(answers):
        return {"turns": torch.tensor([x // 2 for a in answers for x in a.turns])}

    right = whole(tool)
    yield study.dump("turns", right, **column(right))
    yield study.dump("turns_tool_not_masked", whole(tool, masked=False))
    for name, between in (
        ("turns_template_differs", [[token for token in b if token != ASSISTANT] for b in tool]),
        ("turns_tool_output_lost", [b[b.index(USER) :] for b in tool]),
        ("turns_all_text_lost", [[] for _ in tool]),
    ):
        changed = whole(between)
        yield study.dump(name, changed, **column(changed))


def processed(study: Study) -> Iterator[Dump]:
    """An engine that returns the log-probs of what it sampled from."""
    with engine(study.model, logprobs_mode="processed_logprobs") as llm:
        cool = study.sample(llm, temperature=0.7)
        yield study.dump("processed", study.sample(llm))
        yield study.dump("processed_temperature_0.7", cool, logp(study.fp32, cool, temperature=0.7))
        yield study.dump("processed_temperature_0.7_trainer_1", cool)
        for name, options in {
            "top_p_0.9": {"top_p": 0.9},
            "top_p_0.95": {"top_p": 0.95},
            "top_k_20": {"top_k": 20},
            "top_k_2": {"top_k": 2},
            "min_p_0.05": {"min_p": 0.05},
        }.items():
            yield study.dump(f"processed_{name}", study.sample(llm, **options))
        both = study.sample(llm, temperature=0.7, top_p=0.9)
        train = logp(study.fp32, both, temperature=0.7)
        yield study.dump("processed_temperature_0.7_top_p_0.9", both, train)
        yield study.dump("processed_temperature_0.7_top_p_0.9_trainer_1", both)
        for name, options in {
            "repetition_penalty": {"repetition_penalty": 1.2},
            "presence_penalty": {"presence_penalty": 1.0},
            "frequency_penalty": {"frequency_penalty": 0.5},
            "logit_bias": {"logit_bias": BIAS},
            "min_tokens": {"min_tokens": 64},
        }.items():
            yield study.dump(f"processed_{name}", study.sample(llm, **options))


def precision(study: Study) -> Iterator[Dump]:
    """Engines in other number formats, and ones that compute the same in another order."""
    for name, folder, settings in (
        ("fp16", "", {"dtype": "float16"}),
        ("prefix_caching", "", {"enable_prefix_caching": True}),
        ("chunked_prefill", "", {"max_num_batched_tokens": 32, "max_num_seqs": 16}),
        ("int8_weights_and_activations", "int8", {}),
        ("int4_kernels", "int4", {}),
        ("kv_cache_fp8_e4m3", "", {"kv_cache_dtype": "fp8_e4m3"}),
        ("kv_cache_fp8_e5m2", "", {"kv_cache_dtype": "fp8_e5m2"}),
    ):
        if (study.kind, name) == ("gemma", "fp16"):
            continue  # vLLM refuses it
        with engine(study.model / folder, **settings) as llm:
            if name == "prefix_caching":
                study.sample(llm)  # so that the second time every prompt is in the cache
            yield study.dump(name, study.sample(llm))
    with engine(study.model, dtype="float32") as llm:
        answers = study.sample(llm)
    yield study.dump("fp32", answers)
    yield study.dump("fp32_trainer_bf16", answers, logp(study.bf16, answers))
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with engine(study.model, speculative_config=speculative) as llm:
        yield study.dump("speculative_ngram", study.sample(llm))


def experts(study: Study) -> Iterator[Dump]:
    """A mixture of experts, whose router may choose other experts in another precision."""
    with engine(study.model) as llm:
        answers = study.sample(llm)
    yield study.dump("moe", answers)
    yield study.dump("moe_bf16_both", answers, logp(study.bf16, answers))
    for layer in study.fp32.model.layers:
        layer.mlp.gate.top_k = 1
    yield study.dump("moe_trainer_top_1", answers)


def run(folder: Path, kind: str, seed: int, count: int) -> Iterator[Dump]:
    """Every mode of a model, one after another."""
    study = Study(folder, kind, seed, count)
    for part in (experts,) if kind == "moe" else (raw, processed, precision):
        yield from part(study)
