"""The project on its way to the hosts."""
