"""The same tuple on two axes: SGD on a linear layer's squared error is DeltaNet, number for number.

Training data become tokens: an input is a key, a label a value, a step size a write strength, the weight the memory.
"""

import torch

from axes import Per, StateUpdate, Step
from axes.costs import SquaredError
from axes.dispatch import run
from axes.optim import optimizer

torch.manual_seed(0)
examples, inputs, outputs, lr = 32, 6, 4, 0.1
x, y = torch.randn(examples, inputs).double(), torch.randn(examples, outputs).double()

delta_rule = StateUpdate(SquaredError(), algorithm=Step(Per("beta")))

# the data axis: one training step per example, on a model's weight
model = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)
start = model.weight.detach().clone()
opt = optimizer(delta_rule)(model, beta=lr)
for one, label in zip(x, y, strict=True):
    opt.zero_grad()
    (0.5 * (model(one) - label).square().sum()).backward()
    opt.step()

# the sequence axis: the same examples as one sequence of 32 tokens, in one chunked pass
signal = {"k": x[None, :, None], "v": y[None, :, None], "q": x[None, :, None]}
signal["beta"] = torch.full((1, examples, 1), lr, dtype=torch.float64)
reads, state = run(delta_rule, signal, weights=(start[None, None],))

print(f"largest difference of the two weights: {(model.weight.detach() - state.theta[0][0, 0]).abs().max():.1e}")
