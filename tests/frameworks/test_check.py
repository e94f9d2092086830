"""Mistakes planted in configurations are named with their lines, and configurations without one are left alone."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from types import SimpleNamespace

import pytest

import rollout_corr as rc
from builders.config_cases import rows
from rollout_corr.cli.main import main
from rollout_corr.diagnose.doctor.diagnosis import CAUSES
from rollout_corr.frameworks.shared.checking import recognized, settings_of_each
from rollout_corr.frameworks.shared.run_files import UNKNOWN, settings_in
from rollout_corr.frameworks.shared.scripts import scalar

# `FRAMEWORK CONFIG | KEY | WORDS`, the configuration as the words of a command line.
MISTAKES = r"""
verl algorithm.rollout_correction.rollout_is=token |
    rollout.calculate_log_probs | warning: ... true since 0.9.0 ... before, false ... =true
verl algorithm.rollout_rs=token_k1 |
    algorithm.rollout_rs | nothing reads it ... algorithm.rollout_correction.rollout_rs
verl actor_rollout_ref.rollout.calculate_logprobs=true | calculate_logprobs | did you mean 'calculate_log_probs'
verl algorithm.rollout_correction.bypass_mode=true algorithm.rollout_correction.rollout_is=token |
    rollout_correction.rollout_is | only measured ... reinforce
verl algorithm.rollout_correction.bypass_mode=true actor_rollout_ref.actor.policy_loss.loss_mode=gspo |
    loss_mode | in place of gspo
verl actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode | loss_mode | finds no rollout_correction
verl rollout_rs=token_k1 rollout_rs_threshold=0.999_1.001 |
    rollout_rs_threshold | warning: ... rejects 96% of tokens ... 0.5 and 2
verl rollout_rs=seq_mean_k1 rollout_rs_threshold=0.9999_1.0001 |
    rollout_rs_threshold | warning: ... of sequences of 1000 tokens ... rc.suggest
verl actor_rollout_ref.rollout.temperature=0.7 actor_rollout_ref.rollout.logprobs_mode=raw_logprobs
    algorithm.rollout_correction.rollout_is=token |
    rollout.logprobs_mode | temperature of 0.7 ... processed_logprobs
verl algorithm.rollout_correction.rollout_is=token actor_rollout_ref.rollout.top_p=0.9 |
    rollout.top_p | what it keeps ... KeptMass
