"""`axes.select` and `axes.explain` of anything, for any device: here, elsewhere, named, and what is neither."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import axes
from axes import catalogue, depth, optim, sequence
from axes.core.algorithms import Step
from axes.core.costs import Given, Linear
from axes.core.rates import Per
from axes.core.state_update import StateUpdate
from axes.errors import AxesError
from axes.optim.engine import generated
from axes.routes import dispatch
from axes.routes.choice import NoImplementation, Target
from tests.drawn import drawn

SGD = StateUpdate(Given(), algorithm=Step(Per("lr")))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def test_one_answer_by_every_name() -> None:
    for entry in (catalogue.get(name) for name in ("muon", "adamw", "gla", "mhc")):
        assert axes.select(entry.name) == axes.select(entry) == axes.select(entry.cls)
        assert axes.explain(entry.name) == axes.explain(entry) == axes.explain(entry.cls)
    gla, mhc = catalogue.get("gla"), catalogue.get("mhc")
    layer = sequence.layer(gla.update)
    assert axes.select(gla.update) == axes.select("gla") == axes.select(layer) == axes.select(layer(16, heads=2))
    mixer = depth.mixer(mhc.update)
    assert axes.select(mixer) == axes.select(mixer(8)) == axes.select("mhc")
    assert axes.select(SGD) == axes.select(optim.optimizer(SGD)) == axes.select(optim.optimizer(SGD)(model()))


def test_an_optimizer_answers_for_every_group() -> None:
    text = axes.explain(optim.Muon(model()))
    assert "group 0 (muon) stacks by torch" in text and "group 1 (adamw) entrywise by torch" in text
    parameters = [nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "foreach": False}]
    text = axes.explain(optim.AdamW(groups))  # type: ignore[arg-type]
    assert "group 0 (adamw) entrywise by torch on cpu, float32" in text
    assert "group 1 (adamw) interpreter by reference on cpu, bfloat16: foreach=False asks for the tuple itself" in text
    mixed = axes.explain(optim.AdamW(parameters))
    assert "on cpu, float32: torch's own" in mixed and "on cpu, bfloat16: torch's own" in mixed
    assert axes.select(optim.optimizer(SGD)([nn.Parameter(torch.ones(3))], maximize=True)).route == "entrywise"


def test_a_tuple_on_another_axis_stands_beside_its_own() -> None:
    for name, axis, moved, runs in (
        ("muon", "sequence", "* cost       [Given() -> SquaredError()]", "asks for     decay (scalar, unit), beta"),
        ("delta-net", "data", "* algorithm  Step(rate=Per(name=['beta' -> 'lr']))", "entrywise by torch on cpu"),
        ("adam", "depth", "* memory     [Parameter() -> Matrix()]", "one step a sublayer"),
    ):
        text = axes.explain(name, axis=axis)  # type: ignore[arg-type]
        pair, _, rest = text.partition("\n\n")
        assert moved in pair.splitlines() and "  h          Euclidean()" in pair.splitlines()
        assert rest.startswith("tuple        StateUpdate(") and runs in rest
    with pytest.raises(AxesError, match="List is a memory of its own"):
        axes.explain("softmax-attention", axis="data")


def test_an_option_that_changes_between_steps_changes_the_answer_and_the_step() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([p], lr=0.1)
    for foreach, route in ((True, "entrywise"), (False, "interpreter"), (True, "entrywise")):
        optimizer.param_groups[0]["foreach"] = foreach
        p.grad = torch.ones(3)
        optimizer.step()
        assert axes.select(optimizer).route == route
        group = optimizer.param_groups[0]
        known = optimizer._batches.known(group, optimizer.form_for(group), [p], optimizer.state)
        assert (known is not None) == foreach


def test_other_tensors_than_torchs_own_are_no_kernel() -> None:
    class Own(torch.Tensor):
        pass

    ps = [nn.Parameter(torch.ones(4).as_subclass(Own)), nn.Parameter(torch.ones(4))]
    text = axes.explain(optim.AdamW(ps), device="cuda:sm_90")
    assert "entrywise by torch" in text and "arithmetic of its own" in text and "entrywise by triton" in text


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions about a GPU that is not here, of which nothing is called."""
    if torch.cuda.is_available():
        pytest.skip("a machine without a GPU answers for one")

    def never(*args: object) -> None:
        raise AssertionError("CUDA was initialised")

    monkeypatch.setattr(torch.cuda, "_lazy_init", never)
    monkeypatch.setattr(generated, "_TRITON", True)
    monkeypatch.setattr("axes.routes.kernel_terms._TRITON", True, raising=False)


DEVICES = itertools.cycle(("cuda", "cuda:1", torch.device("cuda"), "cuda:sm_80", "cuda:sm_120"))
ELSEWHERE = [pytest.param(x, device, id=f"{x.axis} {x.name}") for x, device in zip(catalogue.entries(), DEVICES)]  # noqa: B905


