"""Adopt stores that others wrote: caches whose bytes stay where they lie. One file a kind."""
