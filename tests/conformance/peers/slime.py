"""slime: its loss function, its functions of `--use-tis` and the example train_infer_mismatch_helper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.batches import Batch
from conformance.declared import BF16, CLAMP, PROPAGATES
from conformance.rows import Result, Row, both, configuration, draw, preset, recipe
from conformance.slime_parts import (
    EMPTY,
    EMPTY_NORMALIZED,
    FAR_KL,
    GSPO_OVER_ALL,
    Ranks,
    bounds,
    counts_empty,
    dual,
    flags_of,
    geometric,
    loaded,
    mis_settings,
    plain_mis,
)
from conformance.sources import Source
from rollout_corr.frameworks import slime

DISTRIBUTION, PACKAGE, CHECKOUT = None, "slime", "slime"


class Code(NamedTuple):
    """Files of slime or of miles, and the layouts that its context parallelism has."""

    loss: str
    tis: str
    cp: str
    mis: str
    layouts: tuple[str, ...] = ("thd",)
    within: tuple[float, float] = (1e-9, 2e-5)


CODE = Code(
    loss="slime/backends/megatron_utils/loss.py",
    tis="slime/backends/megatron_utils/loss.py",
    cp="slime/backends/megatron_utils/cp_utils.py",
    mis="examples/train_infer_mismatch_helper/mis.py",
)

DECLARED = (PROPAGATES, BF16, CLAMP)
GEOMETRIC = {"rs_level": "geometric", "tis_batch_normalize": False}
DIFFERENCES = ("k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "log_ppl_abs_diff", "_kl")

# The flags that the loss reads, with slime's defaults, and miles's own.
FLAGS: dict[str, Any] = {"loss_type": "policy_loss", "advantage_estimator": "grpo", "entropy_coef": 0.0}
FLAGS |= {"eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "recompute_loss_function": False}
FLAGS |= {"use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0.0, "get_mismatch_metrics": False}
FLAGS |= {"custom_tis_function_path": None, "custom_pg_loss_reducer_function_path": None, "allgather_cp": False}
FLAGS |= {"use_opsm": False, "opsm_delta": 1e-4, "use_rollout_logprobs": False, "calculate_per_token_loss": False}
FLAGS |= {"use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_unbiased_kl": False}
FLAGS |= {"qkv_format": "thd", "skip_actor_forward_only": False, "observe_training_entropy": False}
FLAGS |= {"true_on_policy_mode": False, "use_dynamic_global_batch_size": False, "dump_details": None}
MIS_YAML: dict[str, Any] = {"use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate"}
MIS_YAML |= {"tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": None, "rs_upper_bound": None}
MIS_YAML |= {"rs_veto_threshold": 1e-4, "tis_batch_normalize": True}


def arguments(**given: Any) -> SimpleNamespace:
    """slime's flags, those of mis.yaml too."""
    assert set(given) <= {*FLAGS, *MIS_YAML}, given
    return SimpleNamespace(**{**FLAGS, **MIS_YAML, **given})


def loss_of(source: Source, code: Code) -> Callable[..., Tensor]:
    """Return the whole loss function, as a function of a batch and of flags; log-probs stand in for logits."""
    ranks = Ranks(1)
    given = {"mpu": ranks.mpu, "dist": ranks.dist, "get_parallel_state": ranks.state}
    function = source.cut(
        code.loss,
        "loss_function",
        **given,
        get_log_probs_and_entropy=lambda logits, **more: (None, logits) if code.layouts == ("thd",) else logits,
        get_rollout_top_p_logprob_kwargs=lambda args, batch: {},
        is_multi_lora_enabled=lambda args: False,
        load_function=cache(lambda path: source.cut(*path, **given)),
    )

    def run(given: Batch, **flags: Any) -> Tensor:
        batch, args = rollout_batch(given), arguments(**flags)
        new = given.samples(given.new)
        logits = Logits(log_probs=new, entropy=[torch.zeros_like(x) for x in new])
        more: dict[str, Any] = {"num_rollouts": len(new), "apply_megatron_loss_scaling": True}
        if code.layouts == ("thd",):
            more = {"step_global_batch_size": len(new)}
        # The frameworks decorate small functions with torch.compile.
        with torch.compiler.set_stance("force_eager"):
            loss, tokens, _ = ranks.run(lambda rank: function(args, batch, 1, logits=logits, **more))[0]
        return loss / tokens

    return run


class Logits(dict[str, Any]):
    """Log-probs and entropies in the place of the logits that they are made of."""

    device = torch.device("cpu")


def rollout_batch(given: Batch) -> dict[str, Any]:
    """The batch as the policy loss takes it, with a prompt of three tokens before each response."""
    masks = given.samples(given.mask.int())
    return {
        "advantages": given.samples(given.token_advantages),
        "log_probs": given.samples(given.old),
        "rollout_log_probs": given.samples(given.rollout),
        "ref_log_probs": given.samples(given.ref),
        "loss_masks": masks,
        "response_lengths": given.lengths,
        "total_lengths": [n + 3 for n in given.lengths],
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "unconcat_tokens": None,
    }


