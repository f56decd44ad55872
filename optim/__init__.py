"""Optimizers: a state update along training steps, as `torch.optim.Optimizer`."""

if __name__ != "axes.optim":
    raise ImportError("import axes.optim, not optim: the folder is installed as axes.optim")

from axes.optim import convert, wrappers
from axes.optim.adaptive import NAdam
from axes.optim.base import Optimizer
from axes.optim.diagnostics import NoiseScale, UpdateRatios
from axes.optim.ekfac import EKFAC
from axes.optim.exponentiated import ExponentiatedGradient
from axes.optim.first_order import SGD, Adam, AdamW, Lion
from axes.optim.general import optimizer
from axes.optim.matrix import Muon
from axes.optim.natural_gradient import ExactNaturalGradient, NaturalGradient
from axes.optim.normuon import NorMuon
from axes.optim.predicted import ReflectiveMomentum, RotationalMomentum, SignedEG
from axes.optim.psgd import PSGDKron
from axes.optim.regression import NLMS, Hebbian, HuberRegression, LpRegression, RecursiveLeastSquares
from axes.optim.reports import Report, report
from axes.optim.schedule_free import ScheduleFree
from axes.optim.shampoo import Shampoo
from axes.optim.sign import FrankWolfe, SignSGD
from axes.optim.soap import SOAP

# What trains a model of any size; ExactNaturalGradient needs the Fisher matrix of all parameters at once.
ALL: tuple[type[Optimizer], ...] = (
    Hebbian,
    NLMS,
    LpRegression,
    HuberRegression,
    RecursiveLeastSquares,
    SGD,
    RotationalMomentum,
    ReflectiveMomentum,
    SignedEG,
    ExponentiatedGradient,
    Adam,
    AdamW,
    NAdam,
    SignSGD,
    Lion,
    FrankWolfe,
    Muon,
    NorMuon,
    Shampoo,
    SOAP,
    PSGDKron,
    NaturalGradient,
    EKFAC,
    ScheduleFree,
)

__all__ = [
    "ALL",
    "Adam",
    "AdamW",
    "EKFAC",
    "ExactNaturalGradient",
    "ExponentiatedGradient",
    "FrankWolfe",
    "Hebbian",
    "HuberRegression",
    "Lion",
    "LpRegression",
    "Muon",
    "NAdam",
    "NLMS",
    "NaturalGradient",
    "NoiseScale",
    "NorMuon",
    "Optimizer",
    "PSGDKron",
    "RecursiveLeastSquares",
    "ReflectiveMomentum",
    "Report",
    "RotationalMomentum",
    "SGD",
    "SOAP",
    "ScheduleFree",
    "Shampoo",
    "SignSGD",
    "SignedEG",
    "UpdateRatios",
    "convert",
    "optimizer",
    "report",
    "wrappers",
]
