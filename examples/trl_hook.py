"""TRL: the ratio that GRPOTrainer multiplies its loss by, from any Spec in place of its four modes.

    pip install /path/to/rollout-corr trl==1.16.0
    python trl_hook.py

In a training script it is one line before `trainer.train()`, which `accelerate launch` runs in every process:

    import rollout_corr as rc
    from rollout_corr.frameworks import trl as trl_dropin
    trl_dropin.install()                                                   # TRL's own mode, computed here
    trl_dropin.install(spec=rc.spec("verl.decoupled_token_is"))            # or any Spec

This script trains a tiny model for a few steps with TRL's own ratio, with ours of the same mode, and with a Spec. The
losses of the first two agree; those of the Spec are others from the first step on, because it rejects sequences. A GRPO
loss is near 0 by construction, so its size says nothing of a run. Warnings go to the log: here about log-probs that are
a little off, and about a Spec that rejects most of them. The last line shows what the trainer logs of the Spec.

TRL corrects only what vLLM has sampled. So that no GPU is needed, a function stands in for vLLM here: it samples from
the model, and its log-probs are a little off.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace

import torch

try:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install /path/to/rollout-corr trl==1.16.0") from None

import rollout_corr as rc
from rollout_corr.frameworks.trl import dropin

STEPS, LENGTH = 4, 8
VOCABULARY = {word: i for i, word in enumerate(["<pad>", "<eos>", *"abcdefghijklmn"])}
SPEC = rc.Spec(
    weight=rc.Weight.token(upper=1.1),
    criteria=(rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.95, upper=1.05),),
)


@torch.no_grad()
def sample(prompts, trainer):
    """Sample as an engine would, from prompts of one token: eight more tokens each, and their log-probs."""
    made = torch.Generator().manual_seed(trainer.state.global_step)
    prompt_ids = trainer.processing_class(prompts)["input_ids"]
    tokens, logps = torch.tensor(prompt_ids), torch.empty(len(prompts), 0)
    for _ in range(LENGTH):
        logp = trainer.model(tokens).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(logp.exp(), 1, generator=made)
        tokens, logps = torch.cat([tokens, chosen], 1), torch.cat([logps, logp.gather(1, chosen)], 1)
    logps += 0.2 * torch.randn(logps.shape, generator=made)
    return {"prompt_ids": prompt_ids, "completion_ids": tokens[:, 1:].tolist(), "logprobs": logps.tolist()}


def different_letters(completion_ids, **columns):
    return [float(len(set(ids))) for ids in completion_ids]


def train(folder):
    """Train for a few steps and return the trainer's log."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(VOCABULARY), pad_token_id=0, eos_token_id=1, **sizes)),
        reward_funcs=different_letters,
        args=GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=LENGTH,
            learning_rate=1e-2,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=1.1,
            logging_steps=1,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b", "c", "d"]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
        rollout_func=sample,
    )
    # With vLLM, GRPOConfig(use_vllm=True) does what this line does.
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, SimpleNamespace(sync_weights=list), 0
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        theirs = train(folder)
        print(dropin.install().why)
        same = train(folder)
        dropin.install(spec=SPEC)
        spec = train(folder)
    for name, steps in (("TRL's own", theirs), ("ours, same mode", same), ("ours, the Spec", spec)):
        print(f"{name}:", *(f"{step['loss']:.6f}" for step in steps))
    for key in ("sampling/importance_sampling_ratio/mean", "rollout_corr/tokens_kept_fraction"):
        print(f"{key}:", *(f"{step[key]:.3f}" for step in spec))


if __name__ == "__main__":
    main()
