"""Any legal tuple as a mixer: its demands become parameters, and the streams are what the interpreter says."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from axes.core.algorithms import Anchor, Momentum, Read, Step
from axes.core.costs import Alignment, Given, Huber, Linear, Lp, Ridge, RobustShift, SquaredError
from axes.core.geometry import Bounded, Cayley, Entropic, Euclidean, Geometry, SignBall, SoftThreshold, Sphere
from axes.core.memory import MLP, List, Matrix, Memory, Slots
from axes.core.monoids import (
    DPLR,
    Decay,
    Diagonal,
    GeneralLinear,
    Hadamard,
    Householder,
    Identity,
    Product,
    Rotation,
    Scalar,
    Zero,
)
from axes.core.rates import Count, Per, Signal
from axes.core.state_update import State, StateUpdate
from axes.depth import ALL, Coefficients, HyperConnections, TupleMixer, mixer
from axes.depth.static import StaticMixer
from axes.errors import IllegalUpdate, ShapeError

D, N = 6, 4
MIX = Per("mix", "mix", "real")

# tuple, and whether the network of its defaults equals pre-norm: 0 exactly, else up to this much
TUPLES = {
    "plain": (StateUpdate(Alignment()), 1e-12),
    "rate": (StateUpdate(Alignment(), algorithm=Step(rate=Per("eta"))), 1e-12),
    "row rate": (StateUpdate(Alignment(), algorithm=Step(rate=Per("eta", "row"))), 1e-12),
    "forget": (StateUpdate(Alignment(), monoid=Scalar("a")), 1e-1),
    "per stream": (StateUpdate(Alignment(), monoid=Diagonal("a")), 1e-1),
    "per feature": (StateUpdate(Alignment(), monoid=Diagonal("a", "row")), 1e-1),
    "per entry": (StateUpdate(Alignment(), monoid=Hadamard("a")), 1e-1),
    "decay": (StateUpdate(Alignment(), monoid=Decay(Per("weight"))), 1e-1),
    "reflect": (StateUpdate(Alignment(), monoid=Householder(Per("beta", domain="real"), "w")), 1e-12),
    "dplr": (StateUpdate(Alignment(), monoid=DPLR(Per("a", "key", "unit"))), 1e-1),
    "rotate": (StateUpdate(Alignment(), monoid=Rotation(Per("angle", "pair", "real"))), 1e-12),
    "channels turn": (StateUpdate(Alignment(), monoid=Rotation(Per("angle", "row-pair", "real"))), 1e-12),
    "complex channels": (
        StateUpdate(
            Alignment(),
            monoid=Product(
                (Diagonal(Per("a", "row-pair", "unit"), "row-pair"), Rotation(Per("angle", "row-pair", "real")))
            ),
        ),
        1e-1,
    ),
    "matrix": (StateUpdate(Alignment(), monoid=GeneralLinear(MIX)), 1e-12),
    "rotation matrix": (StateUpdate(Alignment(), monoid=GeneralLinear(MIX, Cayley(1.0))), 1e-12),
    "stochastic rows": (StateUpdate(Alignment(), monoid=GeneralLinear(MIX, Entropic("row"))), 1e-12),
    "bounded entries": (StateUpdate(Alignment(), monoid=GeneralLinear(MIX, Bounded())), 1e-1),
    "product": (StateUpdate(Alignment(), monoid=Product((Scalar("a"), GeneralLinear(MIX)))), 1e-1),
    "sphere": (StateUpdate(Alignment(), Sphere("columns", None), Identity(), Step()), 1e-12),
    "coupled decay": (StateUpdate(Ridge(Alignment(), Per("weight"))), 1e-1),
    "filter": (StateUpdate(Alignment(), algorithm=Step(via=(StateUpdate(Linear(), monoid=Scalar("b")),))), 1e-1),
    "delta": (StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta"))), None),
    "gated delta": (StateUpdate(SquaredError(), monoid=Scalar("a"), algorithm=Step(Per("beta"), at="gated")), None),
    "implicit delta": (StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta"), at="new")), None),
    "huber": (StateUpdate(Huber(Per("delta")), algorithm=Step(rate=0.5)), None),
    "sparse": (StateUpdate(Alignment(), SoftThreshold(Per("threshold"))), None),
    "momentum": (StateUpdate(Alignment(), algorithm=Momentum(0.5, "sum")), None),
    "by the number of the layer": (StateUpdate(Alignment(), algorithm=Step(Per("eta") / Count() ** 0.5)), None),
    "the larger": (StateUpdate(Alignment(), monoid=Scalar("a"), algorithm=Step(write="max")), None),
    "anchored delta": (StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta"), at=Anchor(3))), None),
    "mean of writes": (StateUpdate(Alignment(), algorithm=Step(debias=True)), None),
    "post-norm streams": (StateUpdate(Alignment(), Sphere("columns", None), Identity(), Step(lazy=False)), None),
}


def f(x: Tensor) -> Tensor:
    return torch.tanh(torch.roll(x, 1, -1) * torch.rsqrt(x.square().mean(-1, keepdim=True)))


def network(update: StateUpdate, layers: int = 6) -> list:
    make = mixer(update)
    return [make(D, layer_index=l, streams=N, dtype=torch.float64) for l in range(layers)]


def run(mixers: list, h: Tensor) -> Tensor:
    x = mixers[0].expand(h)
    for m in mixers:
        seen, coefficients = m.read(x)
        x = m.write(x, f(seen), coefficients)
    return mixers[-1].reduce(x)


@pytest.mark.parametrize("name", TUPLES)
def test_a_tuple_becomes_a_mixer_with_its_demands_as_parameters(name: str) -> None:
    update, distance = TUPLES[name]
    mixers = network(update)
    h = torch.randn(2, 3, D, dtype=torch.float64)
    out = run(mixers, h)
    assert out.shape == h.shape and torch.isfinite(out).all()
    assert torch.equal(out, run(network(update), h))
    named = {n.removeprefix("rates.") for n, _ in mixers[1].named_parameters()}
    assert named == {"pre", "post"} | {p.name for p in update.demands()} | (update.signals() - {"k", "v"})
    if distance is not None:
        plain = h
        for _ in mixers:
            plain = plain + f(plain)
        if "Sphere" in repr(update):
            plain = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True))
        torch.testing.assert_close(out, plain, rtol=0, atol=distance)
    (out * torch.randn_like(out)).sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for m in mixers for p in m.parameters())
    for m in mixers[1:-1]:
        assert m.post.grad is not None and m.post.grad.abs().amax() > 0
        for rate in update.demands():
            # mixing a filter's buffer of equal streams or a rotation of copies may be flat at the very start
            assert m.rates[rate.name].grad is not None


@pytest.mark.parametrize("name", TUPLES)
def test_the_streams_are_the_interpreters_state(name: str) -> None:
    """The mixer's layers against `update.init` and `update.step` called by hand on S = X^T."""
    update, _ = TUPLES[name]
    mixers = network(update, 4)
    h = torch.randn(2, D, dtype=torch.float64)
    with torch.no_grad():
        for m in mixers:
            for p in m.parameters():
                p.add_(0.2 * torch.randn_like(p))
    x, state = mixers[0].expand(h), None
    for m in mixers:
        seen, coefficients = m.read(x)
        signal = dict(coefficients.signal)
        if state is None:
            start = h[..., :, None].expand(2, D, N)
            state = update.init({**signal, "v": h}, weights=(start,))
            state = state._replace(norm=tuple(torch.ones_like(n) for n in state.norm))
        expected = update.read(update.output(state, signal), coefficients.pre, signal)
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-13)
        state, _ = update.step(state, {**signal, "v": f(seen)})
        x = m.write(x, f(seen), coefficients)
        kept = x.theta[0].mT if isinstance(x, State) else x
        torch.testing.assert_close(kept, state.theta[0].mT, rtol=0, atol=1e-13)
    remember = ("filter", "momentum", "anchored delta", "mean of writes", "by the number of the layer")
    assert isinstance(x, State) is (name in remember)


