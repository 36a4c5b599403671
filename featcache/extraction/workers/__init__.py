"""An extraction on the workers of Dask: the plan, what a worker does, and what becomes of a lost one's task."""
