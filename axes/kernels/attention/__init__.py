"""Softmax attention over lists of pairs with a mass each; rotations of keys and queries."""
