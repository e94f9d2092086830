"""The kernels of `policy_loss`: gradient, sequences, and their launch."""
