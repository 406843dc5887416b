"""Pods of a Kubernetes cluster as a cluster."""
