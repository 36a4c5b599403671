"""Feeding training: data sets, padded batches, reading ahead, memory and devices."""
