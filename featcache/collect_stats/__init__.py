"""ESPnet3's collect-stats: shapes and statistics of what a model makes of a data set, here or on workers."""
