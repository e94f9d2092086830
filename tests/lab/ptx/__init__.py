"""An interpreter of the PTX that Triton makes of the kernels: compiled code, run and watched without a GPU."""