@pytest.mark.parametrize(("entry", "device"), drawn(ELSEWHERE, 3))
def test_what_an_entry_runs_on_a_gpu_that_is_not_here(
    entry: catalogue.Entry, device: str | torch.device, elsewhere: None
) -> None:
    text = axes.explain(entry, device, torch.bfloat16)
    assert "(sm_" in text and " on cpu" not in text


def test_a_gpu_that_is_not_here(elsewhere: None) -> None:
    assert axes.select("adamw", "cuda")[:2] == ("entrywise", "triton")
    assert axes.select("muon", "cuda")[:2] == ("stacks", "triton")
    assert axes.select("gated-delta-net", "cuda")[:2] == ("chain", "triton")
    assert axes.select("titans", "cuda")[:2] == ("cascade", "triton")
    assert axes.select("moneta", "cuda")[:2] == ("cascade", "torch")
    ways = {"mhc": "triton", "jpmhc": "triton", "pre-norm": "torch", "frac-connections": "reference"}
    for name, way in ways.items():
        assert axes.select(name, "cuda", torch.bfloat16).implementation == way
    assert axes.select("mhc", "cuda", torch.float64)[:2] == axes.select("mhc")[:2] == ("chain", "torch")


def test_which_kernels_of_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axes.routes.kernel_terms._TRITON", True, raising=False)
    low = torch.bfloat16
    assert "forms for Hopper where widths are 64 or 128" in axes.select("gla", "cuda:sm_90", low).reason
    assert "portable kernels: the GPU is no Hopper" in axes.select("gla", "cuda:sm_80", low).reason
    assert "portable kernels: the forms for Hopper multiply 16-bit" in axes.select("gla", "cuda:sm_90").reason
    assert "portable kernels: the block family" in axes.select("titans-matrix", "cuda:sm_90", low).reason


def test_targets() -> None:
    assert Target.of("cpu") == Target(torch.device("cpu")) and str(Target.of("cpu")) == "cpu"
    assert Target.of("cuda:sm_80") == (torch.device("cuda"), (8, 0), "named")
    assert Target.of("cuda:sm_120").capability == (12, 0) and str(Target.of("cuda:sm_120")) == "cuda (sm_120)"
    assert Target.of(Target.of("meta")) is Target.of("meta")
    if not torch.cuda.is_available():
        assert str(Target.of("cuda:1")) == "cuda:1 (sm_90, assumed)"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: axes.select("gla", "gpu"), "torch knows no device 'gpu': give cpu, cuda"),
        (lambda: axes.select("gla", "cuda:sm_x"), "cuda:sm_80"),
        (lambda: axes.select("gla", 3.5), "torch knows no device 3.5"),
        (lambda: axes.select("gla", dtype="bfloat16"), "dtype must be a torch.dtype"),
        (lambda: axes.select(catalogue.get("gla").update, dtype="bfloat16"), "dtype must be a torch.dtype"),
        (lambda: axes.select("gated-deltanet"), "did you mean gated-delta-net"),
        (lambda: axes.select(3), "3 has no tuple that could be run"),
        (lambda: axes.select(torch.optim.AdamW), "has no tuple that could be run"),
        (lambda: axes.select(optim.Optimizer), "has no tuple that could be run"),
        (lambda: axes.explain(sequence.SequenceLayer), "has no tuple that could be run"),
        (lambda: axes.select(StateUpdate(Linear())), "is a filter or a statistic"),
        (lambda: axes.select(optim.AdamW([nn.Parameter(torch.ones(0))])), "no parameter that would be stepped"),
        (lambda: axes.select("muon", shapes={"k": (1, 1, 1, 4)}), "shapes and time are of a signal"),
    ],
)
def test_what_cannot_be_answered_is_said_in_a_sentence(ask: Callable[[], object], says: str) -> None:
    with pytest.raises(AxesError, match=says.replace("(", r"\(")) as error:
        ask()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ("muon", "adamw", "gla", "mhc", "titans"))
def test_a_named_implementation_runs_or_raises(name: str) -> None:
    assert axes.select(name, implementation="reference")[:2] == ("interpreter", "reference")
    with pytest.raises(NoImplementation, match="not one of reference, torch, triton"):
        axes.select(name, implementation="fastest")  # type: ignore[arg-type]
    with pytest.raises(NoImplementation, match="triton|Triton"):
        axes.select(name, implementation="triton")
    assert axes.select(name, implementation="torch").implementation == "torch"


def test_a_block_names_the_implementation_of_sequences_alone() -> None:
    """Optimizers and mixers do not look at it, and say so."""
    with dispatch.implementation("reference"):
        assert "interpreter by reference" in axes.explain("gla").split("one token")[0]
        assert "entrywise by torch" in axes.explain("adamw")
