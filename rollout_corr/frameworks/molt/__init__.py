"""labs-molt: presets, losses and configuration."""
