"""One cache on disk."""
