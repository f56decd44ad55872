"""SOAP against explicit rotations, and NorMuon and Polar Express beside published code and exact polar factors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from axes import optim
from axes.errors import AxesError
from axes.optim.rules import wrappers

MATRICES = ((4, 6), (6, 4), (5, 5), (8, 3))
SQUARES = ((4, 4), (5, 5))  # full rank from the first gradient: the bases of a null space have nothing to agree on
STEPS = 30
QRS = ("cholesky", "householder")


def walk(make: Any, shapes: tuple[tuple[int, ...], ...] = MATRICES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
    optimizer = make(ps)
    for _ in range(STEPS):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.3 * p.detach()
        optimizer.step()
    return [p.detach() for p in ps]


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def group(rule: str) -> Any:
    return lambda ps: [{"params": ps, "rule": rule}]


class ExplicitSOAP:
    """Adam in the eigenbasis of running averages of g g^T and g^T g as they were every few steps, written out.

    The first gradient only fills the averages; Adam begins at the second.
    """

    def __init__(
        self,
        ps: list[Tensor],
        lr: float,
        betas: tuple[float, float],
        beta: float,
        eps: float,
        decay: float,
        refresh: int,
    ):
        self.ps, self.lr, self.betas, self.beta, self.eps, self.decay, self.t = ps, lr, betas, beta, eps, decay, 0
        self.refresh, self.bases = refresh, [(torch.empty(0), torch.empty(0))] * len(ps)
        self.left = [torch.zeros(p.shape[0], p.shape[0], dtype=p.dtype) for p in ps]
        self.right = [torch.zeros(p.shape[1], p.shape[1], dtype=p.dtype) for p in ps]
        self.m, self.v = [torch.zeros_like(p) for p in ps], [torch.zeros_like(p) for p in ps]

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        b1, b2 = self.betas
        for i, p in enumerate(self.ps):
            g = p.grad
            assert g is not None
            self.left[i] = self.beta * self.left[i] + (1 - self.beta) * g @ g.T
            self.right[i] = self.beta * self.right[i] + (1 - self.beta) * g.T @ g
            if self.t % self.refresh == 1 % self.refresh:
                ql, qr = (torch.linalg.eigh(x).eigenvectors for x in (self.left[i], self.right[i]))
                self.bases[i] = ql, qr
            p.mul_(1 - self.lr * self.decay)
            if self.t == 1:
                continue
            ql, qr = self.bases[i]
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * (ql.T @ g @ qr) ** 2
            m, v = self.m[i] / (1 - b1 ** (self.t - 1)), self.v[i] / (1 - b2 ** (self.t - 1))
            d = ql @ ((ql.T @ m @ qr) / (v.sqrt() + self.eps)) @ qr.T
            p.sub_(self.lr * d)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("betas", [(0.95, 0.95), (0.0, 0.9)])
@pytest.mark.parametrize("refresh", [1, 4])
def test_soap_against_explicit_rotations(refresh: int, betas: tuple[float, float], foreach: bool) -> None:
    shapes = MATRICES if refresh == 1 else SQUARES
    options: dict[str, Any] = {"lr": 0.05, "betas": betas, "eps": 1e-3, "refresh": refresh}
    ours = walk(
        lambda ps: optim.SOAP(
            group("soap")(ps), shampoo_beta=0.9, weight_decay=0.1, basis="eigh", foreach=foreach, **options
        ),
        shapes,
    )
    assert gap(ours, walk(lambda ps: ExplicitSOAP(ps, beta=0.9, decay=0.1, **options), shapes)) < 1e-10


@pytest.mark.parametrize("qr", ["cholesky", "householder"])
@pytest.mark.parametrize("refresh", [1, 3, 10])
def test_soap_against_the_authors_code_as_published_in_pytorch_optimizer(refresh: int, qr: Any) -> None:
    """From the first gradient on, which fills statistics and moves nothing. Their QR is in float32.

    Of the null space of a statistic they take the basis that rounding leaves: they are given ours.
    """
    shapes = SQUARES if refresh == 1 else MATRICES
    generator = torch.Generator().manual_seed(7)
    ps = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]
    qs = [nn.Parameter(p.detach().clone()) for p in ps]
    options: dict[str, Any] = {"lr": 0.05, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "eps": 1e-12, "weight_decay": 0.0}
    ours = optim.SOAP(group("soap")(ps), refresh=refresh, qr=qr, **options)
    theirs = pytorch_optimizer.SOAP(qs, precondition_frequency=refresh, **options)
    for t in range(STEPS):
        for p, q in zip(ps, qs, strict=True):
            g = torch.randn(p.shape, generator=generator, dtype=torch.float64) + 0.3 * q.detach()
            p.grad, q.grad = g.clone(), g.clone()
        ours.step()
        theirs.step()
        if t == 0:
            for p, q in zip(ps, qs, strict=True):
                theirs.state[q]["Q"] = [ours.state[p][f"via.0.stats.{i}.held"].flip(1) for i in (0, 1)]
    assert gap([p.detach() for p in ps], [q.detach() for q in qs]) < 1e-5


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("size", [8, 64])
def test_the_first_steps_are_no_rounding_noise(size: int, foreach: bool) -> None:
    """In its own eigenbases a gradient is diagonal: everything beside the diagonal is rounding, and v its square."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(3, size, size, generator=generator)

    def moves(dtype: torch.dtype) -> list[Tensor]:
        p = nn.Parameter(torch.zeros(size, size, dtype=dtype))
        optimizer = optim.SOAP(group("soap")([p]), lr=1.0, weight_decay=0.0, foreach=foreach)
        seen = [p.detach().clone()]
        for g in gradients:
            p.grad = g.to(dtype)
            optimizer.step()
            seen.append(p.detach().clone())
        return [(b - a).double() for a, b in itertools.pairwise(seen)]

    single, double = moves(torch.float32), moves(torch.float64)
    assert not single[0].any() and not double[0].any()
    for a, b in zip(single[1:], double[1:], strict=True):
        assert (a - b).norm() < 1e-3 * b.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 0.5)])
