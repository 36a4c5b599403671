"""ESPnet's iterator factories: which batches, or chunks of them, an epoch of training takes."""
