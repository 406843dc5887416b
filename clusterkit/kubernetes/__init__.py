"""Kubernetes: manifests as data, one module per kind of job; the API server; what pods tell."""
