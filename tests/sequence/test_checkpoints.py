"""Maps between fla's state dicts and ours: names and shapes as in fla 0.6.0's sources, written out here by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid, rms_norm, silu, softplus

from axes.errors import AxesError, ShapeError, UnknownName
from axes.sequence import ALL, GatedDeltaNet, Mamba2, RetNet, SequenceLayer
from axes.sequence.checkpoints import TABLES, from_fla, to_fla

BY_NAME: dict[str, type[SequenceLayer]] = {cls.name: cls for cls in ALL}
D, H, K, V = 64, 2, 16, 32  # model, heads, widths of a key and a value
DELTA = {
    "q_proj.weight": (H * K, D), "k_proj.weight": (H * K, D), "v_proj.weight": (H * V, D), "b_proj.weight": (H, D),
    "q_conv1d.weight": (H * K, 1, 4), "k_conv1d.weight": (H * K, 1, 4), "v_conv1d.weight": (H * V, 1, 4),
    "o_norm.weight": (V,), "o_proj.weight": (D, H * V),
}  # fmt: skip
PLAIN = {n: (D, D) for n in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")}
INNER = H * V + 2 * K  # channels of Mamba-2's convolution
FLA: dict[str, dict[str, tuple[int, ...]]] = {
    "delta-net": DELTA,
    "delta-net-reflective": DELTA,
    "gated-delta-net": {**DELTA, "g_proj.weight": (H * V, D), "a_proj.weight": (H, D), "dt_bias": (H,), "A_log": (H,)},
    "gla": {
        "q_proj.weight": (H * K, D), "k_proj.weight": (H * K, D), "v_proj.weight": (H * V, D),
        "g_proj.weight": (H * V, D), "gk_proj.0.weight": (16, D), "gk_proj.1.weight": (H * K, 16),
        "gk_proj.1.bias": (H * K,), "o_proj.weight": (D, H * V), "g_norm_swish_gate.weight": (V,),
    },
    "retnet": {
        "q_proj.weight": (H * K, D), "k_proj.weight": (H * K, D), "v_proj.weight": (H * V, D),
        "g_proj.weight": (H * V, D), "o_proj.weight": (D, H * V), "g_norm_swish_gate.weight": (V,),
    },
    "mamba2": {
        "dt_bias": (H,), "A_log": (H,), "D": (H,), "conv1d.weight": (INNER, 1, 4), "conv1d.bias": (INNER,),
        "in_proj.weight": (H * V + INNER + H, D), "norm.weight": (H * V,), "out_proj.weight": (D, H * V),
    },
    "rwkv7": {
        **{f"x_{n}": (1, 1, D) for n in "rwkvag"},
        **{f"{n}_proj.weight": (D, D) for n in "rkvo"},
        "k_k": (D,), "k_a": (D,), "r_k": (H, D // H), "g_norm.weight": (D,), "g_norm.bias": (D,),
        **{f"{n}_lora.lora.0.weight": (32, D) for n in "wag"}, **{f"{n}_lora.lora.2.weight": (D, 32) for n in "wag"},
        "w_lora.lora.2.bias": (D,), "a_lora.lora.2.bias": (D,),
    },
    "rope": PLAIN,
    "fox": {**PLAIN, "f_proj.weight": (H, D), "f_proj.bias": (H,)},
    "path": {
        **PLAIN, "w_proj.0.weight": (32, D), "w_proj.1.weight": (D, 32), "w_conv1d.weight": (D, 1, 3),
        "bt_proj.weight": (H, D), "bt_proj.bias": (H,),
    },
}  # fmt: skip
WIDE = {"rwkv7", "rope", "fox", "path"}  # heads of D / H

every = pytest.mark.parametrize("name", FLA)


def checkpoint(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {n: torch.randn(shape, dtype=dtype) for n, shape in FLA[name].items()}


def layer(name: str, dtype: torch.dtype = torch.float32) -> SequenceLayer:
    widths = {} if name in WIDE else {"d_k": K, "d_v": V}
    return BY_NAME[name](D, heads=H, dtype=dtype, **widths)


def heads(name: str) -> int | None:
    return H if name == "rope" else None


@every
def test_every_parameter_is_filled_once_and_comes_back(name: str) -> None:
    theirs, m = checkpoint(name), layer(name)
    ours = from_fla(name, theirs, heads(name))
    assert list(m.load_state_dict(ours)) == [[], []]  # strict: names and shapes
    assert sum(x.numel() for x in theirs.values()) == sum(p.numel() for p in m.parameters())
    places = [x.untyped_storage().data_ptr() for x in theirs.values()]
    assert len(set(places)) == len(places)
    seen = torch.cat([p.detach().abs().flatten() for p in m.parameters()]).sort().values  # each number once
    assert torch.equal(seen, torch.cat([x.abs().flatten() for x in theirs.values()]).sort().values)
    back = to_fla(name, m.state_dict(), heads(name))
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[n], x) and back[n].shape == x.shape for n, x in theirs.items())
    again = from_fla(name, back, heads(name))
    assert all(torch.equal(again[n], x) for n, x in m.state_dict().items())


@every
def test_refusals(name: str) -> None:
    theirs, given = checkpoint(name), {"heads": heads(name)}
    for n in theirs:
        with pytest.raises(AxesError, match=rf"{name}: no {re.escape(n)}\."):
            from_fla(name, {m: x for m, x in theirs.items() if m != n}, **given)
        with pytest.raises(ShapeError, match=re.escape(name)):
            from_fla(name, {**theirs, n: theirs[n][None]}, **given)
    with pytest.raises(AxesError, match=f"{name}: no counterpart of q_conv1d.bias"):
        from_fla(name, {**theirs, "q_conv1d.bias": torch.ones(3)}, **given)
    ours = from_fla(name, theirs, **given)
    for n in ours:
        with pytest.raises(AxesError, match=rf"{name}: no {re.escape(n)}\."):
            to_fla(name, {m: x for m, x in ours.items() if m != n}, **given)
    with pytest.raises(AxesError, match=f"{name}: no counterpart of around.more"):
        to_fla(name, {**ours, "around.more": torch.ones(3)}, **given)


def test_what_does_not_correspond() -> None:
    shared = {f"g_proj.{n}": torch.ones(2) for n in ("0.weight", "1.weight", "1.bias")}
    with pytest.raises(AxesError, match="g_proj.0.weight, g_proj.1.weight, g_proj.1.bias: fla's output gate is two"):
        from_fla("kda", {n: torch.ones(2) for n in DELTA} | shared)
    with pytest.raises(AxesError, match="no counterpart of around.g_proj.weight"):
        to_fla("kda", layer("kda").state_dict())
    with pytest.raises(AxesError, match="v_lora.lora.0.weight: values of the first layer"):
        from_fla("rwkv7", checkpoint("rwkv7") | {"v_lora.lora.0.weight": torch.ones(2)})
    with pytest.raises(AxesError, match="g_proj.weight: the layer has no output gate"):
        from_fla("delta-net", checkpoint("delta-net") | {"g_proj.weight": torch.ones(2)})
    with pytest.raises(AxesError, match="which 'rope' does"):
        from_fla("softmax-attention", {})
    with pytest.raises(UnknownName, match="layer with a map between fla and"):
        to_fla("titans", {})
    with pytest.raises(ShapeError, match="rope: a state dict does not tell the number of heads"):
        from_fla("rope", checkpoint("rope"))
    with pytest.raises(ShapeError, match="rope: 64 rows are not heads=3 of even width"):
        from_fla("rope", checkpoint("rope"), 3)
    with pytest.raises(AxesError, match="fla's are log"):
        ours = from_fla("retnet", checkpoint("retnet"))
        to_fla("retnet", {n: x * 2 if n.endswith("value") else x for n, x in ours.items()})
    wrong = checkpoint("gla") | {"v_proj.weight": torch.ones(H * V + 1, D)}
    with pytest.raises(ShapeError, match=r"gla: o_proj.weight must be \(model = 64, values = 65\), got \(64, 64\)"):
        from_fla("gla", wrong)
    assert set(TABLES) == {*FLA, "kda"}


# ---- the same function: fla's layers as their sources say, token by token -------------------------------------------


def _close(name: str, theirs: dict[str, Tensor], x: Tensor, want: Tensor) -> None:
    m = layer(name, torch.float64)
    m.load_state_dict(from_fla(name, theirs, heads(name)))
    torch.testing.assert_close(m(x)[0], want, rtol=1e-9, atol=1e-9)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    return silu(sum(weight[:, 0, j] * padded[:, j : j + x.shape[1]] for j in range(4)) + bias)


def _turn(x: Tensor) -> Tensor:
    """fla's rotary embedding of (B, T, H, K): token t forward by t 10000^(-2j/K)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10000 ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def test_retnet_computes_what_flas_does() -> None:
    p, x, T = checkpoint("retnet", torch.float64), torch.randn(2, 7, D, dtype=torch.float64), 7
    q, k = (_turn(linear(x, p[f"{n}_proj.weight"]).unflatten(-1, (H, K))) for n in "qk")
    v = linear(x, p["v_proj.weight"]).unflatten(-1, (H, V))
    age = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    fade = (1 - 2.0 ** (-5 - torch.arange(H, dtype=x.dtype)))[:, None, None] ** age
    scores = torch.einsum("bthk,bshk->bhts", q, k) * K**-0.5 * fade
    o = torch.einsum("bhts,bshv->bthv", scores.tril(), v)
    o = rms_norm(o, (V,), p["g_norm_swish_gate.weight"], 1e-5)
    o = (o * silu(linear(x, p["g_proj.weight"]).unflatten(-1, (H, V)))).flatten(-2)
    _close("retnet", p, x, linear(o, p["o_proj.weight"]))