def test_the_delta_rule_along_depth() -> None:
    """X <- X + beta post (y - post^T X)^T: what was written under the same key is replaced."""
    update = StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta")))
    m = mixer(update)(D, 0, N, dtype=torch.float64)
    with torch.no_grad():
        m.post.copy_(torch.nn.functional.normalize(torch.randn(N, dtype=torch.float64), dim=0))
        m.rates["beta"].zero_()  # beta = 1
    x, y = torch.randn(3, N, D, dtype=torch.float64), torch.randn(3, D, dtype=torch.float64)
    new = m.write(x, y, m.read(x)[1])
    post = m.post.detach()
    theirs = x + post[:, None] * (y - torch.einsum("j,bjd->bd", post, x))[:, None, :]
    torch.testing.assert_close(new, theirs, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.einsum("j,bjd->bd", post, new), y, rtol=0, atol=1e-13)


CORRECTING = {
    "delta": StateUpdate(SquaredError()),
    "gated": StateUpdate(SquaredError(), monoid=Scalar("a"), algorithm=Step(Per("beta"), at="gated")),
    "rated": StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta"))),
    "row rated": StateUpdate(SquaredError(), algorithm=Step(rate=Per("beta", "row"))),
    "shifted": StateUpdate(RobustShift(1.0), algorithm=Step(rate=Per("beta"))),
    "ridged": StateUpdate(Ridge(SquaredError(), Per("weight")), algorithm=Step(rate=Per("beta"))),
    "cubic, implicit": StateUpdate(Lp(3), algorithm=Step(rate=Per("beta"), at="new")),
}


