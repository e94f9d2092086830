"""Opcodes against the ISA's words where no number of a kernel shows them: NaN, signs of 0, roundings, shifts, ranges.

Any other opcode that is wrong gives a kernel of test_compiled.py wrong numbers.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from lab.ptx.encode import operation
from lab.ptx.native import library
from lab.ptx.small import run_small

INF, NAN = math.inf, math.nan


TYPES = {
    "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "bf16": np.dtype(np.uint16),
    "bf16x2": np.dtype(np.uint32), "b32": np.dtype(np.uint32), "b16": np.dtype(np.uint16),
    "b64": np.dtype(np.uint64),
    **{f"{kind}{bits}": np.dtype(f"{'i' if kind == 's' else 'u'}{bits // 8}")
       for kind in "us" for bits in (8, 16, 32, 64)},
}  # fmt: skip


def computed(opcode, *operands):
    """The results of an instruction for rows of operands, as Python numbers."""
    name, *parts = opcode.split(".")
    kinds = [TYPES[part] for part in parts if part in TYPES]
    to, source = kinds[0], kinds[-1]
    function, out = operation(opcode), []
    for row in zip(*operands, strict=True):
        words = [
            x & (2**64 - 1) if isinstance(x, int) and source.kind != "f"
            else int(np.array(x, source).view(f"u{source.itemsize}"))
            for x in row
        ]  # fmt: skip
        word = library().compute(function, *words, *[0] * (3 - len(words)))
        out.append(
            word & 3 if name == "setp" else np.array([word], np.uint64).view(np.uint8)[: to.itemsize].view(to)[0]
        )
    return [x == 1 for x in out] if name == "setp" else [x.item() for x in out]


def integers(bits, count=40):
    """Random integers, unsigned, and those at the edges."""
    rng = random.Random(bits)
    return [0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, *(rng.getrandbits(bits) for _ in range(count))]


def signed(x, bits):
    return x - 2**bits if x >= 2 ** (bits - 1) else x


@pytest.mark.parametrize("by", [0, 1, 15, 31, 32, 63, 64, 200])
def test_shifts_beyond_the_width(by):
    for bits in (16, 32, 64):
        a = integers(bits)
        assert computed(f"shl.b{bits}", a, [by] * len(a)) == [(x << by) % 2**bits for x in a]
        assert computed(f"shr.u{bits}", a, [by] * len(a)) == [x >> by for x in a]
        s = [signed(x, bits) for x in a]
        assert computed(f"shr.s{bits}", s, [by] * len(a)) == [x >> by for x in s]


def test_comparisons_with_nan():
    a, b = [1.0, NAN, NAN, 2.0], [1.0, 1.0, NAN, 1.0]
    for name, wanted in {
        "eq": [1, 0, 0, 0], "ne": [0, 0, 0, 1], "lt": [0, 0, 0, 0], "ge": [1, 0, 0, 1], "gtu": [0, 1, 1, 1],
        "neu": [0, 1, 1, 1], "equ": [1, 1, 1, 0], "num": [1, 0, 0, 1], "nan": [0, 1, 1, 0],
    }.items():  # fmt: skip
        assert computed(f"setp.{name}.f32", a, b) == list(map(bool, wanted)), name
        assert computed(f"setp.{name}.f64", a, b) == list(map(bool, wanted)), name
    assert computed("setp.lt.s32", [-1], [0]) == [True] and computed("setp.lt.u32", [2**32 - 1], [0]) == [False]


def test_smaller_and_larger():
    assert computed("max.f32", [NAN, 1.0, NAN], [1.0, NAN, NAN])[:2] == [1.0, 1.0]
    assert math.isnan(computed("max.NaN.f32", [NAN], [1.0])[0]) and math.isnan(computed("min.f32", [NAN], [NAN])[0])
    assert [math.copysign(1, x) for x in computed("max.f32", [-0.0, 0.0], [0.0, -0.0])] == [1.0, 1.0]
    assert [math.copysign(1, x) for x in computed("min.f64", [-0.0, 0.0], [0.0, -0.0])] == [-1.0, -1.0]


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_the_sign_of_the_first_with_the_value_of_the_second(kind):
    signs, values = [-0.0, 0.0, -3.0, -INF, 5.0], [2.0, -2.0, 0.0, -INF, NAN]
    found = computed(f"copysign.{kind}", signs, values)
    assert found[:2] == [-2.0, 2.0] and math.copysign(1, found[2]) == -1.0 and found[3] == -INF
    assert math.isnan(found[4]) and math.copysign(1, found[4]) == 1.0


def test_fused_multiply_add():
    """One rounding: what Python's exact fractions round to."""
    rng = random.Random(0)
    for _ in range(300):
        a, b = rng.gauss(0, 1), rng.gauss(0, 1)
        c = -a * b * (1.0 if rng.random() < 0.5 else rng.random())
        exact = float(Fraction(a) * Fraction(b) + Fraction(c))
        got = computed("fma.rn.f64", [a], [b], [c])[0]
        assert got == pytest.approx(exact, rel=2.0**-52, abs=0)
        f = [float(np.float32(x)) for x in (a, b, c)]
        exact = float(np.float32(float(Fraction(f[0]) * Fraction(f[1]) + Fraction(f[2]))))
        assert computed("fma.rn.f32", *([x] for x in f)) == [exact]
    assert computed("fma.rn.f64", [INF], [1.0], [0.0]) == [INF]
    assert math.isnan(computed("fma.rn.f64", [INF], [0.0], [0.0])[0])


