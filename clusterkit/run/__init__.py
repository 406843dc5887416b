"""A run: its folder, its start, its supervisor, its end."""
