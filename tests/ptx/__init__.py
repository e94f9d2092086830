"""An interpreter of the PTX that Triton makes of the kernels: compiled code, run and watched without a GPU.

`parse` reads the text, `opcodes` says what an instruction computes, `steps` makes a Python function of each, `memory`
holds tensors and shared memory with a record of who touched them, `machine` runs programs, `session` stands where the
driver would. Chapter names are those of the PTX ISA.
"""
