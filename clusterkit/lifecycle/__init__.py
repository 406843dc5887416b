"""From the request of a run to its end."""
