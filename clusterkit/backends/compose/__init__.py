"""Containers of a docker engine as a cluster."""
