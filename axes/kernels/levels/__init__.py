"""Kernels of chains whose stretches are weighed by what reads them."""
