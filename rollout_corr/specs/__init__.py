"""The frozen, checked types that describe a correction and a loss. Imports nothing else of the package."""
