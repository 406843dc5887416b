"""Help for programs in ranks that want it: distributed set-up, metrics; and what measures links.

The only part of clusterkit that imports torch (``metrics`` and ``arguments`` do not). A program
that knows nothing of it still runs under clusterkit; jobs/train/gpt needs nothing of it.
"""
