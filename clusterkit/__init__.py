"""clusterkit: one job file, any cluster, the same numbers.

``from clusterkit import api`` gives every verb of the command line as a function.
Importing this package imports nothing else: the command line must start in a moment.
"""

__version__ = "0.1.0"
