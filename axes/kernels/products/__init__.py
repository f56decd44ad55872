"""Products of matrices that are no chain: symmetric ones, sums of outer products, and what stands beside them."""

LARGEST_SIDE = 32  # of matrices that one program iterates; asked where Triton is not imported
MOST_POLYNOMIALS = 8  # different ones, of such an iteration
