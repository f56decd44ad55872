"""What a memory holds, against products written out, and against the laws at widths and loads of their own."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from axes import catalogue
from axes.errors import AxesError
from axes.tasks.capacity import curve, law_of, stored


def _pairs(batch: int, pairs: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    k, v = (normalize(torch.randn(batch, pairs, width, generator=draw, dtype=torch.float64), dim=-1) for _ in range(2))
    return k, v


@pytest.mark.parametrize("name", ["linear-attention-unnormalised", "delta-net", "softmax-attention"])
def test_it_is_what_the_formulas_give(name: str) -> None:
    found = stored(catalogue.get(name).update, 6, 9, batch=4)
    k, v = _pairs(4, 9, 6)
    if name == "softmax-attention":
        read = (6**0.5 * k @ k.mT).softmax(-1) @ v
    else:
        w = torch.zeros(4, 6, 6, dtype=torch.float64)
        for t in range(9):
            error = v[:, t] - (w @ k[:, t, :, None])[..., 0] if name == "delta-net" else v[:, t]
            w = w + error[..., None] * k[:, t, None, :]
        read = k @ w.mT
    along = (read * v).sum(-1, keepdim=True) * v
    error = (read - v).square().sum((1, 2)) / v.square().sum((1, 2))
    assert found.error == pytest.approx(float(error.mean()), rel=1e-9)
    assert found.snr == pytest.approx(float(along.square().sum() / (read - along).square().sum()), rel=1e-9)
    right = [(read[b] @ v[b].T).argmax(-1) == torch.arange(9) for b in range(4)]
    assert found.right == pytest.approx(float(torch.stack(right).double().mean()))


@pytest.mark.parametrize("name", ["linear-attention-unnormalised", "delta-net", "mamba2"])
def test_laws(name: str) -> None:
    for s in curve(catalogue.get(name).update, (24, 48), (0.5, 1.0, 2.0), batch=64):
        assert s.law is not None and s.error == pytest.approx(s.law, rel=0.1)
        if name != "delta-net":
            assert s.snr == pytest.approx(s.width / (s.pairs - 1), rel=0.35)


def test_what_is_not_asked() -> None:
    assert law_of(catalogue.get("titans-matrix").update) is None and law_of(catalogue.get("rls-net").update) is None
    with pytest.raises(AxesError, match="has none"):
        stored(catalogue.get("adam").update, 4, 2)
    with pytest.raises(AxesError, match="at least 1"):
        stored(catalogue.get("delta-net").update, 0, 2)
