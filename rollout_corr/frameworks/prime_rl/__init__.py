"""prime-rl: presets, losses, and the reader of its configuration."""
