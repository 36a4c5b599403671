"""Reading a cache that is published: numpy arrays, torch tensors, checks; writes nothing.

The face of the package is all that its files name without a `_`.
"""

from featcache.reading.containers import *
from featcache.reading.damage import *
from featcache.reading.feature_arrays import *
from featcache.reading.generation import *
from featcache.reading.opening import *
from featcache.reading.roots import *
from featcache.reading.shell import *
from featcache.reading.unpublished import *
from featcache.reading.verify import *
