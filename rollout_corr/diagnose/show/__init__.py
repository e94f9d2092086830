"""Show results: in the terminal, as JSON, as HTML pages."""
