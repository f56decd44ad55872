"""`axes bench depth`: forms of others compute the mixer, floors count each byte once, wrong rows are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from axes import catalogue
from axes.bench import depth, depth_contenders, depth_report
from axes.bench.depth import Plan, Row, Size, check, drawn, inputs, rows
from axes.bench.depth_contenders import Form, contenders, ours
from axes.bench.depth_floors import account
from axes.cli import main
from axes.depth.base import DepthMixer
from axes.errors import AxesError

CPU = torch.device("cpu")
NAMES = [entry.name for entry in catalogue.entries("depth")]
SMALL = Size(7, 24, 4)
PLAIN = tuple(who for who in depth_contenders.WHO if who.startswith("torch"))


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axes.bench.timing._SECONDS", 0.0)


def checked(name: str, who: str, size: Size = SMALL, dtype: torch.dtype = torch.float32) -> Any:
    mixer = drawn(name, size, CPU, 0)
    values, y = inputs(mixer, size, dtype, CPU, 0)
    form = contenders(name, (who,))[who](mixer, dtype)
    return check(form, mixer, values, y)


CASES = [(name, who) for name in NAMES for who in contenders(name, (depth_contenders.OURS, *PLAIN))]
CASES.append(("mhc", depth_contenders.REFERENCE))


@pytest.mark.parametrize(("name", "who"), CASES, ids=lambda x: x)
def test_every_form_computes_the_mixer(name: str, who: str) -> None:
    for dtype, size, bound in (
        (torch.float32, SMALL, 2e-5),
        (torch.float32, Size(5, 30, 3), 2e-5),
        (torch.bfloat16, SMALL, 2.5e-2),
    ):
        verdict = checked(name, who, size, dtype)
        assert verdict.right and verdict.error < bound, (verdict, dtype, size)


# ---- kernels of others, as their documentation describes them --------------------------------------------------------


def sinkhorn(logits: Tensor) -> Tensor:
    for _ in range(20):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


def coeffs(x: Tensor, phi: Tensor, b: Tensor, *alphas: Tensor, post_mult: float, **options: Any) -> tuple[Tensor, ...]:
    n = x.shape[-2]
    logits = F.rms_norm(x.flatten(-2).float(), (n * x.shape[-1],), eps=1e-6) @ phi.float()
    pre, post, res = (a * part + c for a, part, c in zip(alphas, logits.split([n, n, n * n], -1),
                                                         b.split([n, n, n * n]), strict=True))  # fmt: skip
    return torch.sigmoid(pre), post_mult * torch.sigmoid(post), sinkhorn(res.unflatten(-1, (n, n)))


LIGER = SimpleNamespace(
    liger_mhc_coeffs=coeffs,
    liger_mhc_pre=lambda x, pre: torch.einsum("...n,...nc->...c", pre, x.float()).to(x.dtype),
    liger_mhc_post_res=lambda x, f, post, res: (
        torch.einsum("...oi,...ic->...oc", res, x.float()) + post[..., None] * f.float()[..., None, :]
    ).to(x.dtype),
)


def scale(h: Tensor, alpha: Tensor, beta: Tensor, ms: Tensor, n: int) -> tuple[Tensor, ...]:
    rates = torch.cat((alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)))
    logits = h.float()[:, : 2 * n + n * n] * rates * (ms + 1e-6).rsqrt()[:, None] + beta
    pre, post, res = logits.split([n, n, n * n], -1)
    return torch.sigmoid(pre), 2 * torch.sigmoid(post), res


ENGINE = SimpleNamespace(
    mhc_fused_projection=lambda x, phi: (F.pad(x @ phi.mT, (0, 8)), x.float().square().mean(-1)),
    mhc_fused_scale=scale,
    mhc_fused_sinkhorn=lambda res, n, recompute, iters: sinkhorn(res),
    mhc_fused_aggregate=lambda x, pre, n: (x @ pre[..., None]).squeeze(-1),
    mhc_fused_expand_combine=lambda f, bias, post, x, res, n: f[..., None] @ post[..., None, :] + x @ res,
)


def attnres(query: Tensor, residuals: list[Tensor], gain: Tensor, rms_eps: float) -> Tensor:
    values = torch.stack(residuals)
    keys = F.rms_norm(values, query.shape, gain, rms_eps)
    return ((keys @ query).softmax(0)[..., None] * values).sum(0)


@pytest.mark.parametrize(
    ("name", "who", "module"),
    (
        ("mhc", depth_contenders.LIGER, LIGER),
        ("mhc", depth_contenders.ENGINE, ENGINE),
        ("attention-residuals", depth_contenders.FLA, SimpleNamespace(fused_attnres=attnres)),
    ),
)
def test_kernels_of_others_are_called_in_their_layout(
    name: str, who: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth_contenders, "library", lambda *_: module)
    verdict = checked(name, who)
    assert verdict.right and verdict.error < 1e-5, verdict


def test_what_is_not_installed_is_said(tmp_path: Path) -> None:
    plan = Plan(("mhc",), (SMALL,), "float32", "cpu", (depth_contenders.LIGER, depth_contenders.ENGINE))
    assert [row.refused for row in rows(depth.measure(plan, tmp_path))] == ["not installed"] * 2


# ---- floors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "forward", "both"),
    (
        ("residual", 3, 6),
        ("pre-norm", 5, 9),
        ("post-norm", 3, 9),
        ("mhc", 14, 41),  # of 4 streams: coefficients and read 5, write 9; backward 14 and 13
        ("hyper-connections", 14, 41),
        ("ihc", 14, 33),
        ("residual-matrix", 14, 33),
        ("frac-connections", 5, 14),
        ("attention-residuals", 7, 20),
        ("denseformer", 7, 17),
    ),
)
def test_floors_count_each_number_once(name: str, forward: int, both: int) -> None:
    mixer = drawn(name, SMALL, CPU, 0)
    values, _ = inputs(mixer, SMALL, torch.float32, CPU, 0)
    found = account(mixer, ours(mixer, torch.float32).enter(values))
    assert (found.forward, found.both) == (forward * SMALL.width, both * SMALL.width)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_table_a_page_a_file_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"bench depth --mixer residual --mixer mhc --size 6,8,2 --size 5,8,3 --device cpu --out {tmp_path}"
    with pytest.raises(SystemExit, match="0"):
        main(line.split())
    shown = capsys.readouterr().out
    assert "torch, as Hugging Face" in shown and "not installed" in shown and "1.0x" in shown
    found = rows(json.loads((tmp_path / depth.FILE).read_text()))
    assert {(r.mixer, r.size) for r in found} == {(m, s) for m in ("residual", "mhc") for s in ("6,8,2", "5,8,3")}
    for row in found:
        if row.refused:
            assert row.who in (depth_contenders.LIGER, depth_contenders.ENGINE)
            continue
        assert row.forward and row.both and row.both > row.forward / 10 and row.launches and row.error is not None
        assert row.forward_floor and row.both_floor and row.forward_floor < row.both_floor and row.peak is None
        assert row.kept is not None and (row.kept > 8) is (row.mixer == "mhc")
    assert (tmp_path / "depth.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "depth.md").read_text().count("\n") == 4 + len(found)


def test_a_stopped_run_continues_with_the_missing_rows(tmp_path: Path) -> None:
    plan = Plan(("residual", "denseformer"), (SMALL,), "float32", "cpu")

    def stop(what: str, done: int, of: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        depth.measure(plan, tmp_path, stop)
    first = json.loads((tmp_path / depth.FILE).read_text())["rows"]
    results = depth.measure(plan, tmp_path)
    assert len(first) == 2 and results["rows"][:2] == first and len(results["rows"]) == 6
    again: list[str] = []
    depth.measure(plan, tmp_path, lambda what, *_: again.append(what))
    assert again == ["done"]


def off_output(form: Form) -> Form:
    def run(streams: Any, y: Tensor) -> tuple[Tensor, Any]:
        x, new = form.run(streams, y)
        return x, 1.01 * new

    return replace(form, run=run)


def off_gradient(form: Form) -> Form:
    return replace(form, run=lambda streams, y: form.run(streams, 1.1 * y - 0.1 * y.detach()))


@pytest.mark.parametrize(("break_it", "worst"), ((off_output, "new streams"), (off_gradient, "dy")))
def test_a_wrong_row_is_refused(break_it: Any, worst: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(mixer: DepthMixer, dtype: torch.dtype) -> Form:
        return break_it(ours(mixer, dtype))

    monkeypatch.setattr(depth, "contenders", lambda *_: {"wrong": wrong})
    (row,) = rows(depth.measure(Plan(("residual",), (SMALL,), "float32", "cpu"), tmp_path))
    assert row.forward is None and row.refused.startswith(f"{worst} is off by") and row.worst == worst


def test_one_that_raises_or_does_not_fit_is_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (row,) = rows(depth.measure(Plan(("frac-connections",), (Size(4, 9, 4),), "float32", "cpu", ("axes",)), tmp_path))
    assert "not a multiple" in row.refused

    def breaks(mixer: DepthMixer, dtype: torch.dtype) -> Form:
        raise RuntimeError("not on this GPU\nsecond line")

    monkeypatch.setattr(depth, "contenders", lambda *_: {"breaks": breaks})
    (row,) = rows(depth.measure(Plan(("mhc",), (SMALL,), "float32", "cpu"), tmp_path, fresh=True))
    assert row.refused == "RuntimeError: not on this GPU"


@pytest.mark.parametrize(
    ("flags", "says"),
    (
        ("--size 1,2", "three numbers"),
        ("--size 8,16,1", "at least 2"),
        ("--mixer nonsense", "unknown depth mixer"),
        ("--who nobody", "unknown contender"),
        ("--dtype int8", "float32"),
    ),
)
def test_bad_flags_are_explained(flags: str, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "depth", *flags.split(), "--device", "cpu", "--out", str(tmp_path)])
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    with pytest.raises(AxesError):
        Size.parse("a,b,c")


def test_ratios_are_to_the_sum_of_torch_at_the_same_size() -> None:
    found = [
        Row("residual", "s", "float32", "torch", forward=1.0, both=2.0),
        Row("mhc", "s", "float32", "axes", forward=3.0, both=10.0, both_eager=12.0),
    ]
    where = {"device": "NVIDIA H200", "torch": "t", "threads": 1}
    page = depth_report.markdown({"where": where, "ceilings": {"s": 4e12}, "rows": [vars(r) for r in found]})
    assert "copies at 4,000 GB/s" in page and "10 (12)" in page and "5.0x" in page and "s float32" in page
