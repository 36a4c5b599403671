"""Dask alone: clients, their workers, and tasks that outlive a lost worker.

Knows neither features nor caches.
"""
