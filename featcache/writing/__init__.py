"""Writing a cache: from arrays to parts, and from parts to a published generation."""
