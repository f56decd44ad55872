"""What kernels that are generated from a token's step call."""