@pytest.mark.parametrize("streams", [2, 4, 8])
@pytest.mark.parametrize("name", CORRECTING)
def test_what_corrects_starts_without_amplifying(name: str, streams: int) -> None:
    """Twelve sublayers at the defaults: differences between streams and their mean both stay as large as they were."""
    make = mixer(CORRECTING[name])
    mixers = [make(D, l, streams, dtype=torch.float64) for l in range(12)]
    x = torch.randn(2, 3, streams, D, dtype=torch.float64, requires_grad=True)
    now = x
    for m in mixers:
        seen, coefficients = m.read(now)
        now = m.write(now, f(seen), coefficients)
    assert now.norm() < 2 * x.norm()
    (gradient,) = torch.autograd.grad((now * torch.randn_like(now)).sum(), x)
    assert torch.isfinite(gradient).all() and 0 < gradient.norm() < 100 * x.numel() ** 0.5


def test_a_gradient_that_outgrows_the_error_needs_an_implicit_step() -> None:
    for cost in (Lp(3), Ridge(Lp(2.5), 0.1)):
        with pytest.raises(IllegalUpdate, match=r"grows faster than the error.*use Step\(at='new'\)"):
            mixer(StateUpdate(cost))
    mixer(StateUpdate(Lp(3), Sphere("columns", None), Identity(), Step(lazy=False)))  # nothing to outgrow on a sphere


@pytest.mark.parametrize("tokens", [N - 1, N, N + 1])
@pytest.mark.parametrize("memory", [Matrix(), Slots()], ids=repr)
def test_encoding_streams(memory: Memory, tokens: int) -> None:
    """S <- S - beta grad |enc(S)^T y - post|^2 / 2, one token after another: the number of tokens is no stream's."""
    m = mixer(StateUpdate(SquaredError(encode=True), algorithm=Step(rate=Per("beta")), memory=memory))(
        D, 1, N, dtype=torch.float64
    )
    with torch.no_grad():
        m.post.normal_()
    x, y = torch.randn(2, tokens, N, D, dtype=torch.float64), torch.randn(2, tokens, D, dtype=torch.float64)
    new = m.write(x, y, m.read(x)[1])
    assert new.shape == x.shape
    for b in range(2):
        for t in range(tokens):
            s = x[b, t].clone().requires_grad_()
            enc = s / s.norm(dim=-1, keepdim=True) if isinstance(memory, Slots) else s
            loss = (enc @ y[b, t] - m.post.detach()).square().sum() / 2
            theirs = s.detach() - m.rates["beta"].detach().exp() * torch.autograd.grad(loss, s)[0]
            torch.testing.assert_close(new[b, t], theirs, rtol=0, atol=1e-12)