verl algorithm.rollout_correction.rollout_is=token actor_rollout_ref.rollout.top_k=50 | rollout.top_k | what it keeps
verl actor_rollout_ref.actor.tis_imp_ratio_cap=2.0 |
    actor.tis_imp_ratio_cap | 0.6.0 ... write algorithm.rollout_correction: {rollout_is: "token", rollout_is
verl algorithm.rollout_is=true algorithm.rollout_is_threshold=2.0 algorithm.rollout_is_level=token
    algorithm.rollout_is_mode=truncate |
    algorithm.rollout_is_level | {rollout_is: "token", rollout_is_threshold: 2.0}; for its veto, rc.Criterion(
verl algorithm.rollout_is=true algorithm.rollout_is_threshold=3.0 |
    algorithm.rollout_is | up to 0.6.0 ... {rollout_is: "token", rollout_is_threshold: 3.0}
verl algorithm.rollout_is=token | algorithm.rollout_is | nothing reads it ... algorithm.rollout_correction.rollout_is
verl rollout_rs_threshold=2.0 rollout_rs=seq_max_k1 | rollout_rs | expected one of
verl algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_plot_folder=true |
    rollout_plot_folder | warning: ... newer release
trl use_vllm=true vllm_importance_sampling_correction=false vllm_importance_sampling_mode=token_truncate |
    vllm_importance_sampling_mode | does nothing while vllm_importance_sampling_correction
trl use_vllm=true vllm_importance_sampling_mode=geometric_mask | vllm_importance_sampling_mode | expected one of
nemo loss_fn.truncated_importance_sampling_type=tis loss_fn.truncated_importance_sampling_ratio=2.0 |
    truncated_importance_sampling_type | needs use_importance_sampling_correction
nemo grpo.async_grpo.enabled=true loss_fn.use_importance_sampling_correction=false |
    use_importance_sampling_correction | async_grpo
nemo grpo.seq_logprob_error_threshold=0.5 | seq_logprob_error_threshold | masks every sequence
nemo loss_fn.use_importance_sampling_correction=true policy.generation.temperature=0.6
    policy.generation.vllm_cfg.logprobs_mode=raw_logprobs |
    logprobs_mode | temperature of 0.6
nemo loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_type=icepop
    loss_fn.truncated_importance_sampling_ratio=1.002 loss_fn.truncated_importance_sampling_ratio_min=0.999 |
    truncated_importance_sampling_ratio | warning: ... cuts the weights of 94% of tokens
slime tis_clip=2.0 | tis_clip | does nothing while use_tis
slime use_tis=true use_rollout_logprobs=true | use_rollout_logprobs | the ratio is then the correction itself
slime use_tis=true custom_config_path=examples/train_infer_mismatch_helper/mis.yaml |
    custom_config_path | not called ... custom-tis-function-path
slime use_tis=true use_rs=true rs_level=geometric tis_upper_bound=2.0 | tis_upper_bound | warning: ... never reaches
slime opsm_delta=0.001 | opsm_delta | does nothing while use_opsm
skyrl trainer.algorithm.off_policy_correction.tis_ratio_type=token
    trainer.algorithm.off_policy_correction.token_mask_is_threshold_low=0.5 |
    token_mask_is_threshold_low | warning: ... work only together
skyrl trainer.algorithm.off_policy_correction.sequence_mask_metric=product
    trainer.algorithm.off_policy_correction.geo_mask_high=1.1 |
    geo_mask_high | sequence_mask_metric is not 'geometric'
skyrl generator.sampling_params.temperature=0.6 trainer.algorithm.off_policy_correction.tis_ratio_type=token
    trainer.algorithm.temperature=1.0 |
    trainer.algorithm.temperature | at the temperature 1, sampling at 0.6
areal actor.use_decoupled_loss=false actor.rejection_sampling.metric=ratio actor.rejection_sampling.upper=5.0 |
    actor.rejection_sampling.upper | does nothing while use_decoupled_loss
areal actor.behave_imp_weight_cap=5.0 |
    actor.behave_imp_weight_cap | write rejection_sampling: {level: token, action: mask, metric: ratio,
rllm rllm.algorithm.rollout_correction.tis_cap=3.0 | rollout_correction.tis_cap | does nothing while tis_mode
rllm rllm.algorithm.rollout_correction.bypass_mode=true rllm.algorithm.rollout_correction.tis_mode=token |
    rollout_correction.tis_mode | expected null with bypass_mode
areal gconfig.temperature=0.8 actor.use_decoupled_loss=true actor.rejection_sampling.upper=5.0 actor.temperature=1.0 |
    actor.temperature | at the temperature 1, sampling at 0.8
skyrl trainer.algorithm.off_policy_correction.tis_ratio_type=token generator.sampling_params.temperature=0.6 |
    sampling_params.temperature | before the temperature of 0.6 ... logprobs_mode=processed_logprobs
skyrl trainer.algorithm.policy_loss_type=dppo generator.sampling_params.logprobs=null |
    sampling_params.logprobs | gets no log-probs ... logprobs=1
skyrl trainer.algorithm.off_policy_correction.tis_ratio_type=token generator.sampling_params.logprobs=null |
    sampling_params.logprobs | warning: ... SkyRL sets 1 ... logprobs=1
swift rollout_importance_sampling_mode=token_truncate top_k=50 | top_k | what it keeps
swift loss_type=real rollout_importance_sampling_mode=token_truncate |
    rollout_importance_sampling_mode | warning: ... the loss real has no weights
swift rollout_importance_sampling_threshold=2.0 |
    rollout_importance_sampling_threshold | does nothing while rollout_importance_sampling_mode
slime custom_tis_function_path=examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp |
    custom_tis_function_path | not called without --use-tis
slime use_tis=true custom_config_path=mis.yaml
    custom_tis_function_path=examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp tis_clip=3.0 |
    tis_clip | reads tis_upper_bound
nemo loss_fn.use_importance_sampling_correction=true loss_fn.sequence_level_importance_ratios=true |
    sequence_level_importance_ratios | token_level_loss: false
nemo loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_ratio_min=0.5 |
    truncated_importance_sampling_ratio_min | does nothing while truncated_importance_sampling_type
skyrl trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=3.0 |
    token_tis_ratio_clip_high | does nothing while tis_ratio_type
skyrl trainer.algorithm.tis_imp_ratio_cap=2.0 | tis_imp_ratio_cap | does nothing while use_tis
areal actor.use_sapo_loss=true actor.rejection_sampling.metric=ratio actor.rejection_sampling.upper=5.0 |
    actor.use_sapo_loss | warning: ... does not read rejection_sampling
verl algorithm.rollout_correction.rollout_is_batch_normalize=true |
    rollout_is_batch_normalize | does nothing while rollout_is is off
axolotl rl=grpo trl.vllm_importance_sampling_correction=false trl.vllm_importance_sampling_cap=2.0 |
    trl.vllm_importance_sampling_cap | does nothing while vllm_importance_sampling_correction
axolotl trl.vllm_importance_sampling_correction=true trl.vllm_importance_sampling_mode=sequence_mask |
    trl.vllm_importance_sampling_mode | does not mask
openrlhf algo.advantage.is_correction_level=seq algo.advantage.is_correction_mode=clip |
    is_correction_mode | 'clip' needs
verl algorithm.rollout_correction.loss_type=reinforce algorithm.rollout_correction.rollout_is=token |
    loss_type | does nothing without bypass mode
verl rollout_is=token rollout_rs_threshold=0.5_2.0 | rollout_rs_threshold | does nothing while rollout_rs is off
verl rollout_rs=seq_mean_k1 rollout_rs_threshold=0.5_2.0 | rollout_rs_threshold | warning: ... never reaches
verl data.max_response_length=32768 algorithm.rollout_correction.rollout_rs=seq_sum_k1
    algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0 |
    rollout_rs_threshold | warning: ... sequences of 16384 tokens ... product
trl vllm_importance_sampling_clip_max=2.0 | vllm_importance_sampling_clip_max | does nothing while use_vllm
prime_rl orchestrator.train.sampling.temperature=0.8 inference.vllm.logprobs_mode=raw_logprobs |
    logprobs_mode | temperature of 0.8
xtuner rollout_is_threshold=[5,0.5] rollout_is_veto_treshold=[20,0] |
    rollout_is_veto_treshold | did you mean 'rollout_is_veto_threshold'
xtuner rollout_is_mode=both | rollout_is_mode | does nothing while rollout_is_threshold
trl use_vllm=true repetition_penalty=1.1 | repetition_penalty | penalty of 1.1
trl use_vllm=false vllm_importance_sampling_correction=true |
    vllm_importance_sampling_correction | does nothing without vLLM
trl use_vllm=true temperature=0 | temperature | likeliest token
cosmos_rl train.train_policy.behav_imp_weight_cap=5.0 |
    train_policy.behav_imp_weight_cap | does nothing while use_decoupled_loss
cosmos_rl train.train_policy.use_decoupled_loss=true train.train_policy.use_rollout_logprobs_for_loss=true |
    use_rollout_logprobs_for_loss | refuses it together
"""

# `FRAMEWORK SUFFIX | KEY | WORDS`, and the file; "> " stands before the line that is to be named.
PLANTED = r"""
verl yaml | rollout.calculate_log_probs | no log-probs ... =true
  actor_rollout_ref:
    rollout:
>     calculate_log_probs: false
  algorithm:
    rollout_correction: {rollout_is: token}

verl sh | calculate_log_probs | no log-probs
  returned=False
  python3 -m verl.trainer.main_ppo algorithm.rollout_correction.bypass_mode=True \
>     actor_rollout_ref.rollout.calculate_log_probs=${returned}

verl sh | rollout_is_threshold | warning: ... 0.5_2 ... quote it
  rollout_is_threshold="0.5_2"
  ARGS=(
    algorithm.rollout_correction.rollout_is=token  # weights of tokens
>   algorithm.rollout_correction.rollout_is_threshold=${rollout_is_threshold}
  )

verl yaml | rollout_is_threshold | warning: ... 0.52 ... quote it
  rollout_is: token
> rollout_is_threshold: 0.5_2

verl yaml | rollout_is_treshold | did you mean 'rollout_is_threshold'
  algorithm:
    rollout_correction:
      rollout_is: token
>     rollout_is_treshold: 3.0

trl json | vllm_importance_sampling_cap | warning: ... old name; write vllm_importance_sampling_clip_max: 2.0
  {"use_vllm": true,
   "model_init_kwargs": {"dtype": "bfloat16"},
>  "vllm_importance_sampling_cap": 2.0}

trl py | top_p | what it keeps
  top = 0.9
> args = GRPOConfig(use_vllm=True, top_p=top)

slime yaml | rs_veto_threshold | YAML 1.1 ... before the e, as in 1.0e-4
  use_tis: true
> rs_veto_threshold: 1e-4

miles py | get_mismatch_metrics | refuses it without a function
  flags = (
      "--rollout-batch-size 32 "
>     f"--get-mismatch-metrics --seed {seed} "
  )

skyrl sh | tis_ratio_type | two corrections
  TYPE=token
  run trainer.algorithm.policy_loss_type=rollout_is \
>   trainer.algorithm.off_policy_correction.tis_ratio_type=$TYPE

prime_rl toml | trainer.loss.ratio_low | no setting of type 'ipo'
  [trainer.loss]
  type = "ipo"
> ratio_low = 0.5

prime_rl toml | extra_body.min_p | what it keeps
> orchestrator.train.sampling.extra_body = { min_p = 0.1 }

xtuner py | rollout_is_threshold | expected (upper, lower)
  loss_cfg = GRPOLossConfig(
      rollout_is=RolloutImportanceSampling(
          rollout_is_mode="both",
>         rollout_is_threshold=(0.5, 5),
      ),
  )

slime sh | tis_clip | does nothing while use_tis
  cat <<EOF <<'NEXT' > readme
  it's a run
  EOF
  a "quote
  NEXT
> TIS=(--tis-clip 2.0)

slime sh | tis_clip | 2.0 does nothing while use_tis
> python train.py --tis-clip 2.0 ${MODEL_ARGS[@]} "${MORE[@]}" "$@"

slime sh | tis_clip | does nothing while use_tis
  sbatch <<EOF
> python train.py --tis-clip 2.0
  EOF
"""


def problems_of(framework, config, key):
    """What is wrong; of a configuration that is about another mistake, verl's switch is no second one."""
    given = [] if framework != "verl" or "log_probs" in key else [f"{R}calculate_log_probs=true"]
    return rc.check_config(framework, [*config, *given])


def assert_says(problem, key, words):
    severity, parts = "error", words.split(" ... ")
    if parts[0] == "warning:":
        severity, parts = "warning", parts[1:]
    assert problem.severity == severity, problem
    assert f".{problem.key}".endswith(key), problem
    assert re.search(".*".join(map(re.escape, parts)), f"{problem.message}; {problem.fix}"), problem


@pytest.mark.parametrize(("given", "key", "words"), rows(MISTAKES))
def test_mistakes(given, key, words):
    framework, *config = given.split()
    (problem,) = problems_of(framework, config, key)
    assert_says(problem, key, words)


def planted():
    for text in PLANTED.strip("\n").split("\n\n"):
        head, *lines = text.split("\n")
        kind, key, words = (part.strip() for part in head.split("|"))
        line = next((i for i, each in enumerate(lines, 1) if each.startswith(">")), 0)
        content = "\n".join(each[2:] for each in lines)
        yield pytest.param(*kind.split(), content, key, words, line, id=f"{kind} {key} {words[:20]}")


@pytest.mark.parametrize(("framework", "suffix", "content", "key", "words", "line"), list(planted()))
def test_planted_mistakes(framework, suffix, content, key, words, line, tmp_path):
    if suffix == "toml":
        pytest.importorskip("tomllib")
    file = tmp_path / f"run.{suffix}"
    file.write_text(content + "\n")
    (problem,) = problems_of(framework, [str(file)], key)
    assert_says(problem, key, words)
    assert (problem.file, problem.line) == (str(file), line), problem


# --- nothing wrong ---

FINE = {
    "values that a script takes from outside": ("verl", "run.sh", """
        calculate=$1
        if [ $FAST = 1 ]; then IS=token; else IS=null; fi
        run algorithm.rollout_correction.rollout_is=$IS actor_rollout_ref.rollout.top_p=$(cat p) \\
          algorithm.rollout_correction.rollout_is_threshold=3.0 actor_rollout_ref.rollout.calculate_log_probs=$calculate
        """),
    "what a comment says": ("slime", "run.sh", "ARGS=(\n  # --tis-clip 2.0\n  --lr 1e-6\n)\n"),
    "sampling of an evaluation": ("verl", "run.yaml", """
        actor_rollout_ref: {rollout: {calculate_log_probs: true, val_kwargs: {top_p: 0.7, temperature: 0.0}}}
        algorithm: {rollout_correction: {rollout_is: token}}
        """),
    "a mode that fits the temperature": ("nemo", "run.yaml", """
        loss_fn: {use_importance_sampling_correction: true}
        policy: {generation: {temperature: 0.6, vllm_cfg: {logprobs_mode: processed_logprobs}}}
        """),
    "another block's key": ("verl", "run.yaml", "distillation: {distillation_loss: {loss_mode: k1}}"),
    "a reference": ("areal", "run.yaml", """
        gconfig: {temperature: 0.8}
        actor: {temperature: "${gconfig.temperature}", use_decoupled_loss: true, rejection_sampling: {upper: 5.0}}
        """),
    "more than a Spec says": ("trl", "run.yaml", "use_vllm: true\ntop_entropy_quantile: 0.2\n"),
    "an evaluation's sampling in Python": ("trl", "run.py", """args = GRPOConfig(use_vllm=True, **more)
evaluation = GRPOConfig(use_vllm=True, top_p=0.5)
print("--top_p 0.5 is for humans")
"""),
    "a validation's sampling in Python": ("trl", "run.py", "val_args = GRPOConfig(use_vllm=True, top_p=0.5)\n"),
    "a loss of another trainer": ("swift", "run.sh", "swift rlhf --rlhf_type dpo --loss_type sigmoid\n"),
    "two strings of flags": ("slime", "run.py", """a = "--use-tis --tis-clip 2.0"
b = f"--actor-num-nodes {n}"
"""),
    "a merge key": ("verl", "run.yaml", """
        common: &common {rollout_is: token}
        algorithm: {rollout_correction: {<<: *common, rollout_is_threshold: 3.0}}
        actor_rollout_ref: {rollout: {calculate_log_probs: true}}
        """),
    "a mark of the byte order": ("trl", "run.json", '\ufeff{"use_vllm": true}'),
    "a function from outside": ("slime", "run.sh",
        "ARGS=(--use-tis --custom-tis-function-path $FN --custom-config-path a/mis.yaml)\n"),
    "a file of settings from outside": ("slime", "run.sh",
        "ARGS=(--custom-tis-function-path a.mis.f --custom-config-path $CFG)\n"),
}  # fmt: skip


@pytest.mark.parametrize(("framework", "name", "content"), FINE.values(), ids=FINE)
def test_nothing_is_said_of(framework, name, content, tmp_path):
    file = tmp_path / name
    file.write_text(textwrap.dedent(content))
    assert rc.check_config(framework, file) == []


# --- what is read ---

SCRIPT = r"""
export LENGTH=$((1024 * 8))
NAME="${MODEL:-base}-$LENGTH"
ARGS=(
  a.length=${LENGTH} a.name='x y' +a.rate=1e-4 # b.none=1
  --flag --two 1 2
)
run "${ARGS[@]}" c.name=$NAME \
  c.list=[1,2] c.off=null c.twice=$TWICE c.at="$(date)"
TWICE=1
TWICE=2
"""
READ = {
    "run.sh": (SCRIPT, {
        "a.length": (8192, 5), "a.name": ("x y", 5), "a.rate": (1e-4, 5), "flag": (True, 6), "two": ([1, 2], 6),
        "c.name": ("base-8192", 8), "c.list": ([1, 2], 9), "c.off": (None, 9), "c.twice": (UNKNOWN, 9),
        "c.at": (UNKNOWN, 9),
    }),
    "run.json": ('{"a": {"b": 1,\n "c": [1, 2]},\n\n "d": "x"}', {"a.b": (1, 1), "a.c": ([1, 2], 2), "d": ("x", 4)}),
    "run.yaml": ("defaults: base.yaml\na:\n  c: ${a.b}\n  d: ${.b}\n  e: ${oc.env:HOME}\n  f: 1e-4\n", {
        "a.b": (2.0, 2), "a.c": (2.0, 3), "a.d": (2.0, 4), "a.e": (UNKNOWN, 5), "a.f": (1e-4, 6),
    }),
    "run.toml": ('x = 1\n[a.b]\nc = [1,\n 2]\n"d" = { e = 0.5 }\n', {
        "x": (1, 1), "a.b.c": ([1, 2], 3), "a.b.d.e": (0.5, 5),
    }),
    "run.py": ('k = 2.0\nargs = Config(\n  a=k,\n  b=Inner(c=3),\n  d=f(),\n)\nrun("train "\n  "--e 4 ")\n', {
        "Config.a": (2.0, 3), "Config.b.c": (3, 4), "Config.d": (UNKNOWN, 5), "e": (4, 8),
    }),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "expected"), [(name, *of) for name, of in READ.items()], ids=READ)
def test_values_and_lines(name, content, expected, tmp_path):
    if name.endswith("toml"):
        pytest.importorskip("tomllib")
    (tmp_path / "base.yaml").write_text("a:\n  b: 2.0\n")
    (tmp_path / name).write_text(content)
    found = settings_in(tmp_path / name)
    assert {key: (found[key].value, found[key].line) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a b'", "a b"),
        ('"0.5"', "0.5"),
        ("'a\"", "'a\""),
        ("'", "'"),
        (" 0.5_2 ", 0.52),
        ("1e-3", 1e-3),
        ("7", 7),
        ("[1, 'x', [2]]", [1, "x", [2]]),
        ("[]", []),
        ("null", None),
        ("True", True),
        ("no", "no"),
    ],
)
def test_a_scalar(text, value):
    """As Hydra and argparse read it."""
    found = scalar(text)
    assert found == value and type(found) is type(value)


def test_other_forms_say_the_same(tmp_path):
    said = "the correction gets no log-probs of the engine"
    key, off = "actor_rollout_ref.rollout.calculate_log_probs", "algorithm.rollout_correction.rollout_is"
    (tmp_path / "config.yaml").write_text(f"{key}: true\n")
    blocks = {
        "actor_rollout_ref": SimpleNamespace(rollout={"calculate_log_probs": False}),
        "algorithm": {"rollout_correction": {"rollout_is": "token"}},
    }
    blocks["itself"] = blocks
    for config in (
        blocks,
        [f"{off}=token", f"{key}=False"],
        [str(tmp_path / "config.yaml"), f"{key}=false", f"{off}=token"],
    ):
        (problem,) = rc.check_config("verl", config)
        assert (problem.key, problem.message, problem.line) == (key, said, 0)


ALIASES = "a: &a {x: 1}\n" + "".join(f"{b}: &{b} [{'*' + a}{f',*{a}' * 60}]\n" for a, b in ("ab", "bc", "cd", "de"))
WRONG = {
    "run.ini": ("", "expected a configuration file, one of .yaml"),
    "list.yaml": ("- a", "expected keys and values"),
    "tab.yaml": ("a: [", "run|tab.yaml: while parsing"),
    "run.json": ("{", "Expecting property name"),
    "run.py": ("f(", "line 1: "),
    "aliases.yaml": (ALIASES, "got more than 30000 values"),
    "defaults.yaml": ("defaults: gone.yaml", "gone.yaml, which does not exist"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), [(name, *of) for name, of in WRONG.items()], ids=WRONG)
def test_files_that_cannot_be_read(name, content, message, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        rc.check_config("verl", tmp_path / name)
    assert main(["check", str(tmp_path / name), "--framework", "verl"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"check_config: framework: expected one of .*'verl'.*, got 'megatron'"):
        rc.check_config("megatron", {})
    with pytest.raises(TypeError, match="expected a mapping or a config object, got int 3"):
        rc.check_config("verl", 3)
    with pytest.raises(ValueError, match="No such file"):
        rc.check_config("verl", tmp_path / "gone.yaml")


def test_the_command(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("rollout_is: token\n")
    assert main(["check", str(file), "--framework", "verl"]) == 0
    assert capsys.readouterr().out == f"{file} (verl): nothing wrong that is known\n"
    file.write_text("rollout_is: token\nrollout_is_threshold: 0.5_2\n")
    assert main(["check", str(file), "--framework", "verl"]) == 0
    assert capsys.readouterr().out.startswith(f"{file}:2: warning: algorithm.rollout_correction.rollout_is_threshold: ")
    assert main(["check", str(file)]) == main(["check", str(tmp_path)]) == 0
    assert "no setting that matters to a correction" in (main(["check", "a.b=1"]) and capsys.readouterr().err)
    assert main(["check", "--framework", "slime", "--json", "--", "--tis-clip", "2.0"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)
    assert problem["key"] == "tis_clip" and problem["severity"] == "error" and problem["fix"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("b.yaml", "a: [1", r"b.yaml: warning: while parsing.*\(2 files\): 1 mistake"),
        ("b.yaml", "a: {<<: 3}", r"b.yaml: warning: .*mapping.*\(2 files\)"),
        ("b.py", "f(", r"b.py: warning: line 1: .*\(2 files\)"),
        ("b.json", "[1]", r"\(1 file\): nothing wrong"),
    ],
)
def test_a_folder_with_a_broken_file(name, content, says, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("use_vllm: true\n")
    (tmp_path / name).write_text(content)
    assert main(["check", str(tmp_path), "--framework", "trl"]) == 0
    assert re.search(says, capsys.readouterr().out, re.DOTALL)


def test_yaml_without_pyyaml(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "run.yaml").write_text("a: 1")
    with pytest.raises(ValueError, match="needs PyYAML: pip install pyyaml"):
        rc.check_config("verl", tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("framework", "config"),
    [
        ("verl", {"actor_rollout_ref": {"rollout": {"temperature": 1.0}}, "algorithm": {"rollout_correction": None}}),
        ("nemo", {"loss_fn": {"use_importance_sampling_correction": True}, "grpo": {}}),
        ("skyrl", {"trainer": {"algorithm": {"off_policy_correction": {"tis_ratio_type": None}}}}),
        ("areal", {"gconfig": {"temperature": 1.0}, "actor": {"use_decoupled_loss": True}}),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_correction": True}),
        ("trl", {"vllm_importance_sampling_mode": "token_mask"}),
        ("axolotl", {"trl": {"vllm_importance_sampling_mode": "token_mask"}}),
        ("cosmos_rl", {"train": {"train_policy": {"behav_imp_weight_cap": 5.0}}}),
        ("prime_rl", {"trainer": {"loss": {"kl_tau": 0.1}}}),
        ("xtuner", {"rollout_is_veto_level": "max"}),
        ("slime", ["--use-tis", "--tis-clip", "2.0"]),
        (None, {"learning_rate": 1e-6}),
        (None, ["--eps-clip", "0.2", "--rollout-max-response-len", "100"]),
    ],
)
def test_the_framework_is_recognized(framework, config):
    assert recognized(settings_of_each(settings_in(config))) == framework


def test_another_framework_than_that_of_the_configuration(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("actor_rollout_ref: {rollout: {temperature: 1.0}}\n")
    assert main(["check", str(path), "--framework", "verl"]) == 0
    capsys.readouterr()
    assert main(["check", str(path), "--framework", "slime"]) == 2
    assert "no setting of slime is in it; it looks like one of verl" in capsys.readouterr().err


def test_a_refused_setting_hides_no_other_mistake():
    """Without it the Spec may correct nothing; what was meant does."""
    found = rc.check_config("verl", [f"{C}=tokens", f"{R}calculate_log_probs=false"])
    assert [problem.key.rpartition(".")[2] for problem in found] == ["rollout_is", "calculate_log_probs"]


def test_causes_are_those_of_the_doctor():
    causes = {*CAUSES}
    config = [f"{R}calculate_log_probs=true", f"{C}=token"]
    problems = rc.check_config("verl", [*config, f"{R}temperature=0.7", f"{R}logprobs_mode=raw_logprobs"])
    problems += rc.check_config("verl", [*config, f"{R}top_p=0.7"])
    assert len(problems) == 2 and all(problem.causes and {*problem.causes} <= causes for problem in problems)


R, C = "actor_rollout_ref.rollout.", "algorithm.rollout_correction.rollout_is"


LAUNCHED = {
    "swift": "swift rlhf --rlhf_type grpo --use_vllm true --top_p 0.9 --temperature 0.9",
    "swift, of Megatron": "NPROC_PER_NODE=8 megatron rlhf \\\n  --use_vllm true --top_p 0.9",
    "swift, with the module": "python -m swift.cli.rlhf --use_vllm true --top_p 0.9",
    "trl": "# like swift rlhf\ntrl grpo --use_vllm true --top_p 0.9",
    "verl": "python3 -m verl.trainer.main_ppo trainer.algorithm.use_tis=false actor_rollout_ref.rollout.top_p=0.9",
    "skyrl": "uv run -m skyrl.train.entrypoints.main_base generator.sampling_params.temperature=1.0",
    "axolotl": "axolotl train a.yaml --trl.temperature 0.9",
    "areal": "python -m areal.infra.launcher.ray run.py gconfig.temperature=1.0",
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launcher_says_whose_script_it_is(name, tmp_path, capsys):
    """ms-swift has TRL's flags and corrects nothing by default, where TRL does: its script is no mistake."""
    file = tmp_path / "run.sh"
    file.write_text(LAUNCHED[name])
    framework = name.partition(",")[0]
    assert main(["check", str(file)]) == (framework == "trl")
    assert f" ({framework})" in capsys.readouterr().out
    words = LAUNCHED[name].replace("\\\n", "").split()
    if framework == "swift":
        assert recognized(settings_of_each(settings_in(["a=1", *words])), ["a=1", *words]) == "swift"


def test_a_configuration_that_sets_nothing_that_matters(tmp_path, capsys):
    """69 of prime-rl's 70 files: its loss and its sampling are the defaults."""
    pytest.importorskip("tomllib")
    file = tmp_path / "rl.toml"
    file.write_text('max_steps = 100\n[model]\nname = "m"\n[orchestrator]\nbatch_size = 512\n')
    said = f"{file} (prime_rl): nothing that matters to a correction is set\n"
    assert main(["check", str(file)]) == 0 and capsys.readouterr().out == said
    assert main(["check", str(file), "--framework", "prime_rl"]) == 0 and capsys.readouterr().out == said
    assert main(["check", str(file), "--framework", "verl"]) == 0
