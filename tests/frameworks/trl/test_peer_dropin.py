"""TRL itself: GRPOTrainer trains a tiny model on the CPU with the drop-in and without it (make test-peers).

vLLM is not there, so the sampling engine is a stand-in: it samples from the model that trains, and its log-probs are
those of the model with noise, as a quantized engine's are. All else is TRL's own.
"""

from __future__ import annotations

import functools

import pytest
import torch

from rollout_corr.frameworks.trl import dropin as drop_in

pytestmark = pytest.mark.peers

WORDS = ["<pad>", "<eos>", *"abcdefghijklmn"]
STEPS = 10


class Engine:
    """Stands in for vLLM: same results from call to call of the same training."""

    def __init__(self, trainer, noise):
        self.trainer, self.noise = trainer, noise
        self.made = torch.Generator().manual_seed(7)

    def sync_weights(self):
        pass

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler=None):
        found = [self.one(prompt) for prompt in prompts]
        return None, [ids for ids, _ in found], [logps for _, logps in found], None

    def one(self, prompt):
        ids, logps = [], []
        while len(ids) < 8 and (not ids or ids[-1] != 1):
            logits = self.trainer.model(torch.tensor([[*prompt, *ids]])).logits[0, -1] / self.trainer.temperature
            logp = logits.log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1, generator=self.made))
            ids.append(token)
            logps.append([float(logp[token] + self.noise * torch.randn((), generator=self.made))])
        return ids, logps


def reward(completions, **columns):
    """How many different letters."""
    return [float(len(set(completion))) for completion in completions]


def train(folder, noise=0.2, **settings):
    """The losses of ten steps, and the parameters after them."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes))
    arguments = GRPOConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        num_generations=4,
        num_iterations=2,
        max_completion_length=8,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        seed=0,
        disable_tqdm=True,
        **settings,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c d", "e f", "g h"]}),
        processing_class=tokenizer,
    )
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, Engine(trainer, noise), 0
    trainer.train()
    logged = trainer.state.log_history
    losses = [entry["loss"] for entry in logged if "loss" in entry]
    key = "sampling/importance_sampling_ratio/mean"
    assert len(losses) == STEPS and len({entry[key] for entry in logged if key in entry}) > 1
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.fixture
def calls(monkeypatch):
    """Names of our functions, in the order in which they were called."""
    called = []
    for name in ("importance_sampling_ratio", "correct"):
        original = getattr(drop_in, name)

        @functools.wraps(original)
        def counting(*args, original=original, name=name, **kwargs):
            called.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(drop_in, name, counting)
    yield called
    drop_in.uninstall()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.1},
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.8, "loss_type": "grpo"},
        {"off_policy_mask_threshold": 0.01, "vllm_importance_sampling_mode": "sequence_truncate"},
        {"vllm_importance_sampling_mode": "token_mask", "loss_type": "vespo"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_trains_the_same(settings, tmp_path, calls):
    """Ten steps with and without; the path has to have been ours."""
    theirs, their_parameters = train(tmp_path, **settings)
    assert not calls
    assert drop_in.install().version in drop_in.DROP_IN.checked
    ours, our_parameters = train(tmp_path, **settings)
    status = drop_in.installed()
    assert status.active and "trl.trainer.grpo_trainer.GRPOTrainer.get_off_policy_mask" in status.replaced
    # A batch is generated every second step.
    assert calls.count("importance_sampling_ratio") == calls.count("correct") >= STEPS // 2
    # Exponentials of float32 differ in the last bit; ten steps of Adam at 1e-2 carry that along.
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
    torch.testing.assert_close(our_parameters, their_parameters, rtol=1e-4, atol=1e-6)


def test_a_wrong_ratio_would_be_noticed(tmp_path, calls, monkeypatch):
    """The comparison above fails if the ratio that trains is another one."""
    theirs, _ = train(tmp_path)
    drop_in.install()
    original = drop_in.importance_sampling_ratio
    monkeypatch.setattr(drop_in, "importance_sampling_ratio", lambda *given: 1.01 * original(*given))
    ours, _ = train(tmp_path)
    assert ours != pytest.approx(theirs, rel=1e-5, abs=1e-7)
