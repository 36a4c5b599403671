"""Bytes behind a URL: places in object stores, range requests, local pages. Knows no caches."""

from featcache.remote.files import (
    RemoteFiles,
    download,
    files_looked_at,
    options_with_pages,
    pages_at,
    requests_to,
    with_pages,
)
from featcache.remote.io import PIECE_BYTES, PIECES_AT_ONCE, Counts, Look, Requests
from featcache.remote.pages import Locks
from featcache.remote.places import DEFAULT, RemoteOptions, RemotePlace, is_url

__all__ = [
    "DEFAULT",
    "PIECES_AT_ONCE",
    "PIECE_BYTES",
    "Counts",
    "Locks",
    "Look",
    "RemoteFiles",
    "RemoteOptions",
    "RemotePlace",
    "Requests",
    "download",
    "files_looked_at",
    "is_url",
    "options_with_pages",
    "pages_at",
    "requests_to",
    "with_pages",
]
