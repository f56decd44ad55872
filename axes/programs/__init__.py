"""Tuples that act entry by entry, as straight-line programs: traced once, run over many tensors at a time."""