def per_sample(given: Batch, unit_loss: bool = True) -> dict[str, Any]:
    """The arguments of a function of `--use-tis`, with a loss of 1 a token, or a random one."""
    batch = rollout_batch(given)
    size, made = sum(batch["response_lengths"]), torch.Generator().manual_seed(given.seed)
    loss = torch.ones(size) if unit_loss else torch.randn(size, generator=made)
    names = ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
    called = {name: batch[name] for name in names}
    return called | {"pg_loss": loss.to(given.advantages.dtype), "train_log_probs": batch["log_probs"]}


def corrected(given: Batch, out: Any) -> Result:
    """Weights and mask [B, T] from what a function of `--use-tis` returns for a loss of 1."""
    loss, masks, _ = out
    width = given.mask.shape[1]

    def padded(samples: Any) -> Tensor:
        return torch.stack([pad(x, (0, width - x.shape[0])) for x in samples])

    return {"weights": padded(loss.split(given.lengths)), "mask": padded(masks) != 0}


def at_valid(out: Any, masks: list[Tensor]) -> Result:
    """Loss, masks and metrics of a function of `--use-tis`; the first and the last at valid tokens alone."""
    loss, made_masks, metrics = out
    at = torch.cat(masks) != 0
    # A small difference of numbers around 1 has their rounding.
    whole = {name: value + 1.0 if name.endswith(DIFFERENCES) else value for name, value in metrics.items()}
    of_tokens = {"loss": loss, **{f"metric {name}": value for name, value in whole.items()}}
    valid = {name: torch.where(at, value.to(loss.dtype), 0.0) for name, value in of_tokens.items()}
    return {**valid, "mask": torch.cat(list(made_masks)) != 0}


def rows(source: Source) -> Iterator[Row]:
    """Compare the presets, the recipes and the functions."""
    yield from compare(source, CODE)


def compare(source: Source, code: Code) -> Iterator[Row]:
    """Compare with slime, or with miles."""
    yield from presets(source, code)
    yield from recipes(source, code)
    yield from functions(source, code)
    yield reader(source, code)


def recipes(source: Source, code: Code) -> Iterator[Row]:
    """Compare the recipes with the whole loss."""
    loss = loss_of(source, code)
    mis, icepop = (code.mis, "compute_mis_weights_with_cp"), (code.tis, "icepop_function")
    place, more = f"{code.loss}: loss_function", {"declared": DECLARED, "within": code.within}

    def run(flags: dict[str, Any], given: Batch, **drawn: Any) -> Tensor:
        return loss(given, **flags, **{"opsm_delta" if key == "delta" else key: drawn[key] for key in drawn})

    for name, drawn, flags in (
        ("tis", bounds, {"use_tis": True}),
        ("icepop", bounds, {"use_tis": True, "custom_tis_function_path": icepop}),
        ("mis", plain_mis, {"use_tis": True, "custom_tis_function_path": mis}),
        ("mis_geo", geometric, {"use_tis": True, "custom_tis_function_path": mis, **GEOMETRIC}),
        ("opsm", draw(delta=(1e-4, 0.01)), {"use_opsm": True}),
    ):
        shown = ", ".join(value[1] if isinstance(value, tuple) else key for key, value in flags.items())
        yield recipe(f"slime.{name}", f"{place}, {shown}", partial(run, flags), both(dual, drawn), **more)

    def grpo(given: Batch, kl_loss_coef: float = 0.0, **flags: Any) -> Tensor:
        return loss(given, use_kl_loss=True, kl_loss_type="low_var_kl", kl_loss_coef=kl_loss_coef, **flags)

    with_kl = both(dual, lambda rng: rng.choice(({}, {"kl_loss_coef": 0.1})))
    yield recipe("slime.ppo", place, loss, dual, **more)
    # Their KL is in float32, whatever the log-probs are in.
    yield recipe("slime.grpo", f"{place}, use_kl_loss", grpo, with_kl, **more | {"within": (2e-5, 2e-5)})


def reader(source: Source, code: Code) -> Row:
    """Compare the reader of the flags."""
    loss = loss_of(source, code)
    paths = {"mis": (code.mis, "compute_mis_weights_with_cp"), "icepop": (code.tis, "icepop_function"), "tis": None}

    def run(given: Batch, function: str, **flags: Any) -> Tensor:
        return loss(given, custom_tis_function_path=paths[function], **flags)

    def hold(drawn: dict[str, Any]) -> SimpleNamespace:
        path = paths[drawn["function"]]
        flags = {name: value for name, value in drawn.items() if name != "function"}
        return arguments(**flags, custom_tis_function_path=path and path[1])

    return configuration(
        "slime" if code is CODE else "miles",
        f"{code.loss}: loss_function",
        run,
        lambda rng: flags_of(rng, ("cispo",) if code is CODE else ()),
        hold,
        lambda given, drawn: None if drawn["use_rollout_logprobs"] else given.old,
        declared=(*DECLARED, EMPTY, FAR_KL, EMPTY_NORMALIZED, GSPO_OVER_ALL),
        # Their KL is in float32, whatever the log-probs are in.
        within=(2e-5, 2e-5),
    )


