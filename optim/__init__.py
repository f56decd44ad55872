"""Optimizers: a state update along training steps, as `torch.optim.Optimizer`."""

if __name__ != "axes.optim":
    raise ImportError("import axes.optim, not optim: the folder is installed as axes.optim")

import sys
from typing import Any

from axes.optim.elsewhere import elsewhere
from axes.optim.engine.base import Optimizer
from axes.optim.engine.reports import Report, report
from axes.optim.rules import wrappers
from axes.optim.rules.adafactor import Adafactor
from axes.optim.rules.adamuon import AdaMuon
from axes.optim.rules.adaptive import Adamax, AMSGrad, NAdam, RAdam
from axes.optim.rules.averaged import ASGD
from axes.optim.rules.dion import Dion
from axes.optim.rules.ekfac import EKFAC
from axes.optim.rules.exponentiated import ExponentiatedGradient
from axes.optim.rules.first_order import SGD, Adam, AdamW, Lion
from axes.optim.rules.general import optimizer
from axes.optim.rules.layerwise import LAMB, LARS
from axes.optim.rules.matrix import Muon
from axes.optim.rules.mixtures import MARS, QHM, AdEMAMix, QHAdam
from axes.optim.rules.natural_gradient import ExactNaturalGradient, NaturalGradient
from axes.optim.rules.normalised_first import ADOPT, LaProp
from axes.optim.rules.normuon import NorMuon
from axes.optim.rules.predicted import ReflectiveMomentum, RotationalMomentum, SignedEG
from axes.optim.rules.prodigy import Prodigy
from axes.optim.rules.psgd import PSGDKron
from axes.optim.rules.regression import NLMS, Hebbian, HuberRegression, LpRegression, RecursiveLeastSquares
from axes.optim.rules.root_mean_square import Adadelta, Adagrad, RMSprop
from axes.optim.rules.schedule_free import ScheduleFree
from axes.optim.rules.shampoo import Shampoo
from axes.optim.rules.sign import FrankWolfe, SignSGD
from axes.optim.rules.soap import SOAP
from axes.optim.tools import convert
from axes.optim.tools.diagnostics import NoiseScale, UpdateRatios

# What trains a model of any size; ExactNaturalGradient needs the Fisher matrix of all parameters at once.
ALL: tuple[type[Optimizer], ...] = (
    Hebbian,
    NLMS,
    LpRegression,
    HuberRegression,
    RecursiveLeastSquares,
    SGD,
    QHM,
    ASGD,
    RotationalMomentum,
    ReflectiveMomentum,
    SignedEG,
    ExponentiatedGradient,
    RMSprop,
    Adagrad,
    Adadelta,
    Adam,
    AdamW,
    AMSGrad,
    Adamax,
    NAdam,
    RAdam,
    QHAdam,
    AdEMAMix,
    LaProp,
    ADOPT,
    MARS,
    Prodigy,
    SignSGD,
    Lion,
    LARS,
    LAMB,
    Adafactor,
    FrankWolfe,
    Muon,
    NorMuon,
    AdaMuon,
    Dion,
    Shampoo,
    SOAP,
    PSGDKron,
    NaturalGradient,
    EKFAC,
    ScheduleFree,
)



def __getattr__(name: str) -> Any:
    """Names that people look for and that are no class here say where what they mean is."""
    said = elsewhere(name)
    if said:
        raise AttributeError(f"axes.optim has no {name}: {said}")
    raise AttributeError(f"axes.optim has no {name}", name=name, obj=sys.modules[__name__])  # Python names the nearest


__all__ = [
    "ADOPT",
    "AMSGrad",
    "ASGD",
    "AdEMAMix",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "LaProp",
    "MARS",
    "QHAdam",
    "QHM",
    "RAdam",
    "RMSprop",
    "ALL",
    "AdaMuon",
    "Adafactor",
    "Adam",
    "AdamW",
    "Dion",
    "EKFAC",
    "ExactNaturalGradient",
    "ExponentiatedGradient",
    "FrankWolfe",
    "Hebbian",
    "HuberRegression",
    "LAMB",
    "LARS",
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
    "Prodigy",
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
