"""Feeding training: data sets, batches in several layouts, reading ahead, memory and devices.

`Padded`, `Packed` and `Jagged` are layouts with settings for `FeatureLoader` and `FeatureDataset`.
"""

from featcache.loading.layouts import Jagged as Jagged
from featcache.loading.layouts import Layout as Layout
from featcache.loading.layouts import Packed as Packed
from featcache.loading.layouts import Padded as Padded
