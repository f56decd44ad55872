"""Two states side by side: a memory and its momentum."""
