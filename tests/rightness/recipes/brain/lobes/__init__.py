"""Parts of recipes that several share."""
