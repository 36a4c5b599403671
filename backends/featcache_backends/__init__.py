"""featcache's own storage formats, one module each."""
