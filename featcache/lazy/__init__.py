"""Reading through: what a cache lacks is computed, stored and returned, by many processes."""
