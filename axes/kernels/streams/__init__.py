"""Residual streams: reads, mixing and writes along depth, and the links of their coefficients."""
