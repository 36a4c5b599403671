"""Filling a cache from a data set and a function: here, on ranks or on workers that may die."""
