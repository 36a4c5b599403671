"""Declarations of features: name, dtype, format, codec and their options, checked when made."""
