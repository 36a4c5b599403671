"""featcache: compute speech features once, store them in the format you pick, feed them to training."""
