"""Everything that is named after a framework: its presets, configuration, losses, metrics and drop-in.

`rollout_corr.frameworks.NAME.install()` replaces the framework's own functions by ones with the same names, arguments
and results. Importing a framework's package changes nothing and imports nothing of the framework.
"""
