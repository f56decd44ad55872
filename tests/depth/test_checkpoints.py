"""Maps between DeepSeek's state dicts of hyper-connections and ours: the same numbers, and the same function."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from axes.depth import MHC, RELEASED_EPS
from axes.depth.checkpoints import from_deepseek, to_deepseek
from axes.errors import AxesError, ShapeError

N, D = 4, 6
LAYER = {"fn": (N * (N + 2), N * D), "base": (N * (N + 2),), "scale": (3,)}
HEAD = {"hc_fn": (N, N * D), "hc_base": (N,), "hc_scale": (1,)}
with_head = pytest.mark.parametrize("shapes", [LAYER, LAYER | HEAD], ids=["sublayer", "with head"])


def checkpoint(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def mixer(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> MHC:
    exit = "per-token" if "hc_fn" in shapes else False
    return MHC(D, 1, N, eps=RELEASED_EPS, learned_reduce=exit, dtype=dtype)


@with_head
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_number_comes_through_and_back(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    theirs, m = checkpoint(shapes, dtype), mixer(shapes, dtype)
    assert list(m.load_state_dict(from_deepseek(theirs))) == [[], []]  # strict: names and shapes
    seen = torch.cat([p.detach().flatten() for p in m.parameters()]).sort().values  # each number once
    assert torch.equal(seen, torch.cat([x.flatten() for x in theirs.values()]).sort().values)
    back = to_deepseek(m.state_dict())
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], x) and back[name].shape == x.shape for name, x in theirs.items())
    again = from_deepseek(back)
    assert all(torch.equal(again[name], x) for name, x in m.state_dict().items())


def test_the_mixer_is_the_released_modules_function() -> None:
    """The module as released, with the mixing matrix's first index for the source; streams leave through its head."""
    theirs, m = checkpoint(LAYER | HEAD, torch.float64), mixer(LAYER | HEAD, torch.float64)
    m.load_state_dict(from_deepseek(theirs))
    x, y = torch.randn(2, 3, N, D, dtype=torch.float64), torch.randn(2, 3, D, dtype=torch.float64)
    hat = x.flatten(-2) / (x.flatten(-2).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    pre, post, comb = linear(hat, theirs["fn"]).split([N, N, N * N], -1)
    a, b, c = theirs["base"].split([N, N, N * N])
    pre = torch.sigmoid(pre * theirs["scale"][0] + a) + 1e-6
    post = 2 * torch.sigmoid(post * theirs["scale"][1] + b)
    comb = (comb * theirs["scale"][2] + c).unflatten(-1, (N, N)).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    seen, coefficients = m.read(x)
    torch.testing.assert_close(seen, (pre[..., None] * x).sum(-2), rtol=0, atol=1e-12)
    new = m.write(x, y, coefficients)
    expected = post[..., None] * y[..., None, :] + (comb[..., None] * x[..., None, :]).sum(-3)
    torch.testing.assert_close(new, expected, rtol=0, atol=1e-12)
    shares = torch.sigmoid(linear(hat, theirs["hc_fn"]) * theirs["hc_scale"] + theirs["hc_base"]) + 1e-6
    torch.testing.assert_close(m.reduce(x), (shares[..., None] * x).sum(-2), rtol=0, atol=1e-12)


@with_head
def test_refusals(shapes: dict[str, tuple[int, ...]]) -> None:
    theirs = checkpoint(shapes)
    ours = from_deepseek(theirs)
    for turn, state in ((from_deepseek, theirs), (to_deepseek, ours)):
        for name, x in state.items():
            others = {other: y for other, y in state.items() if other != name}
            with pytest.raises(AxesError, match=rf"mhc: no {re.escape(name)}\. A state dict has "):
                turn(others)
            with pytest.raises(ShapeError, match=rf"mhc: {name} must"):
                turn({**state, name: x[None]})
        with pytest.raises(AxesError, match=r"mhc: no counterpart of weight\. A state dict has"):
            turn({**state, "weight": torch.ones(2)})
    with pytest.raises(ShapeError, match=r"mhc: fn must have n \(n \+ 2\) rows for n >= 2 streams, got 23"):
        from_deepseek({**theirs, "fn": theirs["fn"][:-1]})
    with pytest.raises(ShapeError, match="mhc: fn must have n d columns for n = 4 streams, got 23"):
        from_deepseek({**theirs, "fn": theirs["fn"][:, :-1]})
    with pytest.raises(ShapeError, match=r"mhc: base must be \(coefficients = 24\), got \(23,\)"):
        from_deepseek({**theirs, "base": theirs["base"][:-1]})
    if shapes is not LAYER:
        with pytest.raises(ShapeError, match=r"mhc: hc_base must be \(streams = 4\), got \(3,\)"):
            from_deepseek({**theirs, "hc_base": theirs["hc_base"][:-1]})


def test_the_exit_that_every_token_moves() -> None:
    m = MHC(D, 0, N, learned_reduce="per-token", dtype=torch.float64)
    x = torch.randn(2, 3, N, D, dtype=torch.float64)
    torch.testing.assert_close(m.reduce(x), x.mean(-2), rtol=0, atol=1e-14)  # the start
    torch.nn.init.normal_(m.exit_phi)
    (m.reduce(x) * torch.randn(2, 3, D, dtype=torch.float64)).sum().backward()
    for p in (m.exit, m.exit_phi, m.exit_alpha):
        assert p is not None and p.grad is not None and bool((p.grad != 0).any())
    assert {id(p) for p in m.dynamic_parameters()} == {id(m.phi), id(m.exit_phi)}
    with pytest.raises(ShapeError, match="MHC: learned_reduce must be False, True or 'per-token', got 'dynamic'"):
        MHC(D, learned_reduce="dynamic")


def test_the_example_of_the_page_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "depth.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "docs/depth.md", "exec"), {"__name__": "page"})
