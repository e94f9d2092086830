"""ms-swift: presets, losses and configuration."""
