"""Filling a cache from a data set and a function: here, on the ranks of torchrun, or on workers."""
