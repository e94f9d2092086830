"""How a batch is run: reading tensors, blocks on the CPU, torch.compile, operators, ranks."""
