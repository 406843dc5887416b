"""Job files and cluster files: reading them, checking them, making a first one."""
