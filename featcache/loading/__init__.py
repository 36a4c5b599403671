"""Feeding training: data sets, batch samplers, iterators and the loader."""
