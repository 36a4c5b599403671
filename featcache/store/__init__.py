"""One cache on disk: what lies there, who reads it, who writes it."""