def presets(source: Source, code: Code) -> Iterator[Row]:
    """Compare the presets with the functions of `--use-tis`."""
    compute_mis = source.cut(code.mis, "compute_mis_weights")

    def mis(given: Batch, **settings: Any) -> Result:
        called = per_sample(given)
        names = ("train_log_probs", "rollout_log_probs", "loss_masks")
        weights, masks, _ = compute_mis(arguments(use_tis=True, **settings), **{name: called[name] for name in names})
        return corrected(given, (torch.cat(weights), masks, {}))

    def weights(function: Any, given: Batch, **settings: Any) -> Result:
        return {"weights": corrected(given, function(arguments(**settings), **per_sample(given)))["weights"]}

    for name, theirs in (("tis", "vanilla_tis_function"), ("icepop", "icepop_function")):
        run = partial(weights, source.cut(code.tis, theirs))
        yield preset(f"slime.{name}", f"{code.tis}: {theirs}", run, bounds, declared=DECLARED)
    theirs = f"{code.mis}: compute_mis_weights"
    yield preset("slime.mis", theirs, mis, plain_mis, declared=DECLARED)
    yield preset("slime.mis_geo", theirs, partial(mis, **GEOMETRIC), geometric, declared=DECLARED)


def functions(source: Source, code: Code) -> Iterator[Row]:
    """Compare the functions that flags may name with those that they take the place of, on 1, 2 and 4 ranks."""
    module = code.cp.removesuffix(".py").replace("/", ".")

    @cache
    def on_ranks(size: int, file: str, name: str) -> tuple[Ranks, dict[str, Any], Any]:
        ranks = Ranks(size)
        given = {"mpu": ranks.mpu, "dist": ranks.dist, "get_parallel_state": ranks.state}
        tools = {tool: source.cut(code.cp, tool, **given) for tool in ("all_gather_with_cp", "slice_log_prob_with_cp")}
        if size == 1:
            tools = dict.fromkeys(tools, lambda x, *layout: x)
        return ranks, tools, source.cut(file, name, **given)

    for name, file, theirs, drawn in (
        ("tis", code.tis, "vanilla_tis_function", bounds),
        ("icepop", code.tis, "icepop_function", bounds),
        ("mis", code.mis, "compute_mis_weights_with_cp", mis_settings),
    ):

        def run(ours: bool, given: Batch, drawn: dict[str, Any], name: str = name, at: Any = (file, theirs)) -> Any:
            args = arguments(use_tis=True, **{key: drawn[key] for key in drawn if key != "ranks"})
            ranks, tools, peer = on_ranks(drawn["ranks"], *at)
            function = getattr(slime, name) if ours else peer
            called = per_sample(given, unit_loss=False)
            layouts = list(zip(called["total_lengths"], called["response_lengths"], strict=True))
            if args.qkv_format == "bshd":
                longest = max(called["total_lengths"])
                layouts = [(*sizes, "bshd", longest) for sizes in layouts]
                called["max_seq_lens"] = [longest] * len(layouts)

            def on(rank: int) -> Result:
                def cut(samples: Any) -> list[Tensor]:
                    cuts = zip(samples, layouts, strict=True)
                    return [tools["slice_log_prob_with_cp"](x, *layout) for x, layout in cuts]

                own = {name: cut(called[name]) for name in ("train_log_probs", "rollout_log_probs")}
                own["pg_loss"] = torch.cat(cut(called["pg_loss"].split(called["response_lengths"])))
                return at_valid(function(args, **called | own), cut(called["loss_masks"]))

            with loaded(module, **tools):
                found = ranks.run(on)
            return {f"{key} of rank {rank}": value for rank, side in enumerate(found) for key, value in side.items()}

        more: dict[str, Any] = {
            "settings": both(drawn, draw(ranks=(1, 1, 2, 4), qkv_format=code.layouts)),
            "declared": (*DECLARED, replace(EMPTY_NORMALIZED, when=counts_empty)),
            # Geometric weights are rounded to float32, whatever the log-probs are in.
            "within": (1e-6, 2e-5),
            # The functions that cut samples for ranks are the framework's.
            "recordable": lambda settings: settings["ranks"] == 1,
        }
        sides = partial(run, True), partial(run, False)
        yield Row("drop-in", f"slime.functions.{name}", f"{file}: {theirs}", *sides, **more)