def test_the_mean_of_all_writes() -> None:
    """debias divides by the number of writes, the entry included: depth attention with equal weights."""
    mixers = network(StateUpdate(Alignment(), algorithm=Step(debias=True)), 3)
    h = torch.randn(2, D, dtype=torch.float64)
    x, written = mixers[0].expand(h), [h]
    for m in mixers:
        seen, coefficients = m.read(x)
        torch.testing.assert_close(seen, torch.stack(written).mean(0), rtol=0, atol=1e-13)
        written.append(f(seen))
        x = m.write(x, written[-1], coefficients)


def test_momentum_along_depth() -> None:
    """m <- m / 2 + y, X <- X + m: the filter's buffer travels with the streams."""
    mixers = network(StateUpdate(Alignment(), algorithm=Momentum(0.5, "sum")), 4)
    h = torch.randn(2, D, dtype=torch.float64)
    x, plain, buffer = mixers[0].expand(h), h, torch.zeros_like(h)
    for m in mixers:
        seen, coefficients = m.read(x)
        torch.testing.assert_close(seen, plain, rtol=0, atol=1e-13)
        buffer = buffer / 2 + f(plain)
        plain = plain + buffer
        x = m.write(x, f(seen), coefficients)
    with pytest.raises(ShapeError, match="streams must be the State that expand returned, got a torch.Tensor"):
        mixers[0].read(torch.zeros(2, N, D, dtype=torch.float64))
    with pytest.raises(ShapeError, match="streams must be a tensor .B, T, n, d., got an? .*State"):
        HyperConnections(D, 0, N).read(x)


def test_equal_tuples_give_identical_mixers() -> None:
    factory = mixer(HyperConnections.update)
    ours, theirs = factory(D, 1, N), HyperConnections(D, 1, N)
    h = torch.randn(2, 3, D)
    x = ours.expand(h)
    assert torch.equal(ours.write(x, f(h), ours.read(x)[1]), theirs.write(x, f(h), theirs.read(x)[1]))
    assert factory == mixer(HyperConnections.update) and pickle.loads(pickle.dumps(factory)) == factory
    twin = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert torch.equal(twin.read(x)[0], ours.read(x)[0])
    assert "update=StateUpdate(" in repr(ours) and factory.update is HyperConnections.update


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.name)
def test_the_tuple_of_every_instance_makes_a_mixer(cls: type) -> None:
    factory = mixer(cls.update)
    assert factory.prenorm is cls(D).prenorm
    assert torch.isfinite(run([factory(D, l, N) for l in range(3)], torch.randn(2, 3, D))).all()


def test_prenorm_is_derived_and_can_be_overruled() -> None:
    assert mixer(StateUpdate(Alignment())).prenorm is True
    assert mixer(StateUpdate(Alignment(), Sphere("columns", None))).prenorm is False
    assert mixer(StateUpdate(Alignment()), prenorm=False)(D).prenorm is False


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (StateUpdate(Given()), "Given takes its gradient from outside"),
        (StateUpdate(Linear()), "Linear takes its gradient from outside"),
        (StateUpdate(SquaredError(), memory=MLP()), "the adapter has no streams of a MLP memory"),
        (StateUpdate(Alignment(), Entropic("row")), "does not move with what was written just before: it is constant"),
        (
            StateUpdate(Alignment(), algorithm=Step(via=(StateUpdate(Linear(), SignBall(), Zero()),))),
            "what a sublayer reads does not move with what was written just before: it is constant, or its gradient is",
        ),
        (StateUpdate(Alignment(), algorithm=Step(read=Read(0.9, 0.1))), "depth reads the state before it writes"),
        (StateUpdate(Alignment(), algorithm=Step(0.5, start="first")), "would replace what entered the network"),
    ],
)
def test_tuples_without_meaning_along_depth_say_why(update: StateUpdate, message: str) -> None:
    with pytest.raises(IllegalUpdate, match="no meaning along depth") as raised:
        mixer(update)
    assert message in str(raised.value)


