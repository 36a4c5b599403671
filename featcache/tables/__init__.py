"""Utterances of one or several caches as numbered rows, and the order of a seed; no torch."""

from featcache.tables.blocks import Block, BlockMember, RowMap, TableBlocks
from featcache.tables.columns import NUMBERS, Columns, drawn_parts, mixed, stable_order
from featcache.tables.combine import concat, join
from featcache.tables.mixes import EvenSource, MixOrder, MixPlan, MixSource, WeightedSource, mix
from featcache.tables.order import VERSION, Order, check_version, drawn, orders, share_of
from featcache.tables.segments import Cuts, IdLookup, SegmentList, Windows
from featcache.tables.selection import Selection, StoredLengths, cut_frames, pieces
from featcache.tables.shown import boxed, cache_line, escaped, grid, table_html, tiles
from featcache.tables.table import FeatureTable, RowOrder
from featcache.tables.times import Seconds

__all__ = [
    "NUMBERS",
    "VERSION",
    "Block",
    "BlockMember",
    "Columns",
    "Cuts",
    "EvenSource",
    "FeatureTable",
    "IdLookup",
    "MixOrder",
    "MixPlan",
    "MixSource",
    "Order",
    "RowMap",
    "RowOrder",
    "Seconds",
    "SegmentList",
    "Selection",
    "StoredLengths",
    "TableBlocks",
    "WeightedSource",
    "Windows",
    "boxed",
    "cache_line",
    "check_version",
    "concat",
    "cut_frames",
    "drawn",
    "drawn_parts",
    "escaped",
    "grid",
    "join",
    "mix",
    "mixed",
    "orders",
    "pieces",
    "share_of",
    "stable_order",
    "table_html",
    "tiles",
]
