"""Estimates of what features will take on disk, and of how long, by a trial on a few utterances."""
