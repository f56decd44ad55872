"""Depth mixers: a state update along layers, acting on residual streams."""

if __name__ != "axes.depth":
    raise ImportError("import axes.depth, not depth: the folder is installed as axes.depth")
