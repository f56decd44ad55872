"""Our operators behind the names of flash-linear-attention and transformers: the same numbers, and back again."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from axes.errors import AxesError
from axes.integrations import fla
from axes.integrations.fla import PassedOn, accelerate

ROOT = Path(__file__).resolve().parents[2]
B, T, H, K, V = 2, 9, 2, 4, 3


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def loop(step: Callable[..., Tensor], a: dict[str, Any], scale: float) -> tuple[Tensor, Tensor]:
    """o_t = scale q_t S_t, S_t = step(S_{t-1}, t) of states (B, H, K, V): the papers' formulas, a token at a time."""
    state, outputs = a["initial_state"], []
    for t in range(a["v"].shape[1]):
        at = {n: x[:, t] for n, x in a.items() if isinstance(x, Tensor) and x.ndim > 2 and n != "initial_state"}
        state = step(state, at)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", at.get("q", at.get("r")), state))
    return torch.stack(outputs, 1), state


def outer(k: Tensor, v: Tensor) -> Tensor:
    return k[..., :, None] * v[..., None, :]


def erased(s: Tensor, x: dict[str, Tensor]) -> Tensor:
    error = x["v"] - torch.einsum("bhk,bhkv->bhv", x["k"], s)
    return s + outer(x["k"], x["beta"][..., None] * error)


def moved(s: Tensor, x: dict[str, Tensor]) -> Tensor:
    return s + outer(x["b"], torch.einsum("bhk,bhkv->bhv", x["a"], s)) + outer(x["k"], x["v"])


def dplr(gate: str) -> Callable[..., Tensor]:
    def step(s: Tensor, x: dict[str, Tensor]) -> Tensor:
        read = outer(x["b"], torch.einsum("bhk,bhkv->bhv", x["a"], s))
        return x[gate].exp()[..., None] * s + read + outer(x["k"], x["v"])

    return step


def scalar(s: Tensor, x: dict[str, Tensor]) -> Tensor:
    return x["g"].exp()[..., None, None] * s


STEPS: dict[str, Callable[..., Tensor]] = {
    "delta_rule": erased,
    "gated_delta_rule": lambda s, x: erased(scalar(s, x), x),
    "kda": lambda s, x: erased(x["g"].exp()[..., None] * s, x),
    "gla": lambda s, x: x.get("g", x.get("gk")).exp()[..., None] * s + outer(x["k"], x["v"]),  # type: ignore[union-attr]
    "simple_gla": lambda s, x: scalar(s, x) + outer(x["k"], x["v"]),
    "retention": lambda s, x: (1 - 2.0 ** (-5 - torch.arange(H)))[:, None, None] * s + outer(x["k"], x["v"]),
    "linear_attn": lambda s, x: s + outer(x["k"], x["v"]),
    "rwkv7": dplr("w"),
    "dplr_delta_rule": dplr("gk"),
    "iplr_delta_rule": moved,
}


def arguments(name: str, taken: tuple[str, ...]) -> dict[str, Any]:
    """Inputs of an entry, in float64."""
    k = normalize(draw(B, T, H, K), dim=-1)
    a: dict[str, Any] = {"q": draw(B, T, H, K), "k": k, "v": draw(B, T, H, V), "initial_state": draw(B, H, K, V)}
    wide = "gla" in name and "simple" not in name or "kda" in name
    made = {
        "beta": draw(B, T, H).sigmoid(),
        "g": logsigmoid(draw(B, T, H, K) if wide else draw(B, T, H)),
        "gk": logsigmoid(draw(B, T, H, K)),
        "w": logsigmoid(draw(B, T, H, K)),
        "a": normalize(draw(B, T, H, K), dim=-1),
        "b": -0.5 * k,
    }
    a.update({n: x for n, x in made.items() if n in taken})
    if "r" in taken:
        a["r"] = a.pop("q")
    return a


