"""What is known of every optimizer under test, and the model that they are tested on: one table drives all cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from axes import optim


@dataclass(frozen=True)
class Instance:
    """An optimizer under test, and configurations that reach its branches."""

    cls: type[optim.Optimizer]
    configurations: tuple[dict[str, Any], ...] = field(default=({},))
    matrices: bool = False  # it routes, and takes bare parameters only in groups that name their rule
    layers: bool = False  # it needs the model
    momentum: str = ""
    lr: float = 1e-2  # for a small network and few steps
    waits: int = 0  # first steps that move nothing
    lowers: float = 0.8  # to which part of its first value the loss falls in these steps
    mixes: bool = False  # the entries of a parameter
    transcendental: bool = False  # its link rounds differently in vectorised and scalar loops, in the last bit

    def __str__(self) -> str:
        return self.cls.name


INSTANCES = (
    # no error, so no descent: what falls is what AdamW does to the biases
    Instance(optim.Hebbian, ({}, {"weight_decay": 0.1}), matrices=True, layers=True, lr=1e-5, lowers=0.98),
    Instance(optim.NLMS, ({}, {"eps": 1.0, "weight_decay": 0.1}), matrices=True, layers=True, lr=0.1),
    Instance(optim.LpRegression, ({}, {"p": 3.0, "weight_decay": 0.1}), matrices=True, layers=True, lr=0.01),
    Instance(optim.HuberRegression, ({}, {"delta": 0.01}), matrices=True, layers=True, lr=0.03),
    Instance(optim.RecursiveLeastSquares, ({}, {"forget": 0.9, "eps": 0.1}), matrices=True, layers=True, lr=1.0),
    Instance(
        optim.SGD,
        (
            {"momentum": 0.0},
            {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1},
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "decoupled": True},
        ),
        momentum="momentum",
        lr=0.1,
    ),
    Instance(
        optim.QHM,
        ({"momentum": 0.9}, {"momentum": 0.5, "weight_decay": 0.1, "decoupled": True}),
        momentum="momentum",
        lr=0.5,
    ),
    Instance(optim.ASGD, ({}, {"lambd": 0.1, "alpha": 0.5, "t0": 1.0, "weight_decay": 0.1}), lr=0.1),
    Instance(optim.RotationalMomentum, ({}, {"weight_decay": 0.1}), matrices=True, momentum="momentum", lr=0.1),
    Instance(optim.ReflectiveMomentum, ({}, {"weight_decay": 0.1}), matrices=True, momentum="momentum", lr=0.1),
    Instance(optim.SignedEG, ({}, {"scale": 0.5, "weight_decay": 0.1}), lr=0.05, transcendental=True),
    Instance(optim.ExponentiatedGradient, ({}, {"scale": 0.5, "weight_decay": 0.1}), lr=0.05, transcendental=True),
    Instance(
        optim.RMSprop,
        ({}, {"alpha": 0.9, "momentum": 0.9, "weight_decay": 0.1}, {"alpha": 0.9, "centered": True, "eps": 1e-3}),
        momentum="momentum",
    ),
    Instance(optim.Adagrad, ({}, {"lr_decay": 0.1, "initial_accumulator_value": 0.3, "weight_decay": 0.1}), lr=3e-2),
    Instance(optim.Adadelta, ({"eps": 1e-3}, {"rho": 0.5, "eps": 1e-2, "weight_decay": 0.1}), lr=1.0),
    Instance(optim.Adam, ({}, {"weight_decay": 0.1, "eps": 1e-3}, {"amsgrad": True}), momentum="betas"),
    Instance(optim.AdamW, ({}, {"betas": (0.0, 0.9)}, {"amsgrad": True}), momentum="betas"),
    Instance(optim.AMSGrad, ({}, {"betas": (0.5, 0.5), "weight_decay": 0.1}), momentum="betas"),
    Instance(optim.Adamax, ({}, {"betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1}), momentum="betas"),
    Instance(
        optim.NAdam,
        (
            {},
            {"betas": (0.8, 0.95), "weight_decay": 0.1, "decoupled_weight_decay": True, "momentum_decay": None},
            {"betas": (0.0, 0.9)},
        ),
        momentum="betas",
    ),
    Instance(
        optim.RAdam,
        ({"betas": (0.9, 0.9)}, {"betas": (0.8, 0.8), "weight_decay": 0.1, "decoupled_weight_decay": True}, {}),
        momentum="betas",
        lr=0.1,
    ),
    Instance(
        optim.QHAdam,
        ({}, {"betas": (0.8, 0.9), "nus": (0.5, 0.5), "weight_decay": 0.1}, {"nus": (0.0, 1.0), "decoupled": True}),
        momentum="betas",
    ),
    Instance(optim.AdEMAMix, ({}, {"betas": (0.8, 0.9, 0.99), "warmup": 5.0, "weight_decay": 0.1})),
    Instance(optim.LaProp, ({}, {"betas": (0.0, 0.9), "eps": 1e-3, "weight_decay": 0.1}), momentum="betas"),
    Instance(
        optim.ADOPT,
        ({}, {"betas": (0.5, 0.9), "decoupled": True, "weight_decay": 0.1}, {"clip_exponent": None}),
        momentum="betas",
        lr=3e-2,
        waits=1,
    ),
    Instance(optim.MARS, ({}, {"gamma": 0.0, "weight_decay": 0.1}), momentum="betas", mixes=True),
    Instance(
        optim.Prodigy,
        (
            {"d0": 1e-3},
            {"d0": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled": False, "bias_correction": True},
            {"d0": 1e-3, "d_coef": 2.0, "growth_rate": 1.5, "beta3": 0.9, "safeguard_warmup": True},
        ),
        momentum="betas",
        lr=1.0,
        mixes=True,
    ),
    Instance(optim.SignSGD, ({}, {"momentum": 0.9, "weight_decay": 0.1}), momentum="momentum", lr=3e-3),
    Instance(optim.Lion, ({}, {"betas": (0.9, 0.9), "weight_decay": 0.1}), momentum="betas", lr=3e-3),
    Instance(
        optim.LARS,
        ({}, {"nesterov": True, "coefficient": 0.1, "weight_decay": 0.1}),
        momentum="momentum",
        lr=10.0,
        mixes=True,
    ),
    Instance(
        optim.LAMB,
        ({}, {"bounds": (0.5, 2.0), "bias_correction": False, "weight_decay": 0.1}, {"adapt": False}),
        momentum="betas",
        lr=3e-2,
        mixes=True,
    ),
    Instance(
        optim.Adafactor,
        ({}, {"momentum": 0.8, "guard": "added", "eps": (1e-30, 1e-2)}, {"schedule": False, "relative": False}),
        momentum="momentum",
        lr=3e-2,
        mixes=True,
    ),
    Instance(
        optim.FrankWolfe,
        ({}, {"norm": "rows", "betas": (0.9, 0.99)}, {"norm": "frobenius", "betas": (0.0, 0.0), "radius": 5.0}),
        matrices=True,
        momentum="betas",
    ),
    Instance(
        optim.Muon,
        (
            {"precision": "input"},
            {"momentum": 0.0, "nesterov": False, "scale": "original", "precision": "input"},
            {"method": "polar-express", "precision": "input"},
        ),
        matrices=True,
        momentum="momentum",
        lr=3e-2,
    ),
    Instance(
        optim.NorMuon,
        ({"precision": "input"}, {"nesterov": False, "beta2": 0.8, "scale": "original", "precision": "input"}),
        matrices=True,
        momentum="momentum",
        lr=3e-2,
    ),
    Instance(
        optim.AdaMuon,
        ({"precision": "input"}, {"sign": False, "nesterov": False, "beta2": 0.8, "precision": "input"}),
        matrices=True,
        momentum="momentum",
        lr=3e-2,
    ),
    Instance(
        optim.Dion,
        ({}, {"momentum": 0.5, "divisor": 3, "scale": "match_rms_adamw"}),
        matrices=True,
        lr=3e-2,
    ),
    Instance(
        optim.SOAP,  # a gradient of low rank leaves rounding over eps in the other directions
        ({"eps": 1e-3}, {"eps": 1e-3, "betas": (0.0, 0.9), "shampoo_beta": 0.5}),
        matrices=True,
        momentum="betas",
        lr=3e-2,
    ),
    Instance(
        optim.Shampoo,
        ({}, {"betas": (0.0, 0.9), "exponent": 0.5}, {"graft": "adagrad"}),
        matrices=True,
        momentum="betas",
        lr=0.1,
    ),
    Instance(optim.ScheduleFree, ({}, {"beta": 0.5, "lr_power": 0.0}), lr=3e-2),
    Instance(
        optim.PSGDKron,
        ({}, {"beta": 0.0, "fit_rate": 0.5, "refresh": 3}),
        matrices=True,
        momentum="beta",
        lr=3e-2,
    ),
    Instance(
        optim.NaturalGradient, ({}, {"beta": 0.0, "momentum": 0.0}), matrices=True, layers=True, momentum="momentum"
    ),
    Instance(
        optim.EKFAC,
        ({}, {"beta": 0.0, "momentum": 0.0, "refresh": 3}),
        matrices=True,
        layers=True,
        momentum="momentum",
    ),
)
ENTRYWISE = tuple(i for i in INSTANCES if not (i.matrices or i.layers or i.mixes))  # rules that act entry by entry


class Net(nn.Module):
    """Parameters of 0 to 4 dimensions, an empty one, one without gradient, two of the same shape, tied tables.

    By their names those that belong to no layer are biases, so that rules for matrices know what they are.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv2d(1, 2, 2, bias=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused_bias = nn.Parameter(torch.ones(2, 2))
        self.strided_bias = nn.Parameter(torch.arange(6.0).reshape(2, 3).T)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + torch.tanh(self.first(x)) + self.gain * self.second(x)
        y = self.conv(x[:, None]).square().mean() + self.empty.sum() + self.strided_bias.sin().sum() * 0.1
        return self.head(self.norm(x)).square().mean() + y


TOKENS = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 0]])


def net(dtype: torch.dtype = torch.float64, device: str = "cpu") -> Net:
    torch.manual_seed(3)
    return Net(dtype).to(device)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, start: int = 0) -> list[float]:
    losses = []
    for t in range(start, start + steps):
        optimizer.zero_grad()
        loss = model((TOKENS.to(next(model.parameters()).device) + t) % 7)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(a: list[Tensor], b: list[Tensor], tolerance: float = 0.0) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
