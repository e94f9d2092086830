"""What the folders of the frameworks are built with: lookup by name, settings, recipes, drop-ins and tables."""
