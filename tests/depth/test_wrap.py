"""Wrapped models: the same at the start, the mixer's equation afterwards, and everything else of the model as it was.

The stand-ins have the structure of blocks that people use; with transformers installed the real ones run too.
"""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axes.core.algorithms import Step
from axes.core.costs import SquaredError
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.depth import (
    ALL,
    MHC,
    AttentionResiduals,
    BlockAttentionResiduals,
    DeepDelta,
    DenseFormer,
    DepthMixer,
    DynamicDense,
    FracConnections,
    HyperConnections,
    JPmHC,
    Mixed,
    PostNorm,
    PreNorm,
    Residual,
    ResidualMatrix,
    UniversalTransformer,
    mixer,
    unwrap,
    wrap,
)
from axes.depth.wired import NotResidual
from axes.depth.wiring import wiring
from axes.depth.wrap import MixedBlock
from axes.errors import AxesError, IllegalUpdate, ShapeError, WrongType
from tests.drawn import drawn
from tests.processes import joined, run

D, V = 16, 31


class Attention(nn.Module):
    """Causal, one head, (y, weights); a cache is a list that keys and values are appended to."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, cache: Any = None, mask: Tensor | None = None, turn: Tensor | None = None) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        if turn is not None:
            q, k = q * turn, k * turn
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(x, 1) for x in zip(*cache, strict=True))
        scores = q @ k.mT / D**0.5
        past = k.shape[1] - q.shape[1]
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(past + 1), -1e9)
        weights = (scores if mask is None else scores + mask).softmax(-1)
        return self.out(weights @ v), weights


class OnlyOutput(Attention):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class Base(nn.Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(D), attention(), nn.LayerNorm(D), mlp()


class GPT2(Base):
    """Positional arguments, a tuple unpacked, an argument that takes another way through the block."""

    def forward(self, x: Tensor, cache: Any = None, mask: Any = None, encoder: Any = None, **kwargs: Any) -> Tensor:
        residual = x
        y, _ = self.attn(self.ln_1(x), cache, mask=mask, **kwargs)
        x = y + residual
        if encoder is not None:
            raise ValueError("no cross attention")
        residual = x
        return residual + self.mlp(self.ln_2(x))


class Llama(Base):
    """Keywords, one of them required."""

    def forward(self, x: Tensor, turn: Tensor, mask: Any = None, cache: Any = None, **kwargs: Any) -> Tensor:
        residual = x
        x = self.ln_1(x)
        x, _ = self.attn(x=x, cache=cache, mask=mask, turn=turn, **kwargs)
        x = residual + x
        return x + self.mlp(self.ln_2(x))


class NanoGPT(Base):
    def __init__(self) -> None:
        super().__init__(OnlyOutput)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class Parallel(Base):
    """One read, two sublayers; what attention weighs is returned behind the stream."""

    def forward(self, x: Tensor) -> Any:
        normed = self.ln_1(x)
        outputs = self.attn(normed)
        return outputs[0] + self.mlp(normed) + x, outputs[1]


class NormAfter(Base):
    """The stream added to in place, norms behind the sublayers, members of a dictionary."""

    def __init__(self) -> None:
        super().__init__(OnlyOutput)
        self.parts = nn.ModuleDict({"attn": self.attn, "mlp": self.mlp})
        del self.attn, self.mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.ln_1(self.parts["attn"](x))
        x += self.ln_2(self.parts["mlp"](x))
        return x


class Inline(Base):
    """A gated network written out, factors between sublayer and stream, a record that nobody reads."""

    def __init__(self) -> None:
        super().__init__(OnlyOutput)
        del self.mlp
        self.gate, self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.gamma = nn.Parameter(torch.linspace(0.2, 0.9, D))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attn(self.ln_1(x))
        self.largest = y.abs()
        x = x + self.gamma * y
        return x + self.gated(x)

    def gated(self, x: Tensor) -> Tensor:
        x = self.ln_2(x)
        return 0.5 * self.down(F.silu(self.gate(x)) * self.up(x))


BLOCKS: tuple[Callable[[], nn.Module], ...] = (GPT2, Llama, NanoGPT, Parallel, NormAfter, Inline)
SUBLAYERS = {GPT2: 2, Llama: 2, NanoGPT: 2, Parallel: 1, NormAfter: 2, Inline: 2}


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(V, D), nn.LayerNorm(D), nn.Linear(D, V)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.reentrant: bool | None = None

    def forward(self, tokens: Tensor, caches: list[Any] | None = None, start: int = 0) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            given: dict[str, Any] = {}
            if isinstance(block, Llama):
                given["turn"] = torch.cos(torch.arange(start, start + x.shape[1]).to(x.dtype))[:, None].expand(-1, D)
            if caches is not None:
                given["cache"] = caches[i]
            if self.reentrant is not None:
                x = checkpoint(lambda x, block=block, given=given: block(x, **given), x, use_reentrant=self.reentrant)
            else:
                x = block(x, **given)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(self.norm(x))


def model(block: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model(block).to(dtype)


def stirred(wrapped: Model) -> Model:
    """Away from the start: every mixer parameter moved."""
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if ".mixers." in name:
                p.add_(0.3 * torch.randn(p.shape, generator=numbers, dtype=torch.float64))
    return wrapped


TOKENS = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(2))


def gradients(m: nn.Module) -> dict[str, Tensor]:
    m.zero_grad()
    F.cross_entropy(m(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}


# what reads something else than a sum of all outputs, or remembers more than its streams
OTHERS = (
    PreNorm, PostNorm, UniversalTransformer, DeepDelta, ResidualMatrix, AttentionResiduals, BlockAttentionResiduals,
    DenseFormer, DynamicDense,
)  # fmt: skip
PLAIN_START = tuple(cls for cls in ALL if cls not in OTHERS)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.__name__)
@pytest.mark.parametrize("cls", PLAIN_START, ids=lambda c: c.name)
def test_the_wrapped_model_starts_as_the_model(cls: type[DepthMixer], block: Callable[[], nn.Module]) -> None:
    plain, m = model(block), model(block)
    names = list(plain.state_dict())
    assert wrap(m, cls, streams=None if cls in (Residual, FracConnections) else 4) is m
    torch.testing.assert_close(m(TOKENS), plain(TOKENS), rtol=0, atol=1e-12)
    assert [name for name in m.state_dict() if ".mixers." not in name] == names
    assert all(isinstance(b, block) and len(b.mixers) == SUBLAYERS[block] for b in m.blocks)  # type: ignore[arg-type]
    assert [x.layer_index for b in m.blocks for x in b.mixers] == list(range(3 * SUBLAYERS[block]))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.__name__)
def test_a_wrapped_model_computes_the_mixers_equation(block: Callable[[], nn.Module]) -> None:
    """Against the loop written out: the sublayers by hand, and X <- R X + post y by the mixer's own calls."""
    m = stirred(wrap(model(block), MHC, streams=3))
    turn = torch.cos(torch.arange(9.0).double())[:, None].expand(-1, D)
    by_hand: dict[Any, Callable[[Any], list[Callable[[Tensor], Tensor]]]] = {
        GPT2: lambda b: [lambda x: b.attn(b.ln_1(x))[0], lambda x: b.mlp(b.ln_2(x))],
        Llama: lambda b: [lambda x: b.attn(b.ln_1(x), turn=turn)[0], lambda x: b.mlp(b.ln_2(x))],
        NanoGPT: lambda b: [lambda x: b.attn(b.ln_1(x)), lambda x: b.mlp(b.ln_2(x))],
        Parallel: lambda b: [lambda x: b.attn(b.ln_1(x))[0] + b.mlp(b.ln_1(x))],
        NormAfter: lambda b: [lambda x: b.ln_1(b.parts["attn"](x)), lambda x: b.ln_2(b.parts["mlp"](x))],
        Inline: lambda b: [lambda x: b.gamma * b.attn(b.ln_1(x)), b.gated],
    }
    streams = m.embedding(TOKENS)[..., None, :].expand(-1, -1, 3, -1)
    for b in m.blocks:
        for f, mix in zip(by_hand[block](b), b.mixers, strict=True):
            pre, signal, _ = mix.coefficients(streams)
            y = f((pre[..., None] * streams).sum(-2))
            mixing = mix.update.parts().monoid.link.primal(signal["mix"])
            streams = mixing @ streams + signal["k"][..., None] * y[..., None, :]
    torch.testing.assert_close(m(TOKENS), m.head(m.norm(streams.mean(-2))), rtol=0, atol=1e-10)


