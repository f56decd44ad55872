"""What checks share: runs of tuples and of optimizers, derivatives, matrices, fits."""
