"""A cache on disk, both ways: bytes to values and back.

The face of the package is all that its files name without a `_`.
"""

from featcache.format.annotation_columns import *
from featcache.format.annotations import *
from featcache.format.columns import *
from featcache.format.feature_sets import *
from featcache.format.files import *
from featcache.format.fingerprint import *
from featcache.format.index import *
from featcache.format.journal import *
from featcache.format.manifest import *
from featcache.format.part import *
