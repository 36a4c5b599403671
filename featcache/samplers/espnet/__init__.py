"""ESPnet's batch samplers, batch for batch: two builders and what they are made of."""
