"""TRL itself: AsyncGRPOTrainer trains a tiny model on the CPU with the drop-in and without it (make test-peers).

Samples come from a queue that is filled before, in place of a server. TRL's attention over a tree of shared prompts
needs a GPU, so a loop over the tree's segments stands in for it. Packing, the loss and the metrics are TRL's own.
"""

from __future__ import annotations

import math
import queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rollout_corr as rc
from rollout_corr.frameworks.trl import dropin as drop_in

pytestmark = pytest.mark.peers

WORDS = ["<pad>", "<eos>", *"abcdefghijklmn"]
STEPS, ROW = 4, 4


def attention(module, query, key, value, mask, *, scaling, **tree):
    """Attend from each segment to its path; [1, heads, tokens, size] as in transformers."""
    found = []
    ends = zip(tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist(), strict=True)
    begun = next(ends)
    for end in ends:
        asks, path = slice(begun[0], end[0]), tree["tree_kv_index"][begun[1] : end[1]]
        length, count = len(path), end[0] - begun[0]
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        heads = query[:, :, asks], key[:, :, path], value[:, :, path]
        found.append(torch.nn.functional.scaled_dot_product_attention(*heads, seen, scale=scaling))
        begun = end
    return torch.cat(found, dim=2).transpose(1, 2), None


def samples(seed, broken=()):
    """One row for each step; completions share prompts, and the engine's log-probs are rough guesses."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    made = np.random.default_rng(seed)
    found = queue.Queue()
    # The loader reads ahead.
    for number in range(ROW * (STEPS + 2) * 2):
        prompt = [2, 3, 4 + number // 2 % 3]
        length = int(made.integers(2, 7))
        logps = np.concatenate([np.zeros(3), np.log(1 / 16) + 0.3 * made.standard_normal(length)])
        if number in broken:
            logps[4] = -math.inf
        sample = RolloutSample(
            prompt=[],
            completion=[],
            input_ids=np.array([*prompt, *made.integers(2, 16, length)]),
            completion_mask=np.array([0] * 3 + [1] * length),
            old_log_probs=logps,
            advantage=float(made.standard_normal()),
            model_version=0,
            group_id=number // 2,
            metrics={},
        )
        found.put(sample)
    return found


class Server(SimpleNamespace):
    """Stands in for a worker and for the transfer of weights: whatever it is told is done already."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: None

    def check_health(self, stale_after_s):
        """Raise: called where the queue is empty, which would be waited for without an end."""
        raise RuntimeError("no sample is left")


def train(folder, seed=0, broken=()):
    """The losses of some steps, the parameters after them, and what was logged."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **sizes)).save_pretrained(
        folder
    )
    arguments = AsyncGRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=ROW,
        gradient_accumulation_steps=2,
        token_budget=0,
        max_staleness=100,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        disable_tqdm=True,
    )
    trainer = AsyncGRPOTrainer(
        model=str(folder),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>"),
        rollout_worker=Server(rollout_buffer=samples(seed, broken), metrics_queue=queue.Queue()),
        weight_transfer=Server(),
    )
    AttentionInterface.register(TREE_ATTENTION, attention)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    parameters = torch.cat([p.detach().reshape(-1) for p in trainer.model.parameters()])
    return [entry["loss"] for entry in logged], parameters, logged


@pytest.fixture(autouse=True)
def trl_of_a_cpu(monkeypatch):
    """TRL asks CUDA for the name of the device, to know its speed."""
    from trl.experimental.async_grpo import async_grpo_trainer

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *asked: 1.0)
    yield
    drop_in.uninstall()


def test_trains_the_same(tmp_path):
    """The loss, the parameters and TRL's own metrics; the path has to have been ours."""
    theirs, their_parameters, their_log = train(tmp_path)
    status = drop_in.install()
    assert status.active and status.checked
    assert "trl.experimental.async_grpo.async_grpo_trainer.AsyncGRPOTrainer.compute_loss" in status.replaced
    ours, our_parameters, our_log = train(tmp_path)
    # Exponentials of float32 differ in the last bit; steps of Adam at 1e-2 carry that along.
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6) and any(ours)
    torch.testing.assert_close(our_parameters, their_parameters, rtol=1e-4, atol=1e-5)
    for name in ("ratio", "kl", "clip_ratio/region_mean"):
        assert [e[name] for e in our_log] == pytest.approx([e[name] for e in their_log], rel=1e-3, abs=1e-6)


def test_one_infinite_log_prob(tmp_path):
    """It ends TRL's training; with ours it costs one token, and the share that a Spec keeps is logged."""
    losses, parameters, _ = train(tmp_path, broken=(1,))
    assert not all(map(math.isfinite, losses)) or parameters.isnan().any()
    geometric = rc.Criterion("ratio", over="sequence", reduce="mean", lower=0.8, upper=1.2)
    drop_in.install(spec=rc.Spec(criteria=(geometric,), nonfinite="neutral"))
    losses, parameters, logged = train(tmp_path, broken=(1,))
    assert all(map(math.isfinite, losses)) and parameters.isfinite().all()
    shares = [entry["rollout_corr/sequences_kept_fraction"] for entry in logged]
    assert all(0.0 < share < 1.0 for share in shares)


def test_a_wrong_loss_would_be_noticed(tmp_path, monkeypatch):
    """The comparison above fails if the ratio that trains is another one."""
    from rollout_corr.frameworks.trl import asynchronous

    theirs, _, _ = train(tmp_path)
    original = asynchronous.packed_policy_loss
    drop_in.install()
    monkeypatch.setattr(
        asynchronous,
        "packed_policy_loss",
        lambda log_probs, **given: original(log_probs + 0.01, **given),
    )
    assert train(tmp_path)[0] != pytest.approx(theirs, rel=1e-4, abs=1e-6)
