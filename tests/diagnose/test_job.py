"""The folder of a job: whose dumps lie in it, and what they are read as."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from builders import planted_dumps
from builders.dumps import sequences_of, write_jsonl
from builders.record_dumps import FOLDER, STEP, by_rank, samples
from builders.record_dumps import WRITERS as RECORDED
from rollout_corr.cli.main import main
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.job import find_job
from rollout_corr.diagnose.read.problems import DumpError
from rollout_corr.diagnose.read.writers import WRITERS

NEMO = FOLDER / "nemo" / f"train_data_step{STEP}.jsonl"


def nemo(folder, step, change=lambda record: record):
    """Write the recorded samples of NeMo RL as those of another step, each of them changed."""
    folder.mkdir(exist_ok=True)
    records = map(json.loads, NEMO.read_text().splitlines())
    write_jsonl(folder / f"train_data_step{step}.jsonl", map(change, records))
    return folder


def of_response(sample):
    """Return what is read of a sample."""
    names = {"train_logp": "train", "rollout_logp": "rollout", "token_ids": "ids", "advantages": "advantages"}
    return {name: getattr(sample, field)[sample.mask].tolist() for name, field in names.items()}


@pytest.mark.parametrize("layout", sorted(RECORDED))
def test_what_the_framework_wrote_is_read(layout):
    dump = Dump(FOLDER / layout)
    found = [values for _, values in sequences_of(dump)]
    # What slime wrote until August 2026 is what miles writes.
    framework = "miles" if layout == "slime_by_rank" else layout.removesuffix("_in_parts").removesuffix("_loss")
    assert (dump.jobs[0].framework, list(dump.jobs[0].dumps)) == (framework, [STEP])
    assert dump.problems.count == 0 and len(found) == 3
    found.sort(key=lambda values: values["train_logp"][0], reverse=True)
    for sample, values in zip(samples(), found, strict=True):
        assert values.items() >= {name: x for name, x in of_response(sample).items() if name in values}.items()
        assert set(values["steps"]) == {STEP}


def test_a_job_is_read_step_by_step(tmp_path):
    """In the order of the numbers in the names; records have no step of their own."""
    for step in (10, 9, 3):
        nemo(tmp_path, step)
    dump = Dump(tmp_path)
    assert [values["steps"][0] for _, values in sequences_of(dump)] == [3, 3, 3, 9, 9, 9, 10, 10, 10]
    assert dump.problems.count == 0 and list(dump.jobs[0].dumps) == [3, 9, 10]


def test_a_sample_that_is_left_out_of_the_loss_is_masked(tmp_path):
    """NeMo RL multiplies the masks of tokens and of samples."""
    nemo(tmp_path, 1, lambda record: record | {"sample_loss_mask": [float(record["idx"] == 1)]})
    assert [len(values["train_logp"]) for _, values in sequences_of(Dump(tmp_path))] == [0, 5, 0]


def test_parts_of_a_rank_that_is_missing_are_no_sequences(tmp_path):
    by_rank(tmp_path, 1, samples(2), 2, told=True)
    (tmp_path / "train_data" / "1_0.pt").unlink()
    dump = Dump(tmp_path)
    assert len(sequences_of(dump)) == 1 and dump.problems.count == 1
    assert "expected all parts of 4 values, from ranks of context parallelism" in str(dump.problems.shown[0])


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_parts_of_context_parallelism_are_joined(parts, tmp_path):
    """Ranks of tensor parallelism repeat a part; files that do not say whose part it is are left out."""
    given = samples(4)
    by_rank(tmp_path, 1, given, parts, told=True)
    again = torch.load(tmp_path / "train_data" / "1_0.pt")
    torch.save(again | {"rank": 99}, tmp_path / "train_data" / "1_99.pt")
    found = {values["train_logp"][0]: values["rollout_logp"] for _, values in sequences_of(Dump(tmp_path))}
    assert found == {float(one.train[0]): one.rollout[one.mask].tolist() for one in given}
    by_rank(tmp_path, 2, given, parts)
    dump = Dump(tmp_path)
    assert len(sequences_of(dump)) >= 4 and "from ranks of context parallelism" in str(dump.problems.shown[0])


def changed_ranks(folder, change):
    """Change the columns of each file of a rank."""
    for path in (folder / "train_data").iterdir():
        rank = torch.load(path)
        change(rank["rollout_data"])
        torch.save(rank, path)


def test_equal_parts_of_one_field_and_fields_of_other_lengths_lose_no_sample(tmp_path):
    """Advantages of GRPO are constant; `values` of a length that fits nothing is no field of the sample."""
    given = samples(6)
    for sample in given:
        sample.advantages[:] = 0.75
    by_rank(tmp_path, 1, given, 2, told=True)
    changed_ranks(tmp_path, lambda columns: columns.update(values=[torch.zeros(2) for _ in columns["tokens"]]))
    dump = Dump(tmp_path)
    found = {values["train_logp"][0]: values["advantages"] for _, values in sequences_of(dump)}
    assert dump.problems.count == 0
    assert found == {float(sample.train[0]): [0.75] * int(sample.mask.sum()) for sample in given}


@pytest.mark.parametrize("named", [True, False])
def test_ranks_whose_samples_nothing_tells_apart(named, tmp_path):
    """Names may be strings; without names and tokens, samples of two ranks may be the same or not."""
    by_rank(tmp_path, 1, samples(4))

    def change(columns):
        indices = columns.pop("sample_indices")
        if named:
            columns["sample_indices"] = [f"sample {index}" for index in indices]
        del columns["tokens"]

    changed_ranks(tmp_path, change)
    dump = Dump(tmp_path)
    if named:
        assert len(sequences_of(dump)) == 4 and dump.problems.count == 0
        return
    with pytest.raises(DumpError, match="nothing tells the samples of the ranks apart: add sample_indices"):
        sequences_of(dump)


ONE_SIDED = {
    "dumps/7.jsonl": ({"input": "a", "output": "b", "gts": None, "score": 1.0, "step": 7}, "verl.install(dump="),
    "3/12.jsonl": ({"task_id": 12, "sample_idx": 0, "head_version": 2, "completion": "b"}, "areal.install(dump="),
    "train_rollout/train_rollout_3.jsonl": ({"prompt": "a", "response": "b"}, "xtuner.install(dump="),
    "dumped_data/global_step_3_training_input.pkl": (
        {},
        "is a pickle; for both: rollout_corr.frameworks.skyrl",
    ),
    "rollout_samples.jsonl": ({"turns": [{"completion_logprobs": [-0.5]}]}, "rc.dump in the trainer"),
    "rollouts/step_3/train/all/traces.jsonl": ({"reward": 1.0}, "trainer.enable_token_export"),
}


@pytest.mark.parametrize("name", ONE_SIDED)
def test_a_job_without_both_log_probs_says_what_gives_them(name, tmp_path, capsys):
    record, gives = ONE_SIDED[name]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")
    assert main(["doctor", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert path.name in said.err and gives in said.err
    with pytest.raises(DumpError, match=f"^{re.escape(str(tmp_path))}"):
        find_job(tmp_path, (".pt", ".jsonl"))


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ((".hydra/config.yaml", "config.json"), ".hydra/config.yaml"),
        (("deep/config.yaml", "args.json"), "args.json"),
        (("checkpoint/config.json",), None),
    ],
)
def test_the_configuration_of_the_run(files, wanted, tmp_path):
    """The one nearest to the top; a model's is none."""
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "llama"}' if "checkpoint" in name else "{}")
    nemo(tmp_path / "logs", 1)
    job = find_job(tmp_path, (".jsonl",))
    assert job.config == (wanted and tmp_path / wanted)


