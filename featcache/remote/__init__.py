"""Bytes behind a URL: places in object stores, range requests, local pages. Knows no caches."""

from featcache.remote.files import RemoteFiles, download, pages_at, requests_to, with_pages
from featcache.remote.io import PIECE_BYTES, PIECES_AT_ONCE, Counts, Requests
from featcache.remote.pages import Locks
from featcache.remote.places import DEFAULT, RemoteOptions, RemotePlace, is_url

__all__ = [
    "DEFAULT",
    "PIECES_AT_ONCE",
    "PIECE_BYTES",
    "Counts",
    "Locks",
    "RemoteFiles",
    "RemoteOptions",
    "RemotePlace",
    "Requests",
    "download",
    "is_url",
    "pages_at",
    "requests_to",
    "with_pages",
]
