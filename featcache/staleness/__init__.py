"""Whether cached features are still the right ones: told without caches, data sets or workers."""
