"""Batch samplers: from lengths to batches of rows or ids, with numpy alone."""
