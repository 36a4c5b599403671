"""`python -m featcache` is the command `featcache`."""

from featcache.cli import main

main(prog_name="featcache")
