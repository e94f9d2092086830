"""An interpreter of the PTX that Triton makes of the kernels: compiled code, run and watched without a GPU.

README.md names the files beside the chapters of the PTX ISA. `python -m ptx` runs variants under any Triton,
`python -m ptx.counts` counts what they execute.
"""
