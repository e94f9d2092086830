"""OpenRLHF: presets, losses and configuration."""