def test_rope_computes_what_flas_attention_does() -> None:
    p, x = checkpoint("rope", torch.float64), torch.randn(2, 7, D, dtype=torch.float64)
    q, k, v = (linear(x, p[f"{n}_proj.weight"]).unflatten(-1, (H, -1)) for n in "qkv")
    q, k, v = (z.transpose(1, 2) for z in (_turn(q), _turn(k), v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    _close("rope", p, x, linear(o.transpose(1, 2).flatten(-2), p["o_proj.weight"]))


def test_gated_delta_net_computes_what_flas_does() -> None:
    p, x = checkpoint("gated-delta-net", torch.float64), torch.randn(2, 7, D, dtype=torch.float64)
    q, k, v = (_convolved(linear(x, p[f"{n}_proj.weight"]), p[f"{n}_conv1d.weight"]) for n in "qkv")
    q, k = (z.unflatten(-1, (H, K)) for z in (q, k))
    q, k, v = q / q.norm(dim=-1, keepdim=True) * K**-0.5, k / k.norm(dim=-1, keepdim=True), v.unflatten(-1, (H, V))
    a = torch.exp(-p["A_log"].exp() * softplus(linear(x, p["a_proj.weight"]) + p["dt_bias"]))
    beta = torch.sigmoid(linear(x, p["b_proj.weight"]))
    state, outs = torch.zeros(2, H, V, K, dtype=x.dtype), []
    for t in range(7):
        state = a[:, t, :, None, None] * state
        wrong = v[:, t] - torch.einsum("bhvk,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhv,bhk->bhvk", beta[:, t], wrong, k[:, t])
        outs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    o = rms_norm(torch.stack(outs, 1), (V,), p["o_norm.weight"], 1e-5)
    o = (o * silu(linear(x, p["g_proj.weight"]).unflatten(-1, (H, V)))).flatten(-2)
    _close("gated-delta-net", p, x, linear(o, p["o_proj.weight"]))


def test_gla_computes_what_flas_does() -> None:
    p, x = checkpoint("gla", torch.float64), torch.randn(2, 7, D, dtype=torch.float64)
    q, k, v = (linear(x, p[f"{n}_proj.weight"]).unflatten(-1, (H, -1)) for n in "qkv")
    gate = logsigmoid(linear(linear(x, p["gk_proj.0.weight"]), p["gk_proj.1.weight"], p["gk_proj.1.bias"])) / 16
    gate, state, outs = gate.unflatten(-1, (H, K)).exp(), torch.zeros(2, H, V, K, dtype=x.dtype), []
    for t in range(7):
        state = state * gate[:, t, :, None] + v[:, t, ..., None] * k[:, t, :, None]
        outs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t] * K**-0.5))
    o = rms_norm(torch.stack(outs, 1), (V,), p["g_norm_swish_gate.weight"], 1e-5)
    o = (o * silu(linear(x, p["g_proj.weight"]).unflatten(-1, (H, V)))).flatten(-2)
    _close("gla", p, x, linear(o, p["o_proj.weight"]))


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_computes_what_flas_does(groups: int) -> None:
    """In mamba_ssm's and fla's rows: z, x, B, C, dt; the norm over a group's channels."""
    channels = H * V + 2 * groups * K
    shapes = FLA["mamba2"] | {
        "conv1d.weight": (channels, 1, 4), "conv1d.bias": (channels,), "in_proj.weight": (H * V + channels + H, D),
    }  # fmt: skip
    p = {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()}
    x = torch.randn(2, 7, D, dtype=torch.float64)
    z, mixed, dt = linear(x, p["in_proj.weight"]).split((H * V, channels, H), -1)
    mixed = _convolved(mixed, p["conv1d.weight"], p["conv1d.bias"])
    v, b, c = mixed.split((H * V, groups * K, groups * K), -1)
    b, c = (y.unflatten(-1, (groups, K)).repeat_interleave(H // groups, 2) for y in (b, c))
    v, dt = v.unflatten(-1, (H, V)), softplus(dt + p["dt_bias"])
    gate, state, outs = torch.exp(-p["A_log"].exp() * dt), torch.zeros(2, H, V, K, dtype=x.dtype), []
    for t in range(7):
        wrote = torch.einsum("bh,bhv,bhk->bhvk", dt[:, t], v[:, t], b[:, t])
        state = gate[:, t, :, None, None] * state + wrote
        outs.append(torch.einsum("bhvk,bhk->bhv", state, c[:, t]) + p["D"][:, None] * v[:, t])
    y = (torch.stack(outs, 1).flatten(-2) * silu(z)).unflatten(-1, (groups, -1))
    y = rms_norm(y, y.shape[-1:], eps=1e-5).flatten(-2) * p["norm.weight"]
    m = Mamba2(D, heads=H, d_k=K, d_v=V, block=replace(Mamba2.block, groups=groups), dtype=torch.float64)
    m.load_state_dict(from_fla("mamba2", p))
    torch.testing.assert_close(m(x)[0], linear(y, p["out_proj.weight"]), rtol=1e-9, atol=1e-9)


def test_shared_keys_come_along() -> None:
    """fla's num_v_heads: more rates and values than keys."""
    m = GatedDeltaNet(D, heads=H, d_k=K, d_v=V, num_v_heads=2 * H)
    theirs = to_fla("gated-delta-net", m.state_dict())
    assert theirs["q_proj.weight"].shape == (H * K, D) and theirs["b_proj.weight"].shape == (2 * H, D)
    assert theirs["v_conv1d.weight"].shape == (2 * H * V, 1, 4)
    assert all(torch.equal(x, m.state_dict()[n]) for n, x in from_fla("gated-delta-net", theirs).items())


def test_precision_is_the_checkpoints() -> None:
    ours = from_fla("retnet", checkpoint("retnet", torch.bfloat16))
    assert {x.dtype for x in ours.values()} == {torch.bfloat16}
    RetNet(D, heads=H, d_k=K, d_v=V, dtype=torch.bfloat16).load_state_dict(ours)
