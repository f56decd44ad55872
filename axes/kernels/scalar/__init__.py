"""One state with a gate of one number a token: written to, or corrected by the delta rule."""
