"""Filling a cache: from a data set and a function, in this process, on the ranks of torchrun, or on workers."""
