"""Tokens whose signals depend on the last read: they are walked, with matrices and state on chip."""
