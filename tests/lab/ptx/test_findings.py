"""Planted errors, one for each check of the interpreter: each is found where it is, and its mended sibling is clean."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lab.ptx import native
from lab.ptx.encode import UnknownOpcode
from lab.ptx.small import run_small


def found(body, elements=64, **others):
    one, two = torch.arange(elements, dtype=torch.int32), torch.zeros(elements, dtype=torch.int32)
    return run_small(body, one, two, **others)


def only(findings, kind):
    """The one finding, of a kind."""
    assert [x.kind for x in findings] == [kind], findings
    return str(findings[0])


ADD = "atom.global.gpu.relaxed.add.u32 %r9, [%rd2], 1;"
OWN = "ld.global.b32 %r9, [%rd4];"


def test_bounds():
    masked = "setp.lt.u32 %p1, %r1, 60;\n@%p1 st.global.b32 [%rd5], %r1;"
    assert found(masked, 60, programs=1) == []
    said = only(found("st.global.b32 [%rd5], %r1;", 60, programs=1), "bounds")
    assert "small, st.global.b32 of small.py:8:5 @[ caller.py:3:1 ]" in said
    assert "program 0, thread" in said and "and 3 more" in said
    assert "bytes behind the start of two, which has 240" in said


def test_an_access_that_lies_partly_in_a_tensor():
    """Of two words the last one beyond it; and a word before it."""
    body = "setp.eq.u32 %p1, %r1, {thread};\n@%p1 ld.global.v2.b32 {{%r9, %r10}}, [%rd4];"
    assert found(body.format(thread=60), 63) == []
    only(found(body.format(thread=62), 63), "bounds")
    only(found("add.s64 %rd9, %rd1, -4;\nld.global.b32 %r9, [%rd9];"), "bounds")


def test_the_gaps_of_a_tensor_that_is_not_contiguous():
    one = torch.zeros(128, dtype=torch.int32)[::2]
    body = "shl.b64 %rd9, %rd3, 1;\nadd.s64 %rd10, %rd1, %rd9;\nld.global.b32 %r9, [%rd10{plus}];"
    assert run_small(body.format(plus=""), one, one[:1]) == []
    masked = "setp.lt.u32 %p1, %r1, 63;\n" + body.format(plus="+4").replace("ld.g", "@%p1 ld.g")
    assert "between the elements of one" in only(run_small(masked, one, one[:1]), "bounds")
    rows = torch.zeros(2, 8, dtype=torch.int32)[:, :3]
    assert run_small("ld.global.b32 %r9, [%rd1+8];\nld.global.b32 %r9, [%rd1+32];", rows, one[:1]) == []
    only(run_small("ld.global.b32 %r9, [%rd1+12];", rows, one[:1]), "bounds")


def test_bounds_of_shared_memory():
    assert found("st.shared.b32 [%r3], %r1;", shared=256) == []
    assert "of 128 of shared memory" in only(found("st.shared.b32 [%r3], %r1;", shared=128), "bounds")


def test_alignment():
    body = "setp.eq.u32 %p1, %r1, {thread};\n@%p1 ld.global.v2.b32 {{%r9, %r10}}, [%rd4];"
    assert found(body.format(thread=2)) == []
    assert "for 8 bytes" in only(found(body.format(thread=3)), "alignment")


def test_memory_that_nobody_wrote():
    assert found(OWN) == []
    assert "one[" in only(found(OWN, unwritten=("one",)), "unwritten")
    assert found(f"st.global.b32 [%rd4], %r1;\n{OWN}", unwritten=("one",), programs=1) == []
    assert "shared byte" in only(found("ld.shared.b32 %r9, [%r3];"), "unwritten")
    only(found(ADD, unwritten=("two",)), "unwritten")


def test_a_word_that_nobody_wrote_half_of():
    one, two = torch.zeros(128, dtype=torch.int16), torch.zeros(64, dtype=torch.int32)
    for body, kinds in (("st.global.b32 [%rd4], %r1;", []), ("st.global.b16 [%rd4], %rs1;", ["unwritten"])):
        findings = run_small(f"cvt.u16.u32 %rs1, %r1;\n{body}\n{OWN}", one, two, unwritten=("one",), programs=1)
        assert [x.kind for x in findings] == kinds


EXCHANGE = """
st.shared.b32 [%r3], %r1;
{barrier}
xor.b32 %r4, %r3, {other};
ld.shared.b32 %r9, [%r4];
st.global.b32 [%rd5], %r9;
"""


def test_a_barrier_of_the_one_warp():
    """It is a barrier of the program, and unknown where that has more warps."""
    body = EXCHANGE.format(barrier="bar.warp.sync -1;", other=4)
    assert found(body, 32, threads=32, programs=1) == []
    with pytest.raises(UnknownOpcode):
        found(body)


@pytest.mark.parametrize("other", [4, 128])
def test_shared_memory_without_a_barrier(other):
    """Between threads of a warp and of two."""
    for seed in range(4):
        assert found(EXCHANGE.format(barrier="bar.sync 0;", other=other), programs=1, seed=seed) == []
        findings = found(EXCHANGE.format(barrier="", other=other), programs=1, seed=seed)
        assert "race in a program" in {x.kind for x in findings}
        # Whoever reads before the other warp has written reads nothing.
        assert {x.kind for x in findings} <= {"race in a program", "unwritten"}
    said = " ".join(map(str, findings))
    assert "shared byte" in said and "touched by thread" in said


def test_shared_memory_read_before_it_is_written_again():
    body = "st.shared.b32 [%r3], %r1;\nbar.sync 0;\nld.shared.b32 %r9, [0];\n{barrier}\nst.shared.b32 [%r3], %r9;"
    body = body.replace("[0]", "[global_smem]")
    assert found(body.format(barrier="bar.sync 0;")) == []
    only(found(body.format(barrier="")), "race in a program")


def test_who_writes_has_read_last():
    """Who read before is not forgotten: a thread of its warp, or a program."""
    body = "st.shared.b32 [%r3], %r1;\nbar.warp.sync -1;\nld.shared.b32 %r9, [global_smem];\n"
    body += "setp.eq.u32 %p1, %r1, 0;\n@%p1 ld.shared.b32 %r9, [global_smem];\n{barrier}\n"
    body += "@%p1 st.shared.b32 [global_smem], 5;"
    assert found(body.format(barrier="bar.warp.sync -1;"), threads=32, programs=1) == []
    only(found(body.format(barrier=""), threads=32, programs=1), "race in a program")
    next_one = "xor.b32 %r4, %r3, 4;\ncvt.u64.u32 %rd6, %r4;\nadd.s64 %rd7, %rd1, %rd6;\nld.global.b32 %r10, [%rd7];"
    writes = f"{OWN}\n{next_one}\nbar.sync 0;\nsetp.eq.u32 %p1, %r2, 1;\n@%p1 st.global.b32 [%rd4], %r9;"
    for seed in range(4):
        assert found(writes, programs=1, seed=seed) == []
        only(found(writes, seed=seed), "race of programs")


def test_threads_that_write_one_place():
    """One value by all is what Triton's layouts do; several values are not."""
    assert found("st.shared.b32 [global_smem], %r2;") == []
    only(found("st.shared.b32 [global_smem], %r1;"), "race in a program")
    only(found("st.global.b32 [%rd2], %r1;", programs=1), "race in a program")


