"""ESPnet3's collect-stats, here or on workers.

Shapes and statistics of what a model makes of a data set.
"""
