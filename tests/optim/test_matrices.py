"""Parameters that are matrices in their own way: stored (in, out), several in one, stacks of experts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from axes import optim

GRADIENT_RULES = (optim.Muon, optim.NorMuon, optim.Shampoo, optim.SOAP, optim.PSGDKron)
ODD = {  # options under which the orientation of a matrix, and which matrices are apart, make a difference
    optim.Muon: {"scale": "spectral", "precision": "input"},
    optim.NorMuon: {"scale": "original", "precision": "input"},
    optim.Shampoo: {"graft": "adagrad", "refresh": 2, "eps": 1e-6},
    optim.SOAP: {"refresh": 2, "eps": 1e-3},
    optim.PSGDKron: {},
}


def filled(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(optimizer: Any, pairs: list[tuple[Tensor, Any]], steps: int = 5) -> None:
    """pairs: parameters and what makes their gradient at a step."""
    for t in range(steps):
        for p, gradient in pairs:
            p.grad = gradient(t)
        optimizer.step()


# by layout: the shape of a parameter of matrices (4, n), and these as views of a tensor of that shape
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "in out": (lambda n: (n, 4), lambda x: [x.mT]),
    "experts out in": (lambda n: (3, 4, n), lambda x: list(x)),
    "experts in out": (lambda n: (3, n, 4), lambda x: list(x.mT)),
    "(3 out) in": (lambda n: (12, n), lambda x: list(x.split(4))),
    "in (3 out)": (lambda n: (n, 12), lambda x: list(x.mT.split(4))),
    "out experts in": (lambda n: (4, 3, n), lambda x: [x[:, i] for i in range(3)]),
    "experts (2 out) in": (lambda n: (3, 8, n), lambda x: [half for one in x for half in one.split(4)]),
    "(2 3 out) in": (lambda n: (24, n), lambda x: list(x.split(4))),
}


@pytest.mark.parametrize("foreach", [None, False], ids=["together", "interpreted"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cls", GRADIENT_RULES, ids=lambda cls: cls.name)
def test_a_batch_is_stepped_as_its_matrices_would_be_alone(cls: Any, layout: str, foreach: bool | None) -> None:
    n = 4 if cls in (optim.Shampoo, optim.SOAP) else 5  # with others, bases of null spaces are rounding
    form, parts = LAYOUTS[layout]
    shape = form(n)
    whole, beside = nn.Parameter(filled(*shape)), nn.Parameter(filled(4, n, seed=9))
    alone = [nn.Parameter(part.clone()) for part in parts(whole.detach())]
    others = [nn.Parameter(beside.detach().clone())]

    def gradients(t: int) -> Tensor:
        return filled(*shape, seed=10 + t)

    own = {"rule": cls.name, "matrices": layout}
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "foreach": foreach, **ODD[cls]}
    ours = cls([{"params": [whole], **own}, {"params": [beside], "rule": cls.name}], **settings)
    theirs = cls([{"params": [*alone, *others], "rule": cls.name}], **settings)
    train(ours, [(whole, gradients), (beside, lambda t: filled(4, n, seed=t))])
    train(
        theirs,
        [(p, lambda t, i=i: parts(gradients(t))[i].contiguous()) for i, p in enumerate(alone)]
        + [(others[0], lambda t: filled(4, n, seed=t))],
    )
    for part, p in zip(parts(whole.detach()), alone, strict=True):
        torch.testing.assert_close(part, p.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(beside.detach(), others[0].detach(), rtol=0, atol=1e-9)
