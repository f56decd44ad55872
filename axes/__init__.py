"""Optimizers, sequence layers and depth mixers as one algorithm: steps of a `StateUpdate` along data, time or depth."""

__version__ = "0.1.0"
