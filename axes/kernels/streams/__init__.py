"""Residual streams: reads, mixing and writes along depth, and the links of their coefficients."""

LARGEST = 16  # streams; asked where Triton is not imported
ENTRIES = 128  # coefficients that are predicted from one row of streams
