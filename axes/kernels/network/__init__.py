"""Memories of two layers whose gradients are taken at an anchor: blocks of 16 tokens in turn, two matrices a head."""
