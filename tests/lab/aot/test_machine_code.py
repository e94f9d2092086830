"""Registers, spills and accesses are read from texts as disassemblers write them."""

import pytest

from lab.aot.machine_code import SASS as BRANCHES
from lab.aot.machine_code import Instruction, MachineCode, in_loops, read_machine_code

SASS = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function read_kernel:
  REG:142 STACK:24 SHARED:0 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0

	code for sm_80
		Function : read_kernel
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM80"
        /*0000*/                   MOV R1, c[0x0][0x28] ;                       /* 0x00000a0000017a02 */
                                                                                /* 0x000fc40000000f00 */
        /*0030*/               @P0 BRA 0x750 ;                                  /* 0x0000017000000947 */
        /*0480*/              @!P1 LDG.E R54, [R2.64] ;                         /* 0x0000001002369981 */
        /*04a0*/                   LDG.E.U8 R54, desc[UR4][R2.64] ;             /* 0x0000001002369981 */
        /*0730*/              @!P0 LDG.E.128 R8, [R36.64+0x1000] ;              /* 0x0010001024088981 */
        /*0740*/                   LDG.E.128.CONSTANT R8, [R36.64] ;            /* 0x0010001024088981 */
        /*0750*/                   LDL.LU R4, [R1] ;                            /* 0x0010001024088981 */
       /*10750*/             @!UP0 STG.E.64 desc[UR4][R2.64], R4 ;              /* 0x0010001024088981 */
       /*10760*/                   EXIT ;                                       /* 0x000000000000794d */
       /*10770*/                   NOP;                                         /* 0x0000000000007918 */
"""

AMDGCN = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
\t.text
\t.globl\tread_kernel                     ; -- Begin function read_kernel
read_kernel:                            ; @read_kernel
.Lfunc_begin0:
\t.cfi_startproc
; %bb.181:
\t.loc\t1 365 0 prologue_end            ; read.py:365:0
\ts_load_dwordx4 s[12:15], s[0:1], 0x28
\tglobal_load_dwordx4 v[2:5], v[0:1], off
\tbuffer_load_dwordx2 v[2:3], v0, s[4:7], 0 offen
\tglobal_load_ubyte v8, v[0:1], off
\tglobal_load_short_d16_hi v8, v[0:1], off
\tglobal_store_byte_d16_hi v[0:1], v8, off
\tglobal_store_dword v[0:1], v8, off
\tscratch_store_dwordx2 off, v[2:3], off      ; 8-byte Folded Spill
\ts_endpgm
.Lfunc_end0:
\t.size\tread_kernel, .Lfunc_end0-read_kernel
\ts_code_end
amdhsa.kernels:
  - .agpr_count:     0
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 8
    .sgpr_spill_count: 12
    .vgpr_count:     66
    .vgpr_spill_count: 2
"""


def test_sass_is_read():
    """Neither padding nor encodings are instructions, and a constant's cache is not its width."""
    assert read_machine_code(SASS) == MachineCode(142, 24, 0, 9, {128: 2, 32: 1, 8: 1}, {64: 1})


def test_assembly_of_amd_is_read():
    assert read_machine_code(AMDGCN) == MachineCode(66, 8, 0, 9, {128: 1, 64: 1, 16: 1, 8: 1}, {32: 1, 8: 1})


# A loop of four instructions between others, and one without a load or store.
LOOP = (
    SASS.partition("        /*0000*/")[0]
    + """
        /*0780*/                   STL [R1+0x10], R4 ;
        /*0790*/                   STL.64 [R1+0x4], R4 ;
        /*07a0*/                   LDL.LU R4, [R1+0x8] ;
        /*07b0*/                   BSYNC B0 ;
        /*07c0*/              @!P1 BRA P0, 0x790 ;
        /*07d0*/                   LDL R4, [R1+0x14] ;
        /*07e0*/                   BRA 0x800 ;
        /*07f0*/                   LDL R4, [R1+0xc] ;
        /*0800*/                   EXIT ;
        /*0810*/                   BRA 0x7f0 ;
        /*0820*/                   BRA 0x820;
"""
)


def test_what_loops_touch_of_a_spill():
    """Bytes of two accesses count once; what no branch leads back to does not count, nor does code in between."""
    assert read_machine_code(LOOP).spilled_in_loops == 8
    assert read_machine_code(LOOP.replace("0x790 ;", "0x780 ;")).spilled_in_loops == 12
    assert read_machine_code(LOOP.replace("0x800 ;", "0x790 ;")).spilled_in_loops == 12
    spills = (
        ".LBB0_1:\n\tscratch_load_dword v4, off, off offset:4\n\tv_add_f32 v4, v4, v5\n"
        "\ts_cbranch_scc1 .LBB0_2 ; loop\n; %bb.3:\n\ts_endpgm\n.LBB0_2:\n\ts_branch .LBB0_1\n"
    )
    assert read_machine_code(AMDGCN.replace("\ts_endpgm\n", spills)).spilled_in_loops == 4


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (SASS.replace("STACK", "FRAME"), "STACK"),
        (SASS.replace("LDL.LU", "LDS"), "accesses to the 24 bytes of the stack"),
        (SASS.replace("BRA 0x750", "BRA 0x1b0"), "an instruction where '@P0 BRA 0x1b0' goes"),
        (SASS.partition("code for")[0], "instructions"),
        (AMDGCN.replace(".vgpr_count", ".count"), "vgpr_count"),
    ],
)
def test_another_format_is_not_read_as_nothing(text, missing):
    """No spill is found in a text that no longer says it that way."""
    with pytest.raises(ValueError, match=rf"disassembly: expected .*{missing}"):
        read_machine_code(text)


@pytest.mark.parametrize(
    ("code", "looped"),
    [
        ("MOV; BRA 0x1; EXIT", {1}),
        ("MOV; @P0 BRA 0x0; EXIT", {0, 1}),
        ("MOV; BRA 0x3; MOV; @!P0 BRA 0x1; EXIT", {1, 3}),
        ("@P0 BRA 0x0; MOV; BRA P1, 0x1; EXIT", {0, 1, 2}),
        ("BRA.U 0x2; EXIT; BRA.DIV UR4, 0x1; CALL.REL.NOINC 0x0; RET.REL.NODEC R4 0x0", set()),
    ],
)
def test_what_is_in_a_loop(code, looped):
    instructions = [Instruction(text.strip(), (hex(i),)) for i, text in enumerate(code.split(";"))]
    assert in_loops(instructions, BRANCHES) == looped
