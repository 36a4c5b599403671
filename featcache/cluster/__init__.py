"""Dask alone: clients, their workers, and tasks that outlive a lost worker; knows neither features nor caches."""
