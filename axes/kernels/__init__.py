"""Triton kernels shared by the three axes; Triton is imported on first use, never by `import axes`."""
