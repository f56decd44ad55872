"""Chains whose entries have gates of their own: nothing is a matrix product, and no state leaves the chip."""
