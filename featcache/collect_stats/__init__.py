"""ESPnet3's collect-stats, here or on workers: statistics and shapes of a model's features."""
