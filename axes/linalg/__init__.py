"""Numerical linear algebra for all axes: Newton-Schulz, roots of matrices and equations, symmetric products."""
