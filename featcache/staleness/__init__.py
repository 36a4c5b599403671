"""Tells whether cached features are still the right ones; knows no caches, data sets or workers."""
