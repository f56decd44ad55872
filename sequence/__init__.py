"""Sequence layers: a state update along tokens, as `torch.nn.Module`."""

if __name__ != "axes.sequence":
    raise ImportError("import axes.sequence, not sequence: the folder is installed as axes.sequence")
