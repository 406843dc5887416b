"""Machines reached over SSH as a cluster."""