def test_what_leaves_in_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TupleMixer, "leave", lambda m, x: x.new_full((*x.shape[:1], 1, 1, N // 2), 0.5))
    with pytest.raises(IllegalUpdate, match="its output has the shape .* where .2, 3, 4. entered"):
        mixer(StateUpdate(Alignment()))


@pytest.mark.parametrize("h", [Entropic("row"), Euclidean()], ids=repr)
def test_a_list_along_depth_is_attention_over_what_was_written(h: Geometry) -> None:
    """A list per token: what entered and every y under the key of its sublayer, read by pre."""
    update = StateUpdate(Alignment(), h, memory=List(scale=1.0))
    makes = (mixer(update), mixer(update, per_token=("post",)))  # keys for all tokens and keys of each, in one list
    mixers = [makes[l % 2](D, l, N, dtype=torch.float64) for l in range(4)]
    for p in (p for m in mixers for p in m.static_parameters()):
        torch.nn.init.normal_(p)
    hidden = torch.randn(2, 3, D, dtype=torch.float64)
    x, keys, values = mixers[0].expand(hidden), [mixers[0].post], [hidden]
    for m in mixers:
        scores = torch.stack([k @ m.pre for k in keys])
        scores = scores.softmax(0) if isinstance(h, Entropic) else scores
        seen, coefficients = m.read(x)
        torch.testing.assert_close(seen, torch.einsum("i,i...->...", scores, torch.stack(values)), rtol=0, atol=1e-12)
        keys, values = [*keys, m.post], [*values, f(seen)]
        x = m.write(x, values[-1], coefficients)
    assert isinstance(x, State) and x.theta[1].shape == (2, 3, 5, D)


class KeyedByWhatIsWritten(StaticMixer):
    update = StateUpdate(Alignment())

    def written(self, y: Tensor, coefficients: Coefficients) -> Signal:
        return {**coefficients.signal, "v": y, "k": torch.softmax(y[..., :N], -1)}


def test_keys_computed_from_what_is_written() -> None:
    m = KeyedByWhatIsWritten(D, 0, N, dtype=torch.float64)
    x, y = torch.randn(2, 3, N, D, dtype=torch.float64), torch.randn(2, 3, D, dtype=torch.float64)
    theirs = x + y[..., :N].softmax(-1)[..., :, None] * y[..., None, :]
    torch.testing.assert_close(m.write(x, y, m.read(x)[1]), theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("learned", [False, True])
def test_streams_in_fractions(learned: bool) -> None:
    """r reads and r writes a sublayer, X <- R X + sum_i post_i y_i^T: the monoid acts once."""
    make, r = mixer(StateUpdate(Alignment(), monoid=GeneralLinear(MIX)), fractions=3), 3
    m = make(D, 1, 2, dtype=torch.float64, learned_reduce=learned)
    h = torch.randn(2, 5, D, dtype=torch.float64)
    start = m.expand(h)
    assert torch.equal(start, h.unflatten(-1, (r, D // r)).repeat(1, 1, 2, 1))
    seen, coefficients = m.read(start)
    torch.testing.assert_close(seen, h, rtol=0, atol=0)
    torch.testing.assert_close(m.reduce(m.write(start, f(h), coefficients)), h + f(h), rtol=0, atol=1e-12)
    for p in m.parameters():
        torch.nn.init.normal_(p)
    x, y = torch.randn(2, 5, 6, D // r, dtype=torch.float64), torch.randn(2, 5, D, dtype=torch.float64)
    seen, coefficients = m.read(x)
    torch.testing.assert_close(seen, torch.einsum("rj,...jd->...rd", m.pre, x).flatten(-2), rtol=0, atol=1e-12)
    theirs = m.rates["mix"] @ x + torch.einsum("rj,...rd->...jd", m.post, y.unflatten(-1, (r, D // r)))
    torch.testing.assert_close(m.write(x, y, coefficients), theirs, rtol=0, atol=1e-12)
    with pytest.raises(ShapeError, match="d_model=7 is not a multiple of fractions=3"):
        make(7)


PER_TOKEN = StateUpdate(SquaredError(), monoid=Diagonal("a"), algorithm=Step(rate=Per("beta")))


def test_rates_per_token_and_per_stream() -> None:
    """Every free parameter moves by a projection of RMSNorm(vec X), through the chart of its domain."""
    names = ("pre", "post", "a", "beta")
    make = mixer(PER_TOKEN, per_token=names)
    m, constant = make(D, 1, N, dtype=torch.float64), mixer(PER_TOKEN)(D, 1, N, dtype=torch.float64)
    x, y = torch.randn(2, 3, N, D, dtype=torch.float64), torch.randn(2, 3, D, dtype=torch.float64)
    found, plain = (made.write(x, y, made.read(x)[1]) for made in (m, constant))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-14)  # products of other shapes round otherwise
    assert {n for n, p in m.named_parameters() for q in m.dynamic_parameters() if p is q} == {
        f"projections.{name}" for name in names
    }
    for p in m.parameters():
        torch.nn.init.normal_(p, std=0.3)
    hat = x.flatten(-2) / (x.flatten(-2).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    raw = {n: hat @ m.projections[n].mT for n in names}
    pre, post = m.pre + raw["pre"], m.post + raw["post"]
    a, beta = torch.sigmoid(m.rates["a"] + raw["a"]), torch.exp(m.rates["beta"] + raw["beta"][..., 0])
    seen, coefficients = m.read(x)
    torch.testing.assert_close(seen, torch.einsum("...j,...jd->...d", pre, x), rtol=0, atol=1e-12)
    error = torch.einsum("...j,...jd->...d", post, x) - y
    theirs = a[..., None] * x - beta[..., None, None] * post[..., None] * error[..., None, :]
    torch.testing.assert_close(m.write(x, y, coefficients), theirs, rtol=0, atol=1e-12)
    with pytest.raises(ShapeError, match="per_token .'gamma'. is not among"):
        make.__class__(PER_TOKEN, True, per_token=("gamma",))(D)


def test_what_enters_may_stand_in_the_first_stream_alone() -> None:
    m = mixer(StateUpdate(Alignment()), entry="first")(D, 0, N, dtype=torch.float64)
    h = torch.randn(2, 3, D, dtype=torch.float64)
    x = m.expand(h)
    assert torch.equal(x[..., 0, :], h) and not x[..., 1:, :].any() and x.shape == (2, 3, N, D)


def test_pairs_need_an_even_number_of_streams() -> None:
    factory = mixer(StateUpdate(Alignment(), monoid=Rotation(Per("angle", "pair", "real"))))
    with pytest.raises(ShapeError, match="n must be even, got 3"):
        factory(D, 0, 3)


def test_euclidean_is_the_default_geometry_here_too() -> None:
    assert mixer(StateUpdate(Alignment(), Euclidean())) == mixer(StateUpdate(Alignment()))


def test_layers_are_counted() -> None:
    """The k-th write of S + v k^T / k weighs 1/k."""
    made = mixer(StateUpdate(Alignment(), algorithm=Step(1.0 / Count())))
    mixers = [made(D, index, streams=N).double() for index in range(3)]
    hidden, y = (torch.randn(2, 5, D, dtype=torch.float64) for _ in range(2))
    streams = mixers[0].expand(hidden)
    written = []
    for one in mixers:
        assert isinstance(streams, State)
        before = streams.theta[0]
        _, coefficients = one.read(streams)
        streams = one.write(streams, y, coefficients)
        assert isinstance(streams, State)
        written.append((streams.theta[0] - before) / (y[..., None] * coefficients.signal["k"][..., None, :]))
    for number, weight in enumerate(written, 1):
        torch.testing.assert_close(weight, torch.full_like(weight, 1.0 / number))
