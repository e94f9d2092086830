"""Showing what was measured: text, tables, pages."""