@pytest.mark.parametrize("basis", ["power-qr", "eigh"])
def test_rounding_does_not_choose_the_basis_of_a_null_space(basis: Any, dtype: torch.dtype, bound: float) -> None:
    """Gradients of low rank, and the same with another last bit, as other layouts and tensor rates leave them.

    In units of lr; entries moved by one unit and more where a library's decomposition chose the basis.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 27), (27, 8), (16, 16))
    thin = [
        [(torch.randn(m, 3, generator=generator), torch.randn(3, n, generator=generator)) for m, n in shapes]
        for _ in range(6)
    ]

    def path(noise: float) -> list[Tensor]:
        ps = [nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes]
        optimizer = optim.SOAP(group("soap")(ps), lr=1.0, refresh=2, basis=basis, weight_decay=0.0, eps=1e-3)
        rounding = torch.Generator().manual_seed(1)
        for step in thin:
            for p, (a, b) in zip(ps, step, strict=True):
                g = a.to(dtype) @ b.to(dtype)
                p.grad = g + noise * g.abs().max() * (torch.rand(g.shape, generator=rounding) - 0.5).to(dtype)
            optimizer.step()
        return [p.detach().double() for p in ps]

    assert gap(path(0.0), path(torch.finfo(dtype).eps)) < bound


def test_the_two_orthonormalisations_take_the_same_steps() -> None:
    paths = [walk(lambda ps, qr=qr: optim.SOAP(group("soap")(ps), lr=0.05, refresh=2, qr=qr)) for qr in QRS]  # type: ignore[misc]
    assert gap(*paths) < 1e-9


def test_lower_precision_is_another_path_close_by() -> None:
    def path(precision: Any) -> list[Tensor]:
        options: dict[str, Any] = {"lr": 0.01, "eps": 1e-3, "basis": "eigh", "precision": precision}
        return walk(lambda ps: optim.SOAP(group("soap")(ps), **options), SQUARES)

    exact = path("input")
    for precision, bound in (("bfloat16x3", 1e-3), ("tf32", 0.1)):
        assert 1e-9 < gap(path(precision), exact) < bound, precision


def test_soap_on_diagonal_gradients_is_adam() -> None:
    """Of sizes so far apart that the eigenvalues keep their order."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    p, q = (nn.Parameter(torch.eye(4, dtype=torch.float64)) for _ in range(2))
    soap = optim.SOAP(group("soap")([p]), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    adam = torch.optim.AdamW([q], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    with torch.no_grad():
        q.mul_(1 - 0.01 * 0.1)  # a decay waits for nothing
    for t in range(STEPS):
        g = torch.diag(scale * (0.5 + torch.rand(4, generator=generator, dtype=torch.float64)))
        p.grad, q.grad = g.clone(), g.clone()
        soap.step()
        if t:  # the first gradient is for the bases
            adam.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=1e-12)


# ---- grafting onto Shampoo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("graft", ["sgd", "momentum", "adagrad", "rmsprop", "adam"])
def test_a_grafted_step_has_shampoos_direction_and_the_other_norm(graft: Any, foreach: bool) -> None:
    """Both rules written out on the gradients of the grafted one; the other rules by torch where it has them."""
    lr, (b1, b2), eps = 0.05, (0.9, 0.95), 1e-3
    generator = torch.Generator().manual_seed(7)
    p = nn.Parameter(torch.randn(4, 6, generator=generator, dtype=torch.float64))
    plain = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    other = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    betas = (b1, 1.0 if graft in ("sgd", "momentum", "adagrad") else b2)
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": 1e-4, "foreach": foreach}
    grafted = optim.Shampoo(group("shampoo")([p]), graft=graft, graft_eps=eps, **options)
    shampoo = optim.Shampoo(group("shampoo")([plain]), **options)
    rule: Any = {
        "sgd": lambda: torch.optim.SGD([other], lr),
        "momentum": lambda: torch.optim.Adam([other], lr, (b1, 0.0), eps=1e12),  # lr m / eps
        "adagrad": lambda: torch.optim.Adagrad([other], lr, eps=eps),
        "rmsprop": lambda: torch.optim.Adam([other], lr, (0.0, b2), eps=eps),
        "adam": lambda: torch.optim.Adam([other], lr, (b1, b2), eps=eps),
    }[graft]()
    for _ in range(STEPS):
        g = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        before = [x.detach().clone() for x in (p, plain, other)]
        for x, optimizer in ((p, grafted), (plain, shampoo), (other, rule)):
            x.grad = g.clone()
            optimizer.step()
        moved, direction, size = (x.detach() - y for x, y in zip((p, plain, other), before, strict=True))
        norm = size.norm() * (1e12 if graft == "momentum" else 1.0)
        tolerance = 1e-9 if graft == "momentum" else 1e-12
        torch.testing.assert_close(moved, direction / direction.norm() * norm, rtol=tolerance, atol=1e-11)


def test_grafts_that_make_no_sense_are_refused() -> None:
    with pytest.raises(AxesError, match="adagrad"):
        optim.Shampoo.declare(graft="adagrat")  # type: ignore[arg-type]
    for betas, graft in (((0.0, 1.0), "momentum"), ((0.9, 1.0), "adam"), ((0.9, 1.0), "rmsprop")):
        with pytest.raises(AxesError, match="do not average"):
            optim.Shampoo.declare(betas, graft=graft)  # type: ignore[arg-type]
    grafted = optim.Shampoo.declare((0.9, 0.95), graft="adam", graft_eps=1e-8)
    other = optim.AdamW.declare((0.9, 0.95))
    assert wrappers.grafting(optim.Shampoo.declare((0.9, 0.95)), other) == grafted


# ---- relatives of Muon -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_normuon_against_pytorch_optimizer(nesterov: bool, scale: Any, foreach: bool) -> None:
    """The same operations in float64 around the same bfloat16 iteration, but for the place of the constant s."""
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "nesterov": nesterov, "weight_decay": 0.1}
    ours = walk(lambda ps: optim.NorMuon(group("normuon")(ps), scale=scale, form="direct", foreach=foreach, **options))
    theirs = walk(
        lambda ps: pytorch_optimizer.NorMuon(
            [{"params": ps, "use_muon": True}], foreach=False, use_adjusted_lr=scale != "original", **options
        )
    )
    # a batch of matrices rounds differently in bfloat16
    assert gap(ours, theirs) < (5e-2 if foreach else 1e-7)


