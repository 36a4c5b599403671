"""The verbs between a disk and an object store: `push`, `pull`, `sync`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from featcache.cli.output import print_json, say
from featcache.cli.verb import CACHE, JSON, verb

if TYPE_CHECKING:
    from featcache.remote import RemoteOptions
    from featcache.transfer import Transfer

F = TypeVar("F", bound=Callable[..., Any])
URL = click.argument("url", metavar="URL")


def _settings(function: F) -> F:
    """Give a verb the settings of a store, and `--dry-run`."""
    for option in (
        click.option("--endpoint", metavar="URL", help="A server that speaks S3."),
        click.option(
            "--region", metavar="NAME", help="Of the bucket; else as the environment says."
        ),
        click.option("--anonymous", is_flag=True, help="Send no credentials."),
        click.option("--dry-run", is_flag=True, help="Only say what would be copied."),
    ):
        function = option(function)
    return function


@verb
@CACHE
@URL
@_settings
@JSON
def push(
    cache: str,
    url: str,
    endpoint: str | None,
    region: str | None,
    anonymous: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy a cache to an object store: what is not there yet, the manifest last."""
    from featcache import transfer

    remote = _remote(endpoint, region, anonymous)
    _tell("push", transfer.push(cache, url, remote=remote, dry_run=dry_run), dry_run, as_json)


@verb
@CACHE
@URL
@_settings
@JSON
def sync(
    cache: str,
    url: str,
    endpoint: str | None,
    region: str | None,
    anonymous: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Push a cache to an object store, or pull it from there: the later generation of the two."""
    from featcache import transfer

    remote = _remote(endpoint, region, anonymous)
    _tell("sync", transfer.sync(cache, url, remote=remote, dry_run=dry_run), dry_run, as_json)


@verb
@URL
@CACHE
@_settings
@JSON
def pull(
    url: str,
    cache: str,
    endpoint: str | None,
    region: str | None,
    anonymous: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy a cache from an object store, and compare it with its checksums."""
    from featcache import transfer

    remote = _remote(endpoint, region, anonymous)
    _tell("pull", transfer.pull(url, cache, remote=remote, dry_run=dry_run), dry_run, as_json)


def _remote(endpoint: str | None, region: str | None, anonymous: bool) -> RemoteOptions:
    from featcache.remote import RemoteOptions

    return RemoteOptions(endpoint=endpoint, region=region, anonymous=anonymous)


def _tell(name: str, done: Transfer, dry_run: bool, as_json: bool) -> None:
    if as_json:
        told = {
            "way": done.verb,
            "files": done.files,
            "bytes": done.nbytes,
            "skipped": done.skipped,
        }
        print_json(name, {**told, "requests": done.requests, "dry_run": dry_run})
    else:
        say(f"{done.verb}: {'would copy' if dry_run else 'copied'} {done}")
