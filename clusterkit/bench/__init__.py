"""The job of `clusterkit bench`, and what its measurements mean."""