def test_checkpoints_beside_dumps_are_not_read(tmp_path, capsys):
    nemo(tmp_path, 4)
    (tmp_path / "step_4").mkdir()
    torch.save({"weight": torch.ones(3)}, tmp_path / "step_4" / "model.pt")
    dump = Dump(tmp_path)
    assert len(sequences_of(dump)) == 3 and dump.problems.count == 0
    assert dump.about == "1 file of nemo (not env.should_log_nemo_gym_responses), step 4; other files, not read: 1"
    main(["doctor", str(tmp_path)])
    assert "found: 1 file of nemo" in " ".join(capsys.readouterr().out.split())


def test_several_jobs_in_a_folder_are_doubted(tmp_path):
    for run in ("a", "b"):
        nemo(tmp_path / run, 4)
    assert Dump(tmp_path).about.endswith("step 4; step 4 lies in several folders: name one run's")
    shutil.copytree(FOLDER / "slime", tmp_path / "b", dirs_exist_ok=True)
    assert "; dumps of slime are not read (3.pt, ...): name their folder" in Dump(tmp_path / "b").about


def test_the_page_and_the_table_of_writers_agree():
    """The page names the options of each framework and no others, and the files that have both log-probs."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "dumps.md").read_text(encoding="utf-8")
    on_page, in_table = set(), set()
    for names, switch, sides in re.findall(r"^\| ([\w, -]+) \| (.+?) \| .+? \| (.+?) \|$", text, re.MULTILINE):
        options = re.findall("`(.+?)`", switch)
        on_page |= {
            (name.removesuffix(" rl"), one, sides == "both") for name in names.lower().split(", ") for one in options
        }
    for writer in WRITERS:
        options = [word for word in writer.switch.split() if "_" in word or "." in word or "--" in word]
        in_table |= {
            (name.replace("_", "-"), one, writer.sides == "both")
            for name in writer.framework.split(" or ")
            for one in options
        }
        assert writer.sides != "both" or re.split(r"[\\(]", writer.files)[0] in text, writer
    assert on_page == in_table


def test_log_probs_that_prime_rl_writes_as_null_are_not_finite(tmp_path):
    (path,) = (FOLDER / "prime_rl").rglob("*.jsonl")
    first, *others = path.read_text().splitlines()
    record = json.loads(first)
    record["trainer_logprobs"][1] = None
    folder = tmp_path / "token_exports" / "step_3"
    folder.mkdir(parents=True)
    (folder / path.name).write_text("\n".join((json.dumps(record), *others)))
    (_, values), *_ = sequences_of(Dump(tmp_path))
    assert [math.isnan(x) for x in values["train_logp"]] == [True, False, False]


RUN = """
grpo: {seq_logprob_error_threshold: 0.5}
policy:
  generation:
    temperature: 0.7
    vllm_cfg:
      logprobs_mode: raw_logprobs
