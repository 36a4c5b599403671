"""A cache on disk, both ways: bytes to values and back."""
