"""The traces of prime-rl since #3444 (2026-08-31), in chunks since #3465: both sides are joined.

The layout is what AnnotationWriter, FileMonitor and ChunkedJsonl write at 65a185848, restated; the fold that
`fold_trace_updates` does there says which value belongs to which token.
"""

import json

import pytest

from builders import record_dumps
from builders.dumps import sequences_of
from rollout_corr.diagnose.read.dump import Dump
from rollout_corr.diagnose.read.problems import DumpError


def nodes_of(sample, turns):
    """A prompt, and the response as one message, or as two with a message of the user between them."""
    ids, sampled = sample.ids.tolist(), [int(one) for one in sample.mask]
    nodes = [{"parent": None, "token_ids": sample.prompt, "mask": [0] * len(sample.prompt), "logprobs": None}]
    for part in [slice(0, 2), slice(2, None)][: turns if turns > 1 else 0] or [slice(0, None)]:
        kept = [x for x, taken in zip(sample.rollout[part].tolist(), sampled[part], strict=True) if taken]
        node = {"parent": len(nodes) - 1, "token_ids": ids[part], "mask": sampled[part], "logprobs": kept}
        nodes.append(node | {"message": {"role": "assistant", "content": "text"}})
    return nodes


def append(path, record, index, **row):
    """Append a record to a stream and a row to its index, which says where the record begins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        offset = file.tell()
        file.write((json.dumps(record) + "\n").encode())
    with index.open("a") as file:
        file.write(json.dumps({"offset": offset, **row}) + "\n")


def write(run, chunked, turns=1):
    """Write the traces of the samples, two episodes to a chunk."""
    traces = run / "monitors" / "file" / "traces"
    (traces / "annotations").mkdir(parents=True)
    for i, sample in enumerate(record_dumps.samples()):
        # A judge's trace lies next to the policy's, and a branch that was not trained before its own.
        other = {"id": f"judge {i}", "nodes": []}
        aside = [{"parent": 0, "token_ids": [7, 7], "mask": [1, 1], "logprobs": [-9.0, -9.0]}]
        root, *rest = nodes_of(sample, turns)
        moved = [one | {"parent": one["parent"] + 1 if one["parent"] else 0} for one in rest]
        episode = {"id": i, "traces": [other, {"id": f"trace {i}", "nodes": [root, *aside, *moved]}]}
        number = f"{i // 2:05d}"
        stream = traces / "stream" / f"{number}.jsonl" if chunked else traces / "stream.jsonl"
        row = {"trace_ids": [f"judge {i}", f"trace {i}"]} | ({"chunk": i // 2} if chunked else {})
        append(stream, episode, traces / "stream.index.jsonl", **row)
        trained = [False] * len(sample.prompt) + sample.mask.tolist()
        values = sample.behind_prompt(sample.train).tolist()
        line = [value if one else None for value, one in zip(values, trained, strict=True)]
        branch = {"index": 1, "trainer_logprobs": line, "entropies": line}
        update = {"version": 1, "trace_id": f"trace {i}", "info": {}, "branches": [branch]}
        path = traces / "annotations" / ("trainer/00000.jsonl" if chunked else "trainer.jsonl")
        append(path, update, traces / "annotations" / "trainer.index.jsonl", trace_id=f"trace {i}", info={})
        ship = {"effective": True, "ship": {"step": record_dumps.STEP, "time": 1.0}}
        path = traces / "annotations" / ("orchestrator/00000.jsonl" if chunked else "orchestrator.jsonl")
        shipped = update | {"info": ship, "branches": [{"index": 1, "advantages": line}]}
        index = traces / "annotations" / "orchestrator.index.jsonl"
        append(path, shipped, index, trace_id=f"trace {i}", info=ship)
    return traces


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("chunked", [False, True])
def test_both_log_probs_of_a_trace_are_joined(chunked, turns, tmp_path):
    write(tmp_path, chunked, turns)
    dump = Dump(tmp_path)
    found = [values for _, values in sequences_of(dump)]
    assert dump.jobs[0].framework == "prime_rl" and dump.problems.count == 0
    for sample, values in zip(record_dumps.samples(), found, strict=True):
        for name, wanted in (("train_logp", sample.train), ("rollout_logp", sample.rollout), ("token_ids", sample.ids)):
            assert values[name] == wanted[sample.mask].tolist()
        assert values["entropy"] == sample.train[sample.mask].tolist()
        assert set(values["steps"]) == {record_dumps.STEP}


def test_sealed_chunks_are_named(tmp_path):
    """A finished run has no plain chunk left, unless monitors.file.compress is off."""
    traces = write(tmp_path, True)
    (traces / "stream" / "00001.jsonl").rename(traces / "stream" / "00001.jsonl.zst")
    dump = Dump(tmp_path)
    assert len(sequences_of(dump)) == 2 and dump.problems.count == 1
    assert "its episode is in 00001.jsonl.zst: decompress them (zstd -d" in str(dump.problems.shown[0])
    assert "1 sealed files are not read: decompress them" in dump.about
    for path in [*traces.rglob("0*.jsonl")]:
        path.rename(path.with_suffix(".jsonl.zst"))
    with pytest.raises(DumpError, match=r"is compressed with zstd; for both: decompress them"):
        Dump(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda update: update | {"trace_id": "gone"}, "trace gone: not in the stream of episodes"),
        (lambda update: update | {"branches": [{"index": 5, "trainer_logprobs": [-1.0]}]}, "branch 5: the trace has 2"),
        (lambda update: update | {"branches": [{"index": 1}]}, "expected tokens by messages (KeyError"),
        (
            lambda update: update | {"branches": [{"index": 0, "trainer_logprobs": [-1.0] * 99}]},
            "99 values of the trainer for 5 tokens",
        ),
    ],
)
def test_annotations_that_fit_no_trace_are_problems(change, says, tmp_path):
    path = write(tmp_path, False) / "annotations" / "trainer.jsonl"
    *rest, last = path.read_text().splitlines()
    path.write_text("\n".join([*rest, json.dumps(change(json.loads(last)))]))
    dump = Dump(tmp_path)
    assert len(sequences_of(dump)) == 2 and dump.problems.count == 1
    assert says in str(dump.problems.shown[0]) or says in dump.problems.shown[0].what


def test_a_stream_without_its_index_or_annotations(tmp_path):
    traces = write(tmp_path, False)
    (traces / "stream.index.jsonl").rename(tmp_path / "kept")
    with pytest.raises(DumpError, match=r"it says where the engine's log-probs are"):
        sequences_of(Dump(tmp_path))
    for path in traces.glob("annotations/*"):
        path.unlink()
    with pytest.raises(DumpError, match=r"has the log-probs of the engine alone; for both: the annotations"):
        Dump(tmp_path)
