"""The live view of runs in a browser: a server for this machine, its one page, and a report."""
