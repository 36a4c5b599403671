"""Cached features that are still the right ones, or not: fingerprint, probe, stamps, witnesses."""
