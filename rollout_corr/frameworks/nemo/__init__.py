"""NeMo RL: presets, losses and configuration."""