def test_normuon_evens_out_rows_and_keeps_the_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(64, 16, generator=generator, dtype=torch.float64)
    moved = {}
    for cls, rule in ((optim.Muon, "muon"), (optim.NorMuon, "normuon")):
        p = nn.Parameter(torch.zeros_like(g))
        p.grad = g
        cls([{"params": [p], "rule": rule}], lr=1.0, precision="input", weight_decay=0.0).step()
        moved[rule] = p.detach()
    torch.testing.assert_close(moved["normuon"].norm(), moved["muon"].norm(), rtol=1e-8, atol=0)
    rows = moved["normuon"].norm(dim=1)
    torch.testing.assert_close(rows, rows.mean().expand(64), rtol=1e-8, atol=0)
    assert moved["muon"].norm(dim=1).std() > 0.1 * moved["muon"].norm(dim=1).mean()


@pytest.mark.parametrize("foreach", [False, True])
def test_adamuon_against_pytorch_optimizer(foreach: bool) -> None:
    """Which has the first version: no signs, no nesterov. It corrects the bias of v, which the norm takes out."""
    given: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    ours = walk(
        lambda ps: optim.AdaMuon(
            group("adamuon")(ps), momentum=0.9, beta2=0.9, sign=False, nesterov=False, foreach=foreach, **given
        )
    )
    peer: dict[str, Any] = {"betas": (0.9, 0.9), "foreach": False, **given}
    theirs = walk(lambda ps: pytorch_optimizer.AdaMuon([{"params": ps, "use_muon": True}], **peer))
    # it divides by the root in bfloat16 too; and a batch of matrices rounds differently
    assert gap(ours, theirs) < (0.2 if foreach else 2e-3)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_adamuon_against_its_recurrence(nesterov: bool, foreach: bool) -> None:
    lr, mu, b2, decay = 0.02, 0.9, 0.8, 0.1
    ours = walk(
        lambda ps: optim.AdaMuon(
            group("adamuon")(ps), lr, mu, b2, decay, nesterov=nesterov, precision="input", foreach=foreach
        )
    )

    def theirs(ps: list[nn.Parameter]) -> Any:
        kept = [(torch.zeros_like(p), torch.zeros_like(p)) for p in ps]

        class Written(torch.optim.Optimizer):
            def step(self, closure: Any = None) -> None:
                for p, (m, v) in zip(ps, kept, strict=True):
                    assert p.grad is not None
                    m.mul_(mu).add_(p.grad)
                    x = (mu * m + p.grad if nesterov else m).sign()
                    x = x.T if len(x) > len(x.T) else x
                    x = x / x.norm()
                    for _ in range(5):
                        a = x @ x.T
                        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                    o = x if x.shape == p.shape else x.T
                    v.mul_(b2).add_((1 - b2) * o * o)
                    o = o / v.sqrt()
                    p.data = (1 - lr * decay) * p - lr * 0.2 * p.numel() ** 0.5 * o / o.norm()

        return Written(ps, {})

    assert gap(ours, walk(theirs)) < 1e-5  # 1e-8 beside a root of about 0.3


