"""Optimizers: a state update along training steps, as `torch.optim.Optimizer`."""

if __name__ != "axes.optim":
    raise ImportError("import axes.optim, not optim: the folder is installed as axes.optim")

from axes.optim.base import Optimizer, report
from axes.optim.first_order import SGD, Adam, AdamW, Lion
from axes.optim.general import optimizer
from axes.optim.matrix import Muon, Shampoo
from axes.optim.natural_gradient import ExactNaturalGradient, NaturalGradient
from axes.optim.predicted import ReflectiveMomentum, RotationalMomentum, SignedEG
from axes.optim.routing import Report

# What trains a model of any size; ExactNaturalGradient needs the Fisher matrix of all parameters at once.
ALL: tuple[type[Optimizer], ...] = (
    SGD,
    RotationalMomentum,
    ReflectiveMomentum,
    SignedEG,
    Adam,
    AdamW,
    Lion,
    Muon,
    Shampoo,
    NaturalGradient,
)

__all__ = [
    "ALL",
    "SGD",
    "Adam",
    "AdamW",
    "ExactNaturalGradient",
    "Lion",
    "Muon",
    "NaturalGradient",
    "Optimizer",
    "ReflectiveMomentum",
    "Report",
    "RotationalMomentum",
    "Shampoo",
    "SignedEG",
    "optimizer",
    "report",
]