def test_subnormals_are_flushed_where_the_opcode_says_so():
    """One that is read, and one that comes out."""
    assert lanes("neg.f32 %r9, 0f00000001;") == lanes("mov.b32 %r9, 0x80000001;")
    assert lanes("neg.ftz.f32 %r9, 0f00000001;") == lanes("mov.b32 %r9, 0x80000000;")
    assert lanes("mul.ftz.f32 %r9, 0f00800000, 0f3F000000;") == [0] * 32
    assert lanes("mul.f32 %r9, 0f00800000, 0f3F000000;") == [0x400000] * 32
    assert computed("ex2.approx.ftz.f32", [3.0]) == [8.0]


def test_rounding_to_integers():
    x = [2.5, -2.5, 3.7, -3.7, 1e30, -1e30, INF, NAN]
    top = 2**63 - 1
    assert computed("cvt.rzi.s64.f32", x) == [2, -2, 3, -3, top, -(2**63), top, -(2**63)]
    assert computed("cvt.rzi.s32.f32", x) == [2, -2, 3, -3, 2**31 - 1, -(2**31), 2**31 - 1, 0]
    assert computed("cvt.rzi.u32.f64", x) == [2, 0, 3, 0, 2**32 - 1, 0, 2**32 - 1, 2**31]
    assert computed("cvt.rmi.f64.f64", x[:-1]) == [2.0, -3.0, 3.0, -4.0, 1e30, -1e30, INF]
    assert computed("cvt.s64.s32", [-1]) == [-1] and computed("cvt.u64.u32", [2**32 - 1]) == [2**32 - 1]


def test_bf16_is_torchs():
    x = torch.cat([torch.randn(500), torch.tensor([0.0, -0.0, INF, -INF, 1e-40, 3.4e38, 1.00390625, 1.01171875])])
    bits = computed("cvt.rn.bf16.f32", x.tolist())
    assert bits == x.bfloat16().view(torch.uint16).tolist()
    assert computed("cvt.f32.bf16", bits) == x.bfloat16().float().tolist()
    (bits,) = computed("cvt.rn.bf16.f32", [NAN])
    assert math.isnan(computed("cvt.f32.bf16", [bits])[0])
    assert lanes("cvt.rn.bf16x2.f32 %r9, 0f3F800000, 0f40000000;") == [0x3F804000] * 32
    pairs = "setp.neu.bf16x2 %p1|%p2, 0x3F804000, 0x3F804001;\nselp.b32 %r7, 2, 0, %p2;\n"
    assert lanes(f"{pairs}selp.b32 %r9, 1, %r7, %p1;") == [1] * 32
    pairs = "setp.lt.bf16x2 %p1|%p2, 0x3F804000, 0x40003F80;\nselp.b32 %r7, 2, 0, %p2;\n"
    assert lanes(f"{pairs}selp.b32 %r9, 1, %r7, %p1;") == [2] * 32


def test_half_is_numpys():
    assert computed("cvt.rn.f16.f32", [1.0 + 2**-11, 1e6]) == [1.0, INF]
    assert computed("setp.neu.f16", [1.0, NAN], [1.0, 1.0]) == [False, True]


def lanes(body):
    """Return the value of %r9 in each of 32 threads at the end."""
    one, two = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    assert (
        run_small(f"ld.global.b32 %r8, [%rd4];\n{body}\nst.global.b32 [%rd5], %r9;", one, two, threads=32, programs=1)
        == []
    )
    return two.tolist()


@pytest.mark.parametrize("opcode", ["ex2.approx.ftz.f32", "lg2.approx.f32"])
def test_approximations_are_as_far_off_as_they_are_asked_to_be(opcode):
    """By every number of units up to that, the same for the same operand, and not where the ISA has exact results."""
    one = torch.linspace(0.0, 3.0, 512)
    body = f"ld.global.b32 %r9, [%rd4];\n{opcode} %r9, %r9;\nst.global.b32 [%rd5], %r9;"

    def units(off_by, seed):
        two = torch.zeros(512, dtype=torch.float32)
        assert run_small(body, one, two, threads=512, programs=1, seed=seed, off_by=(off_by, seed)) == []
        return two.view(torch.int32)

    exact = units(0, 0)
    off = units(2, 0) - exact
    assert set(off[1:].tolist()) == {-2, -1, 0, 1, 2} and off[0] == 0
    assert units(2, 0).equal(units(2, 0)) and not units(2, 0).equal(units(2, 1))
