"""Bytes behind a URL: places in object stores, range requests, local pages. Knows no caches."""

from featcache.remote.files import RemoteFiles, pages_at, requests_to, with_pages
from featcache.remote.io import Counts, Requests
from featcache.remote.places import DEFAULT, RemoteOptions, RemotePlace, is_url

__all__ = [
    "DEFAULT",
    "Counts",
    "RemoteFiles",
    "RemoteOptions",
    "RemotePlace",
    "Requests",
    "is_url",
    "pages_at",
    "requests_to",
    "with_pages",
]
