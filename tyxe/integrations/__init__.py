"""Small modules for other frameworks, each with its own extra: import them by name."""
