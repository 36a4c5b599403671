"""Filling a cache from a data set and a function.

In this process, on the ranks of torchrun, or on workers.
"""
