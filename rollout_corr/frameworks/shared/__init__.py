"""Building blocks of the frameworks: lookup by name, presets, recipes, settings, drop-ins, tables of the docs."""
