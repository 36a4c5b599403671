"""Utterances of one or several caches as numbered rows; no torch."""
