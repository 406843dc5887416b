"""What runs inside a rank: distributed set-up, metrics, checkpoints, training strategies.

The only part of clusterkit that imports torch (``metrics``, ``mesh`` and ``gpt_shape`` do not). A
program that knows nothing of it still runs under clusterkit; one that uses it gets progress,
resume and a clean ending.
"""
