"""Extraction on many workers: Dask on one machine, on a cluster's job queue, over SSH."""
