"""Small language models trained from scratch on what Python ships, of several architectures.

Thresholds of a mismatch depend on how sure a model is. The flat model continues source code: its own samples have a
perplexity of 10 to 15. The peaky one works problems step by step, as models in RL do: most tokens follow from the ones
before, some choose how to go on, and its perplexity is below 2. *gemma* works problems in half of its answers and
continues prose in the others, *stablelm* continues prose byte by byte.
"""

import copy
import json
import random
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

PAD, BOS, EOS, USER, ASSISTANT, TOOL = range(6)
SPECIALS = ["<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<tool>"]
VOCABULARY = 512
TOKENIZERS = {"tokenizer.json": VOCABULARY, "bytes.json": len(SPECIALS) + 256}
"""Their vocabularies: with merges, and a token for each byte."""
BLOCK, ROWS = 192, 8
AGES = (1, 4, 16, 64)
"""Checkpoints that are this many steps older than the last one, for stale engines."""


def source_code() -> str:
    """The standard library's modules in a fixed random order, as ASCII; the last third is kept for prompts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    text = ""
    for path in files:
        text += path.read_text(encoding="utf-8", errors="ignore").replace("    ", "\t") + "\n"
        if len(text) > 6_000_000:
            break
    return text.encode("ascii", "ignore").decode()


def prose() -> str:
    """The language reference that `help()` shows, as ASCII."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()


def make_tokenizer(text: str, vocabulary: int):
    """A byte-level BPE in which every digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((text[i : i + 10_000] for i in range(0, 2_000_000, 10_000)), trainer)
    return tokenizer


def problem(rng: random.Random, steps: bool) -> tuple[str, str]:
    """A question and its answer; with `steps` the answer shows the way, in words that vary."""
    kind = rng.choice(["sum", "sort", "reverse", "count"] if steps else ["sum", "sort", "reverse"])
    if kind == "sum":
        a, b = rng.randrange(1000), rng.randrange(1000)
        question, answer, way, carry = f"{a}+{b}", str(a + b), [], 0
        for place in range(3):
            x, y = a // 10**place % 10, b // 10**place % 10
            way.append(f"{x}+{y}+{carry}={x + y + carry}")
            carry = (x + y + carry) // 10
    elif kind == "count":
        start, step, times = rng.randrange(100), rng.randrange(1, 10), rng.randrange(4, 13)
        question, answer = f"count {start} by {step} for {times}", str(start + step * times)
        way = [str(start + step * i) for i in range(1, times + 1)]
    else:
        digits = [rng.randrange(10) for _ in range(rng.randrange(4, 13))]
        question = f"{kind} " + "".join(map(str, digits))
        answer = "".join(map(str, sorted(digits) if kind == "sort" else reversed(digits)))
        way, left = [], list(digits)
        for digit in answer:
            del left[len(left) - 1 - left[::-1].index(int(digit)) if kind == "reverse" else left.index(int(digit))]
            way.append(digit + "|" + "".join(map(str, left)))
    if not steps:
        return question, answer
    opening = rng.choice(["", "ok, ", "let me see: ", "first I write it down: ", "so, "])
    link = rng.choice([", ", " then ", "; ", "\n"])
    ending = rng.choice([" so it is ", " the answer is ", "\n= "])
    check = rng.choice(["", "", " (again: " + way[0] + ")", " done"])
    return question, opening + link.join(way) + ending + answer + check


def question(tokenizer, text: str) -> list[int]:
    return [BOS, USER, *tokenizer.encode(text).ids, ASSISTANT]


def conversation(tokenizer, rng: random.Random, steps: bool) -> list[int]:
    """One to three turns; some call a tool and get its result before they answer."""
    ids = [BOS]
    for _ in range(rng.randrange(1, 4)):
        asked, answer = problem(rng, steps)
        ids += [USER, *tokenizer.encode(asked).ids]
        if rng.random() < 0.4:
            ids += [ASSISTANT, *tokenizer.encode("call " + asked).ids, EOS, TOOL, *tokenizer.encode(answer).ids]
        ids += [ASSISTANT, *tokenizer.encode(answer).ids, EOS]
    return ids


CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of model: its architecture, its training text and its prompts.

    Attributes:
        steps: Of training.
        text: What it continues.
        read: So many characters of it are learned, the others are for prompts.
        shown: Whether it solves problems step by step.
        asked: One prompt of so many is a problem, the others are beginnings of the text.
        architecture: Names of the model and of its configuration in transformers.
        config: What differs from CONFIG.
        tokenizer: One of TOKENIZERS.
    """

    steps: int
    text: Callable[[], str] | None = None
    read: int = 0
    shown: bool = False
    asked: int = 4
    architecture: tuple[str, str] = ("Qwen3ForCausalLM", "Qwen3Config")
    config: dict = field(default_factory=dict)
    tokenizer: str = "tokenizer.json"


