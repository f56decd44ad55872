"""Published rules that are no class here, by the names that people look for: what says them, or why no tuple does."""

from __future__ import annotations

from axes.errors import plain

ELSEWHERE: dict[str, str] = {
    "MuonClip": (
        "it is Muon with the wrapper query_key_clip: optimizer(wrappers.query_key_clip(Muon.declare())), with the "
        "projections to queries and keys as groups; group['kept'] = wrappers.head_factors(logits, rows) before a step"
    ),
    "Grokfast": "it wraps any rule: optimizer(wrappers.grokfast(AdamW.declare())), or wrappers.grokfast_window",
    "Cautious": "it wraps any rule: optimizer(wrappers.cautious(AdamW.declare()))",
    "Rprop": (
        "no tuple says it: its step size is a product of factors that depend on the sign of a gradient times the last "
        "one, which it forgets where they differ, so that a drive depends on the last drive and is no linear filter. "
        "torch.optim.Rprop has it; rules of signs here are SignSGD and Lion"
    ),
    "LBFGS": (
        "no tuple says it: it searches along a line and asks for the loss several times a step. torch.optim.LBFGS has "
        "it; rules with curvature here are SOAP, Shampoo, PSGDKron, EKFAC and NaturalGradient"
    ),
    "SparseAdam": (
        "gradients are dense here: construct nn.Embedding with sparse=False and take Adam, or torch.optim.SparseAdam"
    ),
}


def elsewhere(name: str) -> str | None:
    """What to say of a name that is no class here, or None."""
    return {plain(known): text for known, text in ELSEWHERE.items()}.get(plain(name))


__all__ = ["ELSEWHERE", "elsewhere"]
