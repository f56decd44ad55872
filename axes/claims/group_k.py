"""Group K: empirical and external statements, listed with the reason why no check here decides them."""

from __future__ import annotations

from axes.claims.base import untestable
from axes.claims.sources import BLOG, SLIDES

K01 = untestable(
    "K01",
    "The reported perplexities, recall, state-tracking accuracies and throughputs of trained models are as printed.",
    SLIDES("result tables and figures"),
    "measurements of models trained elsewhere; repeating them is an experiment, not a check",
)
K02 = untestable(
    "K02",
    "Deployed hybrids mix 7/8 linear with 1/8 softmax layers, and kernels use chunks of 64 to 256 tokens.",
    SLIDES("hybrids in production; chunk sizes"),
    "a fact about deployments, outside this package",
)
K03 = untestable(
    "K03",
    "Attention over layers saves about a fifth of the compute, and most of the gradient norm is lost in the output "
    "head.",
    BLOG("The depth axis; The data axis, gradient transmission"),
    "gains reported for trained models; the part about random matrices is claim H17",
)

CLAIMS = (K01, K02, K03)
