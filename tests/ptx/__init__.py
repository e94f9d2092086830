"""An interpreter of the PTX that Triton makes of the kernels: compiled code, run and watched without a GPU.

`session` stands where the driver would, `parse` reads the text, `encode` makes steps of it, `machine.py` hands them and
the memory to `machine.cpp` (`native` is what both know), which runs programs and records who touched which memory;
`opcodes.hpp` says what an instruction computes. Chapter names are those of the PTX ISA. `python -m ptx` runs variants
under any Triton, `python -m ptx.counts` counts what they execute.
"""
