"""Stores that their own libraries read, so that `featcache.convert` copies them: one file each."""