def test_programs_that_write_one_place():
    """One value or not."""
    assert found("st.global.b32 [%rd5], %r1;", programs=1) == []
    said = only(found("st.global.b32 [%rd5], %r1;"), "race of programs")
    assert "two[" in said and "of program" in said


def test_a_program_that_reads_what_another_writes():
    """Across programs only the next launch may."""
    writes = "setp.eq.u32 %p1, %r2, 0;\n@%p1 st.global.b32 [%rd5], %r1;\n"
    assert found(f"{writes}@!%p1 {OWN}") == []
    only(found(f"{writes}@!%p1 ld.global.b32 %r9, [%rd5];", seed=1), "race of programs")
    late = "setp.eq.u32 %p1, %r2, 0;\n@%p1 bra $L__BB0_1;\nld.global.b32 %r9, [%rd5];\nret;\n$L__BB0_1:\n"
    only(found(f"{late}st.global.b32 [%rd5], %r1;"), "race of programs")


def test_atomic_accesses():
    two = torch.zeros(64, dtype=torch.int32)
    assert run_small(ADD, torch.zeros(64, dtype=torch.int32), two) == []
    assert two[0] == 128 and not two[1:].any()
    plain = "ld.global.b32 %r9, [%rd2];\nadd.s32 %r9, %r9, 1;\nst.global.b32 [%rd2], %r9;"
    assert "race of programs" in {x.kind for x in found(plain)}
    # Of one warp all threads have added before any reads; of two the first reads before the second adds.
    for threads in (32, 64):
        read = found(f"{ADD}\nld.global.b32 %r10, [%rd2];", threads=threads, programs=1)
        assert {x.kind for x in read} == {"race in a program"}


