"""Checks of the settings that all extractions have."""

from __future__ import annotations

from numbers import Integral

from featcache.errors import ConfigError


def check_settings(on_error: str, retries: int, publish_every_s: float | None) -> None:
    """Raise `ConfigError` for settings of an extraction that cannot work."""
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error is 'raise' or 'skip', not {on_error!r}")
    if not isinstance(retries, Integral) or retries < 0:
        raise ConfigError(f"retries is a whole number from 0 on, not {retries!r}")
    if publish_every_s is not None and not (
        isinstance(publish_every_s, int | float) and publish_every_s > 0
    ):
        raise ConfigError(
            f"publish_every_s is a number of seconds, above 0, or None, not {publish_every_s!r}"
        )
