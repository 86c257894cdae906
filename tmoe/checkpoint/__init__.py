"""Step folders: saving and loading them, what is in them, and the offline tools."""