COUNTER = """
shl.b32 %r4, %r2, 2;
cvt.u64.u32 %rd6, %r4;
add.s64 %rd7, %rd2, %rd6;
setp.eq.u32 %p1, %r1, 0;
setp.eq.u32 %p2, %r1, 5;
@%p2 st.global.b32 [%rd7], %r1;
{before}
@%p1 atom.global.gpu.{order}.add.u32 %r9, [%rd2+240], 1;
@%p1 st.shared.b32 [global_smem], %r9;
bar.sync 0;
ld.shared.b32 %r9, [global_smem];
setp.eq.u32 %p3, %r9, 3;
@%p3 ld.global.b32 %r10, [%rd2];
@%p3 ld.global.b32 %r10, [%rd2+8];
"""


def test_a_counter_that_programs_release_and_the_last_one_acquires():
    """Writes of a program, of all threads where a barrier stands between, are seen by whoever comes later."""
    for seed in range(4):
        for order, before, kinds in (
            ("acq_rel", "bar.sync 0;", set()),
            ("relaxed", "bar.sync 0;", {"race of programs"}),
            ("acq_rel", "", {"race of programs"}),
        ):
            findings = found(COUNTER.format(order=order, before=before), programs=4, seed=seed)
            assert {x.kind for x in findings} == kinds, (order, before)


def test_what_one_thread_acquires_the_others_have_behind_a_barrier():
    """An exchange tells them the count, and orders no memory."""
    head, _, tail = COUNTER.partition("@%p1 st.shared")
    body = f"{head}shfl.sync.idx.b32 %r9, %r9, 0, 31, -1;\n{{after}}\n{tail[tail.index('setp.eq.u32 %p3') :]}"
    for after, kinds in (("bar.warp.sync -1;", set()), ("", {"race of programs"})):
        planted = body.format(order="acq_rel", before="bar.warp.sync -1;", after=after)
        assert {x.kind for x in found(planted, threads=32, programs=4)} == kinds, after


def clean_in_some_order(body, **others):
    """Whoever comes too early is seen to race, whatever the others do."""
    runs = [{x.kind for x in found(body, seed=seed, **others)} for seed in range(16)]
    assert {kind for kinds in runs for kind in kinds} == {"race of programs"}
    return set() in runs


RELAY = """
setp.eq.u32 %p1, %r2, 0;
setp.eq.u32 %p2, %r2, 1;
setp.eq.u32 %p3, %r2, 2;
@%p1 st.global.b32 [%rd2], %r2;
bar.sync 0;
@%p1 atom.global.gpu.acq_rel.add.u32 %r9, [%rd2+240], 1;
@%p2 atom.global.gpu.acq_rel.add.u32 %r9, [%rd2+240], 1;
bar.sync 0;
@%p2 atom.global.gpu.acq_rel.add.u32 %r9, [%rd2+244], 1;
{last}
bar.sync 0;
@%p3 ld.global.b32 %r10, [%rd2];
"""