def test_a_mixer_is_given_as_its_class() -> None:
    with pytest.raises(WrongType, match="mixer must be a class of mixers.* got a str"):
        wrap(nn.Sequential(nn.Linear(2, 2)), "mhc")  # type: ignore[arg-type]
    with pytest.raises(WrongType, match="wrap: model must be a module, got None"):
        wrap(None, MHC)  # type: ignore[type-var]
    with pytest.raises(WrongType, match="mixer must be a class of mixers.* got an axes.depth.mhc.MHC"):
        wrap(nn.ModuleList([nn.Linear(D, D)]), MHC(D))  # type: ignore[arg-type]


def test_further_arguments_and_outputs_pass_through() -> None:
    plain, m = GPT2().double(), nn.ModuleList([GPT2().double()])
    m[0].load_state_dict(plain.state_dict())
    wrap(m, HyperConnections, streams=2)
    x, mask = torch.randn(2, 9, D).double(), torch.randn(2, 9, 9).double()
    for call in (
        lambda b: b(x, None, mask),
        lambda b: b(x, mask=mask),
        lambda b: b(mask=mask, x=x),
        lambda b: b(x, turn=mask[0, :, :1]),  # not a name of the block: its attention's
    ):
        torch.testing.assert_close(call(m[0]), call(plain), rtol=0, atol=1e-12)
    assert not torch.allclose(m[0](x, mask=mask), m[0](x))
    with pytest.raises(NotResidual, match="encoder=None only: .*ValueError: no cross attention"):
        m[0](x, encoder=x)
    two = nn.ModuleList([Parallel().double()])
    weights = two[0](x)[1]
    torch.testing.assert_close(wrap(two, MHC)[0](x)[1], weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block", [GPT2, Llama], ids=lambda b: b.__name__)
def test_a_cache_gives_the_same(block: Callable[[], nn.Module]) -> None:
    m = stirred(wrap(model(block), MHC, streams=4))
    caches: list[list[Any]] = [[] for _ in m.blocks]
    parts = [m(TOKENS[:, :5], caches), *(m(TOKENS[:, i : i + 1], caches, start=i) for i in range(5, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), m(TOKENS), rtol=0, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("block", [NanoGPT, Llama], ids=lambda b: b.__name__)
def test_activation_checkpointing(block: Callable[[], nn.Module], reentrant: bool) -> None:
    m = stirred(wrap(model(block), MHC))
    want = gradients(m)
    m.reentrant = reentrant
    got = gradients(m)
    assert got.keys() == want.keys() and any(".mixers." in name for name in got)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_autocast() -> None:
    plain, m = model(NanoGPT, torch.float32), wrap(model(NanoGPT, torch.float32), MHC)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want, got = plain(TOKENS), m(TOKENS)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.isfinite(g).all() for g in gradients(stirred(m)).values())


@pytest.mark.parametrize("block", drawn([Parallel, GPT2], 2), ids=lambda b: b.__name__)
def test_compiles_without_graph_breaks(block: Callable[[], nn.Module]) -> None:
    torch._dynamo.reset()
    m = stirred(wrap(model(block), MHC, streams=3))
    want = gradients(m)
    m.compile(fullgraph=True, backend="aot_eager")
    got = gradients(m)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-12)


def test_copies_pickles_and_state_dicts() -> None:
    m = stirred(wrap(model(GPT2), JPmHC, streams=4))
    want = m(TOKENS)
    other = wrap(model(GPT2), JPmHC, streams=4)
    other.load_state_dict(m.state_dict())
    for twin in (other, copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(twin(TOKENS), want)
    twin = copy.deepcopy(m)
    with torch.no_grad():
        twin.blocks[0].mixers[0].bias.add_(1.0)
    assert torch.equal(m(TOKENS), want) and not torch.equal(twin(TOKENS), want)


def test_unwrap() -> None:
    plain = model(Llama)
    m = unwrap(stirred(wrap(model(Llama), MHC)))
    assert torch.equal(m(TOKENS), plain(TOKENS)) and list(m.state_dict()) == list(plain.state_dict())
    assert [type(a) for a in m.modules()] == [type(a) for a in plain.modules()]
    with pytest.raises(AxesError, match="no wrapped block"):
        unwrap(m)
    wrap(m, MHC)
    with pytest.raises(AxesError, match="wrapped already"):
        wrap(m, MHC)


def test_wrapping_draws_no_random_numbers_and_keeps_weights() -> None:
    m = model(GPT2)
    m.other = nn.ModuleList([Dropped()])  # looked at, refused; it draws
    weights, numbers = copy.deepcopy(m.state_dict()), torch.random.get_rng_state()
    wrap(m.eval(), MHC)
    assert torch.equal(torch.random.get_rng_state(), numbers)
    assert all(torch.equal(m.state_dict()[name], w) for name, w in weights.items())
    assert not any(module.training for module in m.modules())


def test_parameters_follow_the_block() -> None:
    with torch.device("meta"):
        m = wrap(Model(NanoGPT), MHC)
    assert all(p.is_meta for p in m.parameters())
    low = wrap(model(NanoGPT, torch.bfloat16), MHC)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    wide = wrap(model(NanoGPT, torch.bfloat16), MHC, dtype=torch.float32)
    assert {p.dtype for n, p in wide.named_parameters() if ".mixers." in n} == {torch.float32}
    plain = model(NanoGPT, torch.bfloat16)
    torch.testing.assert_close(wide(TOKENS), plain(TOKENS), rtol=2e-2, atol=2e-2)


# ---- what is refused, and how ----------------------------------------------------------------------------------------


class Dropped(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mlp(self.ln_1(x)), 0.1, self.training)


class NormedStream(Base):
    """What is added to is the norm's output (post-norm)."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x)
        return x + self.mlp(x)


class OtherNorm(Base):
    """A norm that is no child."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(F.layer_norm(x, (D,)))


class Moody(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.mlp(self.ln_1(x)) if self.training else self.mlp(x))


class Long(Base):
    """A factor that is no number of the block: the length of what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln_1(x)) / x.shape[1]


class Halved(Base):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + self.mlp(self.ln_1(x))


REFUSED = {
    Dropped: "something between them is no child",
    NormedStream: "something between them is no child",
    OtherNorm: "mlp is given neither the residual stream nor what a child returned",
    Moody: "otherwise in training than in evaluation",
    Long: "hang on how many sequences or tokens",
    Halved: "something between them is no child",
    mlp: "the width of its stream is not known",
}


@pytest.mark.parametrize("block", REFUSED, ids=lambda b: b.__name__)
def test_what_is_no_residual_block_is_refused_with_the_reason(block: Any) -> None:
    with pytest.raises(NotResidual, match=f"(?s)no residual block.*blocks.0 .*{REFUSED[block]}.*blocks=lambda"):
        wrap(model(block), MHC)


def test_nothing_to_look_at() -> None:
    with pytest.raises(NotResidual, match="there is no such member"):
        wrap(nn.Linear(3, 3), MHC)


def test_blocks_by_a_predicate() -> None:
    m = model(NanoGPT)
    m.blocks.append(GPT2().double())
    wrap(m, MHC, blocks=lambda module: isinstance(module, NanoGPT))
    assert [isinstance(b, MixedBlock) for b in m.blocks] == [True, True, True, False]
    m = model(NanoGPT)
    m.blocks.append(Halved().double())
    with pytest.raises(NotResidual, match=r"some members of blocks are residual blocks, but not blocks.3 \(Halved\)"):
        wrap(m, MHC)
    with pytest.raises(NotResidual, match=r"blocks.0 \(Halved\) was chosen, but its output is not"):
        wrap(model(Halved), MHC, blocks=lambda module: isinstance(module, Halved))
    with pytest.raises(NotResidual, match="norm .LayerNorm. was chosen, but it is no member"):
        wrap(model(NanoGPT), MHC, blocks=lambda module: isinstance(module, nn.LayerNorm))
    with pytest.raises(NotResidual, match="no residual block"):
        wrap(model(NanoGPT), MHC, blocks=lambda module: False)


def test_a_block_that_stands_twice_is_refused() -> None:
    m = model(NanoGPT)
    m.blocks[2] = m.blocks[0]
    with pytest.raises(NotResidual, match="stands in the model twice"):
        wrap(m, MHC)


def test_mixers_that_start_elsewhere_are_refused() -> None:
    delta = mixer(StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta", domain="positive"))))
    for refused in (*OTHERS, delta):
        m = model(NanoGPT)
        with pytest.raises(IllegalUpdate, match="not be the model that it was; .* MHC|more than its streams"):
            wrap(m, refused)
        assert not any(isinstance(module, MixedBlock) for module in m.modules())
    with pytest.raises(ShapeError, match="Residual does not take"):
        wrap(model(NanoGPT), Residual, streams=4)


def test_a_refused_model_is_left_alone() -> None:
    m = model(NanoGPT)
    m.blocks[1].mixers = nn.Identity()
    with pytest.raises(NotResidual, match="`mixers` of its own"):
        wrap(m, MHC)
    assert not any(isinstance(module, MixedBlock) for module in m.modules())


def test_a_mixed_sublayer_is_a_wrapped_block() -> None:
    """The same network by `Mixed` in a model of one's own and by `wrap`."""

    class Sublayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.f = nn.LayerNorm(D), mlp()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(self.norm(x))

    torch.manual_seed(0)
    blocks = nn.Sequential(Sublayer(), Sublayer()).double()
    wrap(blocks, MHC)
    x = torch.randn(2, 9, D).double()
    own = [Mixed(nn.Sequential(b.norm, b.f), b.mixers[0]) for b in blocks]
    streams = own[0].mixer.expand(x)
    for mixed in own:
        streams = mixed(streams)
    assert torch.equal(blocks(x), own[-1].mixer.reduce(streams))


@pytest.mark.parametrize("crossed", (False, True))
def test_layers_of_torch(crossed: bool) -> None:
    """What `nn.TransformerEncoder` and its decoder hand their layers passes through: masks, padding, a memory."""
    torch.manual_seed(0)
    sizes = {"d_model": D, "nhead": 2, "dim_feedforward": 24, "batch_first": True, "norm_first": True}
    if crossed:
        m: nn.Module = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 3)
    else:
        m = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 3, enable_nested_tensor=False)
    m = m.double().eval()
    x, memory = torch.randn(2, 7, D, dtype=torch.float64), torch.randn(2, 5, D, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    padded = torch.arange(7) >= torch.tensor([[7], [5]])
    ways: tuple[tuple[Any, ...], ...] = ((x,), (x, mask), (x, None, padded), (x, mask, torch.zeros(2, 7).double()))
    if crossed:
        ways = ((x, memory), (x, memory, mask))
    want = [m(*way).detach() for way in ways]
    wrap(m, MHC, streams=4)
    for way, plain in zip(ways, want, strict=True):
        torch.testing.assert_close(m(*way), plain, rtol=0, atol=1e-12)
    layer: Any = m.get_submodule("layers.0")
    if not crossed:  # the encoder's looks at its masks
        with pytest.raises(NotResidual, match=r"src_mask as a floating.*got a tensor \(7, 7\) of torch.bool"):
            layer(x, mask < 0)


def test_the_wiring_is_read_from_the_block() -> None:
    shown = "ln_1 > attn > abs.default > mul.Tensor ; ln_2 > gate > silu.default > up > mul.Tensor > down > mul.Tensor"
    assert str(wiring(Inline(), D)) == shown
    wired = wiring(GPT2(), D)
    assert str(wired) == "ln_1 > attn ; ln_2 > mlp" and list(wired.fixed) == ["encoder"] and wired.rest
    assert str(wiring(NormAfter(), D)) == "parts.attn > ln_1 ; parts.mlp > ln_2"


# ---- two processes ---------------------------------------------------------------------------------------------------


def _fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    alone = stirred(wrap(model(GPT2), MHC, streams=4))
    m = copy.deepcopy(alone)
    for block in m.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(m, mesh=mesh)
    for _ in range(3):
        want, got = gradients(alone), gradients(m)
        for (name, p), (_, q) in zip(alone.named_parameters(), m.named_parameters(), strict=True):
            torch.testing.assert_close(got[name].full_tensor(), want[name], rtol=1e-9, atol=1e-12)
            with torch.no_grad():
                p.sub_(0.1 * want[name])
                q.sub_(0.1 * got[name])
    torch.testing.assert_close(m(TOKENS), alone(TOKENS), rtol=0, atol=1e-10)
    try:
        unwrap(m)
    except AxesError as error:
        assert "undo that first" in str(error)
    else:
        raise AssertionError("a sharded block was unwrapped")


def test_fully_sharded_over_two_processes(tmp_path: Path) -> None:
    run(__file__, tmp_path, 2)


# ---- the real ones ---------------------------------------------------------------------------------------------------


def _transformers_model(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {"vocab_size": V, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, **common)
        return transformers.GPT2LMHeadModel(config)
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, **common,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # renamings of a library that is not ours
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3", "Gemma2", "GPTNeoX"])
def test_transformers(kind: str) -> None:
    m = _transformers_model(kind).double().eval()
    plain = copy.deepcopy(m)
    wrap(m, MHC, streams=4)
    torch.testing.assert_close(m(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=1e-12)
    stirred(m)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    prompt = TOKENS[:, :4]
    cached = m.generate(prompt, use_cache=True, **options)
    assert torch.equal(cached, m.generate(prompt, use_cache=False, **options))
    first = m(TOKENS[:, :5], use_cache=True)
    second = m(TOKENS[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    # Gemma2 rounds its attention to float32 whatever the dtype, and a last bit of a score may turn one of a weight
    near = 1e-6 if kind == "Gemma2" else 1e-10
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), m(TOKENS).logits, rtol=0, atol=near)
    for module in m.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    want = _loss_gradients(m.train())
    for reentrant in (True, False):
        m.gradient_checkpointing_enable({"use_reentrant": reentrant})
        got = _loss_gradients(m)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    m.gradient_checkpointing_disable()
    assert torch.equal(unwrap(m).eval()(TOKENS).logits, plain(TOKENS).logits)


def _loss_gradients(m: Any) -> dict[str, Tensor]:
    m.zero_grad()
    m(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in m.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    with joined():
        _fully_sharded()