def test_polar_express_is_closer_to_the_polar_factor_than_the_quintic() -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(128, 64, generator=generator, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    errors = {}
    for method in ("newton-schulz", "polar-express"):
        p = nn.Parameter(torch.zeros_like(g))
        p.grad = g
        muon = optim.Muon(group("muon")([p]), lr=1.0, scale=None, precision="input", method=method, weight_decay=0.0)  # type: ignore[arg-type]
        muon.step()
        errors[method] = float((p.detach() + u @ vh).norm() / 8)
    assert errors["polar-express"] < 0.15 < errors["newton-schulz"] < 0.3, errors


def test_polar_express_refuses_coefficients_of_the_other() -> None:
    with pytest.raises(AxesError, match="coefficients has no effect"):
        optim.Muon.declare(method="polar-express", ns_coefficients=(2.0, -1.5, 0.5))


def test_muon_with_constant_norm_is_a_wrapped_rule() -> None:
    p = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    norm = p.detach().norm()
    update = wrappers.rotational(optim.Muon.declare(precision="input"))
    optimizer = optim.optimizer(update)(group("matrix")([p]), lr=0.1)
    for _ in range(5):
        p.grad = p.detach().sin()
        optimizer.step()
    torch.testing.assert_close(p.detach().norm(), norm, rtol=1e-13, atol=0)


def test_every_parameter_counts_for_itself() -> None:
    """Those of one shape are interpreted together at the first step, and stepped as a stack from then on."""
    ps = [nn.Parameter(torch.eye(3) + i) for i in range(3)]
    optimizer = optim.SOAP(group("soap")(ps))
    for step in range(1, 4):
        for p in ps:
            p.grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        assert {int(x) for p in ps for n, x in optimizer.state[p].items() if n.endswith("count")} == {step}
