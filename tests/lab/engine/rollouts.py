"""vLLM on a CPU in this process: rollouts with their log-probs, and weights pushed into it."""

import contextlib
import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path

# Before vllm is imported. The first saves its sampler from compiling two functions of one line with g++. The second is
# `python -P` for the process in which vllm looks at a model's class: kernels/ of the checkout hides a package there.
for name, value in {
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONSAFEPATH": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)


@dataclass(frozen=True)
class Answer:
    """One sampled sequence.

    `mask` marks what was generated, in an answer of several turns; `turns` numbers its parts.
    """

    prompt: list[int]
    ids: list[int]
    logp: list[float]
    cut: bool = False
    mask: list[int] | None = None
    turns: list[int] | None = None

    def but(self, **changes) -> "Answer":
        return replace(self, **changes)


@contextlib.contextmanager
def engine(folder: Path, **settings):
    """A vLLM of that checkpoint, shut down at the end."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    chosen = {
        "dtype": "bfloat16", "max_model_len": 512, "enforce_eager": True, "seed": 0, "skip_tokenizer_init": True,
        "enable_prefix_caching": False, "disable_log_stats": True,
    }  # fmt: skip
    llm = LLM(model=str(folder), **(chosen | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def sample(llm, prompts: list[list[int]], seed: int = 0, **sampling) -> list[Answer]:
    """Answers with the log-prob of every token.

    The engine samples with torch's own generator, which is seeded here: a seed of a request fails on a CPU where a
    prompt is prefilled in chunks.
    """
    import torch
    from vllm import SamplingParams

    torch.manual_seed(seed)
    chosen = {"temperature": 1.0, "logprobs": 0, "detokenize": False} | sampling
    requests = [{"prompt_token_ids": ids} for ids in prompts]
    done = llm.generate(requests, SamplingParams(**chosen), use_tqdm=False)
    answers = []
    for request in done:
        for output in request.outputs:
            ids = list(output.token_ids)
            logp = [place[token].logprob for token, place in zip(ids, output.logprobs, strict=True)]
            answers.append(Answer(list(request.prompt_token_ids), ids, logp, output.finish_reason == "length"))
    return answers


def push(llm, state: dict) -> None:
    """Puts the weights of a Hugging Face model into the engine, about 10 ms.

    The engine's own `load_weights` fails on a CPU, whose linear layers are repacked after loading; `reload_weights`
    restores them first. It leaves out an output head that shares the embedding's weights: vLLM 0.32.0 samples from the
    packed head of the checkpoint on. So that one is packed again.
    """
    weights = iter([(name, value.detach()) for name, value in state.items()])
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights, "is_checkpoint_format": True})
    llm.apply_model(_pack_head)
    llm.reset_prefix_cache()


def _pack_head(model) -> None:
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
