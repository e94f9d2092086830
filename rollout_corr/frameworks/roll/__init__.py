"""ROLL: presets, losses and configuration."""
