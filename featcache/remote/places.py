"""Places in object stores: URLs, how they are reached, and the store behind one.

A store holds secrets: it is never pickled, printed or logged. The URL is, which therefore has none.
"""

from __future__ import annotations

import importlib
import math
import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import xxhash

from featcache.errors import ConfigError, MissingDependencyError, RemoteError

SCHEMES = ("s3", "gs", "az", "http", "https")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class RemoteOptions:
    """Options of a cache behind a URL: where pages of it are kept, and how its store is asked.

    Credentials are not among them: they come from where the store's own tools take them
    (environment, profile, role of the machine).

    Args:
        pages: directory on a local disk for what was read; several processes share it. None: a
            directory of this process alone, gone when it ends.
        budget_bytes: most bytes that are kept there; those used longest ago are removed first.
        floor_bytes: least free bytes that are left on that disk.
        anonymous: send no credentials, for public buckets.
        endpoint: URL of a server that speaks S3, other than Amazon's, or Azure's protocol, such as
            Azurite; `http://` ones, too.
        region: of an S3 bucket; None: as the environment says.
        concurrency: most requests at a time; fewer are made where answers come within milliseconds.
        gap_bytes: bytes between two wanted pieces that are read with them, to save a request; never
            more than 5 % of all. None: as many as pay, by the measured speed and latency.
        timeout_s: seconds after which a request without any answer is tried again.
        retry_s: seconds of trying again, after which an error is raised.
        hedge: make a request again whose answer has not begun after three times the latency of the
            slowest hundredth; the first answer counts.
    """

    pages: str | os.PathLike[str] | None = None
    budget_bytes: int = 64 << 30
    floor_bytes: int = 1 << 30
    anonymous: bool = False
    endpoint: str | None = None
    region: str | None = None
    concurrency: int = 64
    gap_bytes: int | None = None
    timeout_s: float = 30.0
    retry_s: float = 60.0
    hedge: bool = True

    def __post_init__(self) -> None:
        if self.budget_bytes < 0 or self.floor_bytes < 0 or (self.gap_bytes or 0) < 0:
            raise ConfigError("budget_bytes, floor_bytes and gap_bytes: none can be negative")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency}: one request at a time at least")
        if self.endpoint is not None and any(sign in self.endpoint for sign in "@?#"):
            raise ConfigError("endpoint is a URL without user or query: it is logged and pickled")
        if not (0 < self.timeout_s < math.inf and 0 < self.retry_s < math.inf):  # nan is neither
            raise ConfigError("timeout_s and retry_s are seconds, more than 0 and not infinite")


DEFAULT = RemoteOptions()


def is_url(path: object) -> bool:
    """Whether something is a URL, and no path.

    >>> is_url("s3://bucket/train"), is_url("features/train")
    (True, False)
    """
    return isinstance(path, str) and URL.match(path) is not None


@dataclass(frozen=True)
class RemotePlace:
    """A directory in an object store.

    Args:
        url: its URL, without a slash at the end; it holds no secret.
        options: how it is reached.
    """

    url: str
    options: RemoteOptions = DEFAULT

    @property
    def digest(self) -> str:
        """A digest of URL and endpoint, another one for another store."""
        return xxhash.xxh3_64_hexdigest(f"{self.options.endpoint} {self.url}".encode())

    @classmethod
    def of(cls, url: str, options: RemoteOptions = DEFAULT) -> RemotePlace:
        """Return the place of a URL; raises `ConfigError` for one that is none, or has secrets."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ConfigError(
                f"{parts.scheme}:// is no store that caches are read from; "
                f"there are {', '.join(SCHEMES)}"
            )
        if not parts.netloc:
            raise ConfigError(f"a {parts.scheme}:// URL names no bucket or host")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(
                f"the URL of {parts.scheme}://{parts.hostname} has a user, a query or a fragment: "
                "URLs are logged and stored, so they must hold no secret; give credentials through "
                "the environment"
            )
        if any(name in (".", "..") for name in unquote(parts.path).split("/")):
            raise ConfigError(f"{url!r} leads out of its bucket: '.' and '..' are no names there")
        return cls(url.rstrip("/"), options)

    def path(self, name: str) -> str:
        """Return the path of a file below the place, within its store."""
        prefix = unquote(urlsplit(self.url).path).strip("/")
        return f"{prefix}/{name}" if prefix else name

    def store(self, tries_again: int) -> Any:
        """Return the store, made anew, which tries so often again what fails.

        Raises `MissingDependencyError` without obstore, `RemoteError` for lacking credentials.
        """
        try:
            stores = importlib.import_module("obstore.store")
        except ImportError as error:
            raise MissingDependencyError(
                "caches behind URLs need 'obstore'; try: pip install 'featcache[remote]'"
            ) from error
        parts, options = urlsplit(self.url), self.options
        named = os.environ.get("AWS_ENDPOINT_URL") if parts.scheme == "s3" else None
        plain = (options.endpoint or named or self.url).startswith("http://")
        try:
            return stores.from_url(
                f"{parts.scheme}://{parts.netloc}",
                config=self._config(parts.scheme) or None,
                client_options={
                    "allow_http": plain,
                    "timeout": timedelta(days=1),  # of a whole request: links may be slow
                    "read_timeout": timedelta(seconds=options.timeout_s),
                    "pool_max_idle_per_host": str(options.concurrency),
                },
                retry_config={
                    "max_retries": tries_again,
                    "retry_timeout": timedelta(seconds=options.retry_s),
                },
            )
        except Exception:  # whose words may hold secrets: nothing leads to it
            pass
        raise RemoteError(
            f"{self.url}: no store can be made of the settings in the environment; see whether "
            "credentials are there and whole, or give RemoteOptions(anonymous=True)"
        )

    def _config(self, scheme: str) -> dict[str, Any]:
        """Return what obstore is told of the store, beside its URL."""
        options = self.options
        config: dict[str, Any] = {}
        if options.anonymous and scheme in ("s3", "gs", "az"):
            config["skip_signature"] = True
        if scheme in ("s3", "az") and options.endpoint is not None:
            config["endpoint"] = options.endpoint
        if scheme == "s3":
            if options.endpoint is not None:
                config["virtual_hosted_style_request"] = False
            if options.region is not None:
                config["region"] = options.region
        return config
