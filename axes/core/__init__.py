"""The tuple and its parts: costs, geometries, monoids, algorithms, memories, and what follows from them."""
