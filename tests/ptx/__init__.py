"""An interpreter of the PTX that Triton makes of the kernels: compiled code, run and watched without a GPU.

`session` stands where the driver would, `parse` reads the text, `machine.py` hands it to `machine.cpp`, which runs
programs and records who touched which memory; `opcodes.hpp` says what an instruction computes. Chapter names are those
of the PTX ISA.
"""
