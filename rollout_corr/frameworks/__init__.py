"""Everything named after a framework, one folder or file each: presets, configuration, losses, metrics and drop-in.

`rollout_corr.frameworks.NAME.install()` replaces the framework's own functions by ones with the same names, arguments
and results. Importing a framework's folder changes nothing and imports nothing of the framework.
"""
