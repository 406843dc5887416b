"""The Slurm backend; see `clusterkit.backends.slurm.backend`."""
