"""An extraction on the workers of Dask.

The plan, what a worker does, and what becomes of a lost one's task.
"""
