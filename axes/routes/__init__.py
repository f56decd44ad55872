"""Ways to compute a tuple: the choice among them, the torch forms, and the calls of kernels."""
