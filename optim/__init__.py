"""Optimizers: a state update along training steps, as `torch.optim.Optimizer`."""

if __name__ != "axes.optim":
    raise ImportError("import axes.optim, not optim: the folder is installed as axes.optim")
