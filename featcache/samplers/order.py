"""The order that a seed gives, for samplers: `featcache.tables.order`, by which mixes are drawn."""

from featcache.tables.order import VERSION as VERSION
from featcache.tables.order import Order as Order
from featcache.tables.order import check_version as check_version
from featcache.tables.order import drawn as drawn
from featcache.tables.order import orders as orders
from featcache.tables.order import share_of as share_of
