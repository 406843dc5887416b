"""Runs live in a browser: a server for this machine, its one page, and reports as a file."""
