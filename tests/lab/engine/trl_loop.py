"""`make engine-trl`: GRPOTrainer of TRL with vLLM in its process, with and without the drop-in.

Two statements of TRL do not run on a CPU and are replaced here: it has no setting for `enforce_eager`, and it pushes
weights by `load_weights`, which fails on layers that are repacked; `reload_weights` stands in.
"""

import argparse
import functools
import random
import sys
import tempfile
from pathlib import Path

import torch

import rollout_corr as rc
from lab.engine import models
from lab.engine.rollouts import push
from rollout_corr.frameworks import trl as drop_in

STEPS = 4
# What a step's log has of the clock; the rest repeats.
CLOCK = "step_time"
DIFFERENCE = "sampling/sampling_logp_difference/mean"


def on_a_cpu() -> None:
    """Replaces what TRL needs a GPU for."""
    from trl.generation import vllm_generation

    def sync_weights(self):
        push(self.llm, dict(self._iter_named_params()))

    vllm_generation.LLM = functools.partial(vllm_generation.LLM, enforce_eager=True)
    vllm_generation.VLLMGeneration.sync_weights = sync_weights


def checkpoint(model: Path, tokenizer: Path, out: Path):
    """Writes a checkpoint with its tokenizer, as TRL and vLLM load it; returns the tokenizer."""
    from transformers import PreTrainedTokenizerFast

    models.save(models.load(model), out)
    made = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<eos>", pad_token="<pad>")
    made.save_pretrained(out)
    return made


def train(folder: Path, tokenizer, out: Path, **settings) -> list[dict[str, float]]:
    """Trains with GRPO; returns what TRL logs of each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    rng = random.Random(0)
    data = [{"prompt": f"<bos><user>{models.problem(rng, True)[0]}<assistant>"} for _ in range(64)]
    config = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, use_vllm=True, vllm_max_model_length=256, logging_steps=1,
        vllm_gpu_memory_utilization=0.2, max_completion_length=48, num_generations=4, per_device_train_batch_size=32,
        max_steps=STEPS, report_to=[], save_strategy="no", seed=0, learning_rate=1e-3, disable_tqdm=True, **settings,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(data),
        reward_funcs=lambda completion_ids, **rest: [float(len(set(ids))) for ids in completion_ids],
        processing_class=tokenizer,
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "loss" in row]


def verdicts(dump: Path) -> list[str]:
    return [finding.name for finding in rc.doctor(dump).findings if finding.severity != "note"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make engine-trl", description=__doc__)
    parser.add_argument("--models", type=Path, default=Path("build/engine"), help="where they are, or will be")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models.make(args.models, ["flat"])
    failed = []

    def check(name: str, holds: bool, shown: object) -> None:
        print(f"{'ok' if holds else 'NO'} {name}: {shown}", flush=True)
        failed.extend([] if holds else [name])

    with tempfile.TemporaryDirectory() as where:
        root = Path(where)
        tokenizer = checkpoint(args.models / "flat", args.models / "tokenizer.json", root / "model")
        on_a_cpu()

        def run(name: str, **settings) -> list[dict[str, float]]:
            return train(root / "model", tokenizer, root / name, vllm_mode="colocate", **settings)

        own = run("own")
        drop_in.install(dump=root / "dump", every=1)
        ours = run("ours")
        apart = max(abs(a[key] - b[key]) for a, b in zip(own, ours, strict=True) for key in a if key != CLOCK)
        check("the drop-in logs what TRL logs, losses too", apart < 1e-4, f"at most {apart:.1g} apart")
        check("its dump is healthy", verdicts(root / "dump") == [], verdicts(root / "dump"))
        steps = [row[DIFFERENCE] for row in ours]
        check("weights arrive in the engine", max(steps) < 3 * steps[0], f"mean |D| by step {steps}")

        likely = rc.Spec(criteria=(rc.Criterion("ratio", lower=0.85),))
        drop_in.install(spec=likely, dump=root / "truncated", every=1)
        cut = run("cut", top_p=0.8)
        kept = [row["rollout_corr/tokens_kept_fraction"] for row in cut]
        check("a Spec rejects, and its metrics are logged", 0.0 < min(kept) <= max(kept) < 1.0, f"kept by step {kept}")
        check("top_p=0.8 is named", verdicts(root / "truncated")[:1] == ["renormalized"], verdicts(root / "truncated"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
