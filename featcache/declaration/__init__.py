"""Declarations of features: name, dtype, storage format, codec and their options, checked when made."""