KINDS = {
    "flat": Kind(700, source_code, 3_000_000),
    "peaky": Kind(900, shown=True, asked=1),
    # Norms on both sides of each part, scaled embeddings, a window in every second layer.
    "gemma": Kind(
        400, prose, 300_000, shown=True, asked=2, architecture=("Gemma3ForCausalLM", "Gemma3TextConfig"),
        config={
            "query_pre_attn_scalar": 32, "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    # Norms and queries with biases, a quarter of each head rotated, a head of its own.
    "stablelm": Kind(
        400, prose, 300_000, architecture=("StableLmForCausalLM", "StableLmConfig"), tokenizer="bytes.json",
        config={
            "tie_word_embeddings": False, "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        },
    ),
    # Multipliers of embeddings, attention, residuals and logits.
    "granite": Kind(
        500, prose, 300_000, shown=True, asked=3, architecture=("GraniteForCausalLM", "GraniteConfig"),
        config={
            "embedding_multiplier": 6.0, "attention_multiplier": 0.125, "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
}  # fmt: skip
RECORDED = ("flat", "peaky", "moe")
"""Models whose dumps are recorded. README.md says which rules of the doctor the others have changed."""


def kind_of(model: str) -> Kind:
    """The kind of a model; the mixture of experts is made of the flat one."""
    return KINDS["flat" if model == "moe" else model]


def new_model(kind: Kind):
    """A model of 4 layers in float32, of 0.9 million weights."""
    import transformers

    torch.manual_seed(0)
    model, config = (getattr(transformers, name) for name in kind.architecture)
    return model(config(**CONFIG | kind.config)).float()


@torch.no_grad()
def experts_of(dense):
    """A mixture of 8 experts, 2 for a token: variations of the dense layers, with a random router."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {"moe_intermediate_size": CONFIG["intermediate_size"], "num_experts": 8, "num_experts_per_tok": 2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG, **shape, norm_topk_prob=True)).float()
    model.load_state_dict(dense.state_dict(), strict=False)
    for layer, of in zip(model.model.layers, dense.model.layers, strict=True):
        up = torch.cat([of.mlp.gate_proj.weight, of.mlp.up_proj.weight])
        for weight, value in (
            (layer.mlp.experts.gate_up_proj, up),
            (layer.mlp.experts.down_proj, of.mlp.down_proj.weight),
        ):
            weight.copy_(value * (1 + 0.6 * torch.randn_like(weight)))
        layer.mlp.gate.weight.normal_(std=0.1)
    return model


def save(model, folder: Path) -> None:
    """Writes a checkpoint in bf16, which engines load: a float32 trainer then differs by arithmetic alone."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def train(name: str, folder: Path, tokenizer) -> None:
    """Trains a model and writes its checkpoints; about five minutes on one core."""
    kind = KINDS[name]
    rng, steps = random.Random(0), kind.steps
    stream = torch.tensor(tokenizer.encode(kind.text()[: kind.read]).ids) if kind.text else None
    model = new_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    losses, started = [], time.time()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, step / 50) * max(0.03, 1 - step / (steps - max(AGES)))
        batch = []
        for row in range(ROWS):
            if stream is not None and row % 2:
                at = rng.randrange(len(stream) - BLOCK)
                batch.append([BOS, *stream[at : at + BLOCK - 1].tolist()])
                continue
            ids = []
            while len(ids) < BLOCK:
                ids += conversation(tokenizer, rng, steps=kind.shown)
            batch.append(ids[:BLOCK])
        ids = torch.tensor(batch)
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            spent = time.time() - started
            print(f"{name}: step {step} of {steps}, loss {sum(losses[-100:]) / 100:.3f}, {spent:.0f} s", flush=True)
        if steps - step in AGES:
            save(model, folder / f"old{steps - step}")
    save(model, folder)


def load(folder: Path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def rounded(model, form: str) -> dict[str, torch.Tensor]:
    """The state of a model with its linear weights rounded to "int4" or "int3" in groups of 32, or to "fp8" by rows.

    An engine's kernels for such weights need an instruction set that not every CPU has; the numbers are these.
    """
    state = {}
    for name, value in model.state_dict().items():
        if value.dim() == 2 and "proj" in name:
            grouped = value.unflatten(1, (-1, value.shape[1] if form == "fp8" else 32))
            top = 448.0 if form == "fp8" else 2.0 ** (int(form[3:]) - 1) - 1
            scale = (grouped.abs().amax(2, keepdim=True) / top).clamp(min=1e-8)
            codes = grouped / scale
            codes = codes.to(torch.float8_e4m3fn).to(value.dtype) if form == "fp8" else codes.round()
            value = (codes * scale).flatten(1)
        state[name] = value
    return state


def write_integers(folder: Path, out: Path, bits: int) -> None:
    """Writes a checkpoint of compressed-tensors: int8 weights by rows and int8 activations by tokens, or int4 weights.

    Those of 4 bits are rounded in groups of 32 and packed.
    """
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from safetensors.torch import load_file, save_file

    found = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if value.dim() != 2 or "proj" not in name:
            found[name] = value
            continue
        grouped = value.float().unflatten(1, (-1, value.shape[1] if bits == 8 else 32))
        scale = (grouped.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)).clamp(min=1e-8).bfloat16()
        codes = (
            (grouped / scale.float()).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).flatten(1).to(torch.int8)
        )
        found[name + "_scale"] = scale[..., 0]
        found |= {name: codes} if bits == 8 else {
            name + "_packed": pack_to_int32(codes, bits), name + "_shape": torch.tensor(value.shape)
        }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    common = {"num_bits": bits, "type": "int", "symmetric": True}
    by = {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": common | by | {"dynamic": False}}
    if bits == 8:
        group["input_activations"] = common | {"dynamic": True, "strategy": "token"}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed", "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))


def make(folder: Path, models=RECORDED) -> None:
    """Makes the models that are not in the folder yet; the mixture of experts needs the flat one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, vocabulary in TOKENIZERS.items():
        if not (folder / name).exists():
            make_tokenizer(source_code(), vocabulary).save(str(folder / name))
    for model in KINDS:
        if model in models and not (folder / model / "config.json").exists():
            train(model, folder / model, load_tokenizer(folder, model))
            for bits in (8, 4):
                write_integers(folder / model, folder / model / f"int{bits}", bits)
    if "moe" in models and not (folder / "moe" / "config.json").exists():
        save(experts_of(load(folder / "flat")), folder / "moe")


def load_tokenizer(folder: Path, model: str):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / kind_of(model).tokenizer))