def stand_in(entry: fla.Entry) -> Any:
    """A function of the entry's arguments that must not be called."""
    names = ["r" if n == "q" and "r" in entry.takes else n for n in ("q", "k", "v")]
    names += [n for n in entry.takes if n not in names]
    options = {"scale": None, "initial_state": None, "output_final_state": False, "cu_seqlens": None, "reverse": False}
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None) for n in names]
    parameters += [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=x) for n, x in options.items()]
    parameters += [inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD)]

    def original(*args: Any, **kwargs: Any) -> Any:
        return "the original"

    original.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return original


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that stands for fla.ops, and one that has imported from it."""
    package, module, user = types.ModuleType("fla"), types.ModuleType("fla.ops"), types.ModuleType("a_users_module")
    for entry in fla.ENTRIES:
        setattr(module, entry.name, stand_in(entry))
    user.__dict__["renamed"] = vars(module)["chunk_gated_delta_rule"]
    for each in (package, module, user):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: True if name == "fla" else found(name, *a))
    return module


NAMED = [e for e in fla.ENTRIES if "attn" not in e.name or "linear" in e.name]


def rule(entry: fla.Entry) -> Callable[..., Tensor]:
    return STEPS[re.sub("^(fused_)?(chunk|recurrent)_", "", entry.name)]


@pytest.mark.parametrize("entry", NAMED, ids=lambda e: e.name)
def test_every_name_computes_its_formula(entry: fla.Entry, ops: types.ModuleType) -> None:
    a = arguments(entry.name, entry.takes)
    tensors = {n: x.requires_grad_() for n, x in a.items()}
    with accelerate() as ours:
        call = vars(ops)[entry.name]
        options = {"normalize": False} if "linear" in entry.name else {}
        got, state = call(**a, scale=0.7, output_final_state=True, **options)
        wanted, last = loop(rule(entry), a, 0.7)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-9)
        weights = draw(*got.shape), draw(*state.shape)
        sums = [
            sum((x * w).sum() for x, w in zip(pair, weights, strict=True)) for pair in ((got, state), (wanted, last))
        ]
        for x, y in zip(*(torch.autograd.grad(s, [*tensors.values()]) for s in sums), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-8)
        out, none = call(**{n: x[:, :1] if n != "initial_state" else x for n, x in a.items()})  # a token, usual scale
        torch.testing.assert_close(out, wanted[:, :1] / 0.7 / K**0.5, rtol=1e-9, atol=1e-9)
        assert none is None and ours.computed[entry.name] == 2 and not ours.passed


def test_packed_sequences_and_options(ops: types.ModuleType) -> None:
    a = arguments("gated_delta_rule", ("beta", "g"))
    a["k"], a["initial_state"] = draw(B, T, H, K), draw(B, H, K, V)
    packed = {n: x.flatten(0, 1)[None] for n, x in a.items() if n != "initial_state"}
    with accelerate():
        call = vars(ops)["chunk_gated_delta_rule"]
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, state = call(**a, **options)
        cu = torch.tensor([0, T, 2 * T])
        got, after = call(**packed, initial_state=a["initial_state"], cu_seqlens=cu, **options)
        torch.testing.assert_close(got.view_as(out), out)
        torch.testing.assert_close(after, state)
        turned = call(**{**a, "initial_state": a["initial_state"].mT}, state_v_first=True, **options)[1]
        torch.testing.assert_close(turned.mT, state)
        raw = {**a, "beta": a["beta"].logit()}
        again = call(**raw, use_beta_sigmoid_in_kernel=True, **options)[0]
        torch.testing.assert_close(again, out)
    unit = {n: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if n in "qk" else x for n, x in a.items()}
    torch.testing.assert_close(out, loop(STEPS["gated_delta_rule"], unit, K**-0.5)[0])


def test_values_of_several_heads_share_a_key(ops: types.ModuleType) -> None:
    a = arguments("gated_delta_rule", ("beta", "g"))
    few = {**a, "q": a["q"][:, :, :1], "k": a["k"][:, :, :1]}
    many = {**a, "q": few["q"].expand(B, T, H, K), "k": few["k"].expand(B, T, H, K)}
    with accelerate():
        call = vars(ops)["chunk_gated_delta_rule"]
        torch.testing.assert_close(call(**few)[0], call(**many)[0])


def test_forgetting_attention(ops: types.ModuleType) -> None:
    q, k, v, g = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), logsigmoid(draw(B, T, H))
    total = g.cumsum(1).transpose(1, 2)
    scores = 0.3 * torch.einsum("bihk,bjhk->bhij", q, k) + total[..., :, None] - total[..., None, :]
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    with accelerate():
        call = vars(ops)["parallel_forgetting_attn"]
        torch.testing.assert_close(
            call(q, k, v, g, scale=0.3), torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v), rtol=1e-9, atol=1e-9
        )
        cu = torch.tensor([0, T, 2 * T])
        flat = call(*(x.flatten(0, 1)[None] for x in (q, k, v, g)), cu_seqlens=cu)
        torch.testing.assert_close(flat.view(B, T, H, V), call(q, k, v, g))


def test_what_has_no_meaning_here_is_the_originals(ops: types.ModuleType) -> None:
    a = arguments("gla", ("gk",))
    with accelerate() as ours:
        call = vars(ops)["fused_recurrent_gla"]
        with pytest.warns(PassedOn, match="fused_recurrent_gla is the original's: reverse is given"):
            assert call(**a, reverse=True) == "the original"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call(**a, reverse=True) == "the original"  # told once
        with pytest.warns(PassedOn, match="gv is given"):
            assert call(**a, gv=a["gk"]) == "the original"
        assert ours.passed["fused_recurrent_gla", "reverse is given"] == 2 and not ours.computed
        assert "fused_recurrent_gla: 2 calls passed on, reverse is given" in str(ours)


def test_names_are_replaced_where_they_were_imported_and_put_back(ops: types.ModuleType) -> None:
    user = sys.modules["a_users_module"]
    before = {n: x for n, x in vars(ops).items() if callable(x)}
    ours = accelerate()
    assert ours.replaced["chunk_gated_delta_rule"] == ["fla.ops", "a_users_module"]
    assert vars(user)["renamed"] is vars(ops)["chunk_gated_delta_rule"] is not before["chunk_gated_delta_rule"]
    assert inspect.signature(vars(user)["renamed"]) == inspect.signature(before["chunk_gated_delta_rule"])
    second = accelerate()  # what is ours already stays
    assert not second.replaced
    ours.undo()
    ours.undo()
    assert (
        all(vars(ops)[n] is x for n, x in before.items()) and vars(user)["renamed"] is before["chunk_gated_delta_rule"]
    )


def test_a_name_that_is_no_implementation_replaces_nothing(ops: types.ModuleType) -> None:
    original = ops.chunk_gla
    with pytest.raises(AxesError, match="'cuda' is not one of reference, torch, triton"):
        accelerate("cuda")  # type: ignore[arg-type]
    assert ops.chunk_gla is original


def test_nothing_to_replace_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith(("transformers.models.", "fla"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    with pytest.raises(AxesError, match="nothing to replace .*not installed.*: install flash-linear-attention, or"):
        accelerate()


# ---- transformers' own copies ----------------------------------------------------------------------------------------


@pytest.fixture
def qwen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Qwen3-Next with transformers' torch functions, whether or not fla is installed."""
    pytest.importorskip("transformers", reason="the extra transformers is not installed")
    if importlib.util.find_spec("fla") is not None:
        pytest.importorskip("fla.ops", exc_type=Exception)  # type: ignore[arg-type]
    name = "transformers.models.qwen3_next.modeling_qwen3_next"
    module = pytest.importorskip(name, reason="this transformers has no Qwen3-Next")
    for entry in fla.COPIES:
        if (inner := getattr(vars(module).get(entry.name), "__wrapped__", None)) is not None:
            monkeypatch.setattr(module, entry.name, inner)
    yield module


