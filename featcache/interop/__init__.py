"""What other toolkits need to train from featcache, one module for each."""
