"""Reading a cache that is published: numpy arrays, torch tensors, checks; writes nothing."""
