"""Small modules for other frameworks, each behind an extra of its own: import them by name."""
