"""A tuple of one's own: how three costs recall values when some of them are outliers.

Only the cost differs between the three memories; everything else of the tuple is the same.
"""

import torch

from axes import Per, StateUpdate, Step
from axes.costs import Huber, Lp, SquaredError
from axes.dispatch import run, select

torch.manual_seed(0)
pairs, repeats, d = 10, 20, 16
keys = torch.nn.functional.normalize(torch.randn(pairs, d), dim=-1)
values = torch.randn(pairs, d)

order = torch.randperm(pairs * repeats) % pairs
seen = values[order] + 20.0 * torch.randn(len(order), d) * (torch.rand(len(order), 1) < 0.1)

for name, cost, step in (("squared error", SquaredError(), 0.3), ("l_1.5", Lp(1.5), 0.15), ("Huber", Huber(0.5), 0.5)):
    memory = StateUpdate(cost, algorithm=Step(Per("beta")))
    signal = {"k": keys[order][None, :, None], "v": seen[None, :, None], "q": keys[order][None, :, None]}
    signal["beta"] = torch.full((1, len(order), 1), step)
    _, state = run(memory, signal)
    recalled = keys @ state.theta[0][0, 0].T
    error = (recalled - values).square().mean().sqrt()
    print(f"{name:<14} recall error {error:.2f}   route: {select(memory).route}")
