"""Running a batch: reading tensors, blocks on the CPU, torch.compile, operators, ranks."""
