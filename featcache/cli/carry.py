"""The verbs between a disk and an object store: `push`, `pull`, `sync`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from featcache.cli.output import print_json, say
from featcache.cli.verb import CACHE, JSON, verb

if TYPE_CHECKING:
    from featcache.remote import RemoteOptions
    from featcache.transfer import Transfer

URL = click.argument("url", metavar="URL")


def _carries(function: Callable[..., Transfer]) -> Callable[..., None]:
    """Give a verb the settings of a store and `--dry-run`, and tell what it has copied."""

    @functools.wraps(function)
    def called(
        *,
        endpoint: str | None,
        region: str | None,
        anonymous: bool,
        dry_run: bool,
        as_json: bool,
        **places: str,
    ) -> None:
        from featcache.remote import RemoteOptions

        remote = RemoteOptions(endpoint=endpoint, region=region, anonymous=anonymous)
        done = function(**places, remote=remote, dry_run=dry_run)
        _tell(function.__name__, done, dry_run, as_json)

    for option in (
        JSON,
        click.option("--endpoint", metavar="URL", help="A server that speaks S3."),
        click.option(
            "--region", metavar="NAME", help="Of the bucket; else as the environment says."
        ),
        click.option("--anonymous", is_flag=True, help="Send no credentials."),
        click.option("--dry-run", is_flag=True, help="Only say what would be copied."),
    ):
        called = option(called)
    return called


@verb
@CACHE
@URL
@_carries
def push(cache: str, url: str, remote: RemoteOptions, dry_run: bool) -> Transfer:
    """Copy a cache to an object store: what is not there yet, the manifest last."""
    from featcache import transfer

    return transfer.push(cache, url, remote=remote, dry_run=dry_run)


@verb
@CACHE
@URL
@_carries
def sync(cache: str, url: str, remote: RemoteOptions, dry_run: bool) -> Transfer:
    """Push a cache to an object store, or pull it from there: the later generation of the two."""
    from featcache import transfer

    return transfer.sync(cache, url, remote=remote, dry_run=dry_run)


@verb
@URL
@CACHE
@_carries
def pull(url: str, cache: str, remote: RemoteOptions, dry_run: bool) -> Transfer:
    """Copy a cache from an object store, and compare it with its checksums."""
    from featcache import transfer

    return transfer.pull(url, cache, remote=remote, dry_run=dry_run)


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
