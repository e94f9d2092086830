"""open-instruct: presets, losses and configuration."""
