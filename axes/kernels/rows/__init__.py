"""Kernels over rows of numbers, each row by one program."""
