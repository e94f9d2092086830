"""miles: its configuration. Its presets, losses and functions are slime's."""