def test_what_a_program_acquires_it_releases_too():
    """The third of three programs has seen the counter of the second alone, another one, or none."""
    count = "@%p3 atom.global.gpu.acq_rel.add.u32 %r9, [%rd2+{place}], 1;"
    for last, is_clean in ((count.format(place=244), True), (count.format(place=248), False), ("", False)):
        assert clean_in_some_order(RELAY.format(last=last), programs=3) == is_clean, last


def test_a_thread_needs_no_barrier_for_what_it_does_itself():
    body = "setp.ne.u32 %p1, %r1, 0;\n@%p1 bra $L__BB0_1;\nsetp.eq.u32 %p2, %r2, 0;\n@%p2 st.global.b32 [%rd2], %r2;\n"
    body += "atom.global.gpu.{order}.add.u32 %r9, [%rd2+240], 1;\n@!%p2 ld.global.b32 %r10, [%rd2];\n$L__BB0_1:\nret;"
    assert clean_in_some_order(body.format(order="acq_rel"))
    assert not clean_in_some_order(body.format(order="relaxed"))


def test_launches_come_one_after_the_other():
    assert (
        found("ld.global.b32 %r9, [%rd5];\nadd.s32 %r9, %r9, 1;\nst.global.b32 [%rd5], %r9;", programs=1, launches=2)
        == []
    )


FORKED = """
setp.lt.u32 %p1, %r1, {threads};
@%p1 bra $L__BB0_1;
{inside}
$L__BB0_1:
mov.b32 %r10, 0;
"""


def test_a_barrier_that_not_all_threads_reach():
    assert found(FORKED.format(threads=0, inside="bar.sync 0;")) == []
    said = only(found(FORKED.format(threads=32, inside="bar.sync 0;")), "divergence")
    assert "bar.sync of small.py:8:5" in said and "others are at the end" in said


@pytest.mark.parametrize("exchange", ["shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;", "redux.sync.add.s32 %r9, %r1, -1;"])
def test_a_shuffle_that_not_all_threads_reach(exchange):
    assert found(FORKED.format(threads=32, inside=exchange)) == []
    only(found(FORKED.format(threads=5, inside=exchange)), "divergence")
    guarded = f"setp.lt.u32 %p1, %r1, 5;\n@%p1 {exchange}"
    only(found(guarded), "divergence")
    only(found(exchange.replace("-1;", "65535;")), "divergence")


LOOP = "mov.b32 %r9, 0;\n$L__BB0_1:\nadd.s32 %r9, %r9, 1;\nsetp.lt.u32 %p1, %r9, {times};\n@%p1 bra $L__BB0_1;"


def test_a_loop_without_an_end():
    """Tell one from a loop that is long."""
    with mock.patch.object(native, "MANY", 5000):
        assert found(LOOP.format(times=1500), threads=32, programs=1) == []
        said = only(found(LOOP.format(times=2000), threads=32, programs=1), "endless")
    assert "of small.py:8:5" in said and "more than 5,000 steps" in said


@pytest.mark.parametrize(
    "instruction",
    ["tanh.approx.f32 %r9, %r1;", "bar.sync 1;", "st.global.v3.b32 [%rd4], {%r1, %r1, %r1};", "bar.warp.sync -1;",
     "atom.global.cta.acq_rel.add.u32 %r9, [%rd2], 1;"],
)  # fmt: skip
def test_an_unknown_opcode(instruction):
    with pytest.raises((UnknownOpcode, KeyError), match=rf"{instruction.split()[0]} of small.py:8:5"):
        found(instruction)


def test_an_unknown_directive():
    with pytest.raises(ValueError, match="is not known"):
        found(".local .align 4 .b8 mine[8];")
