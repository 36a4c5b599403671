"""Conversion of what is stored: a table's rows are written to a cache, and read back."""
