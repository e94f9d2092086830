"""unsloth-zoo: presets, losses and configuration."""
