"""What a cache is on disk, both ways: bytes to values and back."""