"""


@pytest.mark.parametrize("name", ["config.yaml", ".hydra/config.yaml"])
def test_a_finding_names_the_line_of_the_configuration_that_makes_it(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    made = planted_dumps.temperature(100, 0.7, 1.0, 0.7)
    columns = {"token_ids": "token_ids", "generation_logprobs": "rollout_logp", "prev_logprobs": "train_logp"}
    rows = [made[name].split(made["cu_seqlens"].diff().tolist()) for name in columns.values()]
    write_jsonl(
        tmp_path / "train_data_step1.jsonl",
        (dict(zip(columns, ([x.tolist()] for x in row), strict=True)) for row in zip(*rows, strict=True)),
    )
    config = tmp_path / name
    config.parent.mkdir(exist_ok=True)
    config.write_text(RUN)
    assert main(["doctor", str(tmp_path)]) == 1
    finding, rest = " ".join(capsys.readouterr().out.split()).split("in the configuration: ")
    line = f"-> {config}:7: error: policy.generation.vllm_cfg.logprobs_mode: the engine's log-probs are from before"
    assert line in finding and finding.index("[temperature]") < finding.index(line)
    assert rest.startswith(f"{config}:2: error: grpo.seq_logprob_error_threshold: 0.5 masks every sequence")
    found = json.loads((main(["doctor", str(tmp_path), "--json"]) and capsys.readouterr().out) or "")
    assert [one["line"] for one in found["mistakes"]] == [2, 7]
    config.write_text("grpo: [")
    main(["doctor", str(tmp_path)])
    assert "in the configuration:" in capsys.readouterr().out
