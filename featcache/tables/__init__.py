"""Utterances of one or several caches as numbered rows; no torch.

The face of the package is all that its files name without a `_`.
"""

from featcache.tables.blocks import *
from featcache.tables.columns import *
from featcache.tables.combine import *
from featcache.tables.mixes import *
from featcache.tables.order import *
from featcache.tables.segments import *
from featcache.tables.selection import *
from featcache.tables.shown import *
from featcache.tables.table import *
from featcache.tables.times import *
