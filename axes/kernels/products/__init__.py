"""Products of matrices that are no chain: symmetric ones, sums of outer products, and what stands beside them."""