def tiny(module: Any) -> Any:
    torch.manual_seed(0)
    config = module.Qwen3NextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return module.Qwen3NextForCausalLM(config)


@pytest.mark.filterwarnings("ignore")
def test_a_models_loss_gradients_and_tokens_stay(qwen: Any) -> None:
    model, ids = tiny(qwen), torch.randint(64, (2, 70))

    def trained() -> list[Tensor]:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    def written() -> Tensor:
        found: Tensor = model.eval().generate(ids[:, :9], max_new_tokens=6, do_sample=False, pad_token_id=0)
        return found

    before, said = trained(), written()
    with accelerate("torch") as ours:
        for x, y in zip(trained(), before, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-6)
        assert torch.equal(written(), said)
    assert ours.computed["torch_chunk_gated_delta_rule"] == 2 and ours.computed["torch_recurrent_gated_delta_rule"] == 5
    assert not ours.passed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [entry.name for entry in fla.COPIES])
def test_transformers_functions(name: str, qwen: Any) -> None:
    original = vars(qwen)[name]
    q, k, v = draw(B, 70, 2, K).float(), draw(B, 70, 2, K).float(), draw(B, 70, 4, V).float()
    a = (q, k, v, logsigmoid(draw(B, 70, 4)).float(), draw(B, 70, 4).sigmoid().float())
    options = {"initial_state": draw(B, 4, K, V).float(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    wanted = original(*a, **options)
    with accelerate("torch") as ours:
        got = vars(qwen)[name](*a, **options)
    assert ours.computed[name] == 1
    for x, y in zip(got, wanted, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_copy_that_is_faster_on_a_cpu_stays(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "fla" else found(name, *a))
    a = [draw(1, 5, 2, 4), draw(1, 5, 2, 4), draw(1, 5, 2, 4), -draw(1, 5, 2).abs(), draw(1, 5, 2).sigmoid()]
    name = "torch_chunk_gated_delta_rule"
    wanted = vars(qwen)[name](*a)[0]
    with accelerate() as ours:
        with pytest.warns(PassedOn, match="on a CPU it is faster than ours, which an implementation by name asks for"):
            assert torch.equal(vars(qwen)[name](*a)[0], wanted)
        packed = vars(qwen)[name](*a, cu_seqlens=torch.tensor([0, 2, 5]))[0]  # which the copy cannot
        torch.testing.assert_close(packed[:, :2], wanted[:, :2], rtol=1e-5, atol=1e-6)
    assert ours.computed[name] == 1 and sum(ours.passed.values()) == 1


def test_the_page_runs(ops: types.ModuleType, qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "fla.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        exec(compile(code, "docs/fla.md", "exec"), names)
    listed = set(re.findall(r"`((?:fused_|parallel_|torch_)?(?:chunk|recurrent|forgetting)\w+)`", page))
    assert listed == {entry.name for entry in (*fla.ENTRIES, *fla.COPIES)}


# ---- flash-linear-attention itself -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_flas_naive_references_and_signatures() -> None:
    """Its kernels need a GPU; its functions written in torch do not, and its names are patched all the same."""
    pytest.importorskip("fla.ops", reason="flash-linear-attention is not installed")
    import fla.ops as theirs
    from fla.ops.delta_rule.naive import delta_rule_recurrence
    from fla.ops.forgetting_attn.naive import naive_forgetting_attn
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
    from fla.ops.kda.naive import naive_recurrent_kda

    a = {n: x.float() for n, x in arguments("gated_delta_rule", ("beta", "g")).items()}
    wide = {**a, "g": logsigmoid(draw(B, T, H, K)).float()}
    gates = {n: a[n] for n in ("q", "k", "v", "g")}
    with accelerate() as ours:
        assert set(ours.replaced) >= {entry.name for entry in fla.ENTRIES if hasattr(theirs, entry.name)}
        pairs = [
            (theirs.chunk_gated_delta_rule(**a, output_final_state=True),
             naive_recurrent_gated_delta_rule(**a, output_final_state=True)),
            (theirs.chunk_kda(**wide, output_final_state=True), naive_recurrent_kda(**wide, output_final_state=True)),
            ((theirs.parallel_forgetting_attn(**gates),), (naive_forgetting_attn(**gates),)),
        ]  # fmt: skip
        heads = [a[n].transpose(1, 2) for n in ("q", "k", "v", "beta")]
        out, state = delta_rule_recurrence(*heads, initial_state=a["initial_state"])
        plain = {n: a[n] for n in ("q", "k", "v", "beta", "initial_state")}
        pairs.append((theirs.chunk_delta_rule(**plain, output_final_state=True), (out.transpose(1, 2), state)))
    for got, wanted in pairs:
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert not any(hasattr(getattr(theirs, entry.name, None), "axes_entry") for entry in fla.ENTRIES)


def test_a_call_like_one_before_follows_its_line() -> None:
    """Where kernels run the host's time is a model's: the third call launches what the first did, and asks for less."""
    from axes.kernels.common.repeated import _known
    from tests.host import no_launches

    entry = next(e for e in fla.ENTRIES if e.name == "chunk_gated_delta_rule")
    q, k, v = (torch.randn(1, 70, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    given = dict(q=q, k=k, v=v, beta=torch.rand(1, 70, 2), g=-torch.rand(1, 70, 2), use_qk_l2norm_in_kernel=True)
    given |= dict(initial_state=torch.randn(1, 2, 64, 64), output_final_state=True)
    found = []
    with no_launches() as launches:
        for _ in range(3):
            launches.clear()
            out, state = fla._compute(entry, given, None)
            (out.float().sum() + state.sum()).backward()
            found.append((launches.copy(), out.shape, state.shape, state.dtype))
            assert all(x.grad is not None for x in (q, k, v))
        for _ in range(3):
            with pytest.raises(fla._Cannot, match="allow_neg_eigval is given without"):
                fla._compute(entry, given | dict(allow_neg_eigval=True), None)
        out, state = fla._compute(entry, given | dict(output_final_state=False), None)
    assert found[0] == found[1] == found[2] and found[0][0] and state is None
    assert any(line.ready for line in _known[fla._LINES].lines.values())


def test_unit_rows_by_a_kernel_are_those_of_torch() -> None:
    """One launch each way for eight passes: under Triton's interpreter, rows of zeros among them."""
    from tests.interpreter import interpret

    interpret("""
import torch
from axes.integrations.fla import _unit
torch.manual_seed(0)
for shape, dtype, close in (((2, 5, 3, 64), torch.float32, 2e-6), ((1, 9, 2, 40), torch.float16, 1e-3)):
    x = torch.randn(shape)
    x[0, :2] *= 1e-3  # beside the 1e-6 that is added to squares
    x[0, 0, 0] = 0.0
    x = x.to(dtype).requires_grad_()
    by = torch.randn(shape)
    wide = x.detach().double().requires_grad_()
    unit = 0.3 * wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    want = unit, torch.autograd.grad((unit * by).sum(), wide)[0]
    for kernels in (True, False):
        y = _unit(x, 0.3, dtype, kernels)
        got = y, torch.autograd.grad((y.float() * by).sum(), x)[0]
        for a, b in zip(got, want):
            assert a.dtype == dtype and (a.double() - b).norm() <= close * b.norm(), (shape, kernels)
""")
