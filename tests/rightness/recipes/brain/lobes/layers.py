"""Scales of layers."""

LAYER_SCALES = {"first": 1.0, "middle": 1.5, "last": 2.0}


def mix(values, mean, share):
    """Mix the mean into values."""
    return (1 - share) * values + share * mean
