"""Training: it learns, resumes bit for bit, stops without losing anything, and takes every system of the catalogue."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from axes import catalogue
from axes.errors import AxesError, NotFiniteError
from axes.tasks import demonstration
from axes.tasks.configuration import Configuration, configuration_from_dict
from axes.tasks.curve import Curve, draw_curves
from axes.tasks.interruption import stop_requested
from axes.tasks.language_modelling import curve_of, resume, run, start
from axes.tasks.run_folder import RunFolder
from axes.tasks.sample import generate, load_model
from axes.tasks.schedules import SCHEDULES, Schedule
from axes.tasks.training import Training
from tests.drawn import drawn

TIMES = ("seconds", "tokens_per_second")  # of a machine, not of a run

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_text(TEXT * 200)
    return str(path)


def small(text: str, **changes: Any) -> Configuration:
    settings: dict[str, Any] = {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "streams": 4,
        "context": 24,
        "batch": 4,
        "steps": 12,
        "warmup": 2,
        "validation_windows": 4,
        "eval_every": 5,
        "save_every": 4,
        "device": "cpu",
        "text": (text,),
    }
    return Configuration(**{**settings, **changes})


def train(configuration: Configuration, path: Path) -> RunFolder:
    folder = RunFolder(path)
    run(start(configuration, folder), folder)
    return folder


def stop_at(training: Training, position: int) -> Any:
    return lambda: training.position >= position


def assert_same(left: Any, right: Any) -> None:
    """Equal to the last bit, through every container."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def without_seconds(folder: RunFolder) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in TIMES} for record in folder.read_metrics()]


@pytest.mark.parametrize(
    ("sequence", "optimizer", "depth"),
    [("gated-delta-net", "muon", "mhc"), ("softmax-attention", "adamw", "residual")],
)
def test_resumed_run_is_the_uninterrupted_one(
    text: str, tmp_path: Path, sequence: str, optimizer: str, depth: str
) -> None:
    configuration = small(text, sequence=sequence, optimizer=optimizer, depth=depth)
    whole = train(configuration, tmp_path / "whole")
    parts = RunFolder(tmp_path / "parts")
    first = start(configuration, parts)
    summary = run(first, parts, stop=stop_at(first, 6))
    assert (summary.finished, summary.steps) == (False, 6)
    torch.manual_seed(123)  # another process has another generator state
    second = resume(parts)
    assert second.position == 6
    assert run(second, parts).finished
    assert_same(whole.read_checkpoint(), parts.read_checkpoint())
    assert without_seconds(whole) == without_seconds(parts)


def test_resume_repeats_what_was_logged_after_the_last_checkpoint(text: str, tmp_path: Path) -> None:
    configuration = small(text, optimizer="adamw", depth="residual")
    whole = train(configuration, tmp_path / "whole")
    killed = RunFolder(tmp_path / "killed")
    training = start(configuration, killed)
    run(training, killed, stop=stop_at(training, 4))
    for _ in range(3):  # three steps that no checkpoint knows of, and half a line
        killed.append({"step": training.position + 1, **training.step(), "seconds": 1.0})
    with killed.metrics.open("a") as file:
        file.write('{"step": 8, "lo')
    run(resume(killed), killed)
    assert without_seconds(whole) == without_seconds(killed)


def test_same_seed_same_run_other_seed_other_run(text: str, tmp_path: Path) -> None:
    configuration = small(text, steps=4)
    one, two = train(configuration, tmp_path / "one"), train(configuration, tmp_path / "two")
    other = train(replace(configuration, seed=1), tmp_path / "other")
    assert without_seconds(one) == without_seconds(two)
    assert without_seconds(one) != without_seconds(other)


def test_it_learns(text: str, tmp_path: Path) -> None:
    configuration = small(text, sequence="softmax-attention", optimizer="adamw", depth="residual", steps=80, lr=1e-2)
    folder = train(configuration, tmp_path / "run")
    evaluations = [record["validation_bits_per_byte"] for record in folder.read_metrics() if len(record) == 2]
    assert evaluations[-1] < float(folder.read_config()["corpus"]["unigram_entropy"]) - 1.0
    assert evaluations[-1] < evaluations[0]


def test_run_folder_holds_what_it_promises(text: str, tmp_path: Path) -> None:
    folder = train(small(text), tmp_path / "run")
    assert sorted(file.name for file in folder.path.iterdir()) == [
        ".lock",
        "checkpoint.pt",
        "config.json",
        "curve.png",
        "metrics.jsonl",
        "tuples.json",
    ]
    config = json.loads(folder.config.read_text())
    assert config["configuration"]["seed"] == 0
    assert config["learning_rate"] > 0
    assert len(config["corpus"]["sha256"]) == 64
    assert set(config["versions"]) >= {"python", "torch"}
    state = torch.load(folder.checkpoint, weights_only=True)
    assert state["position"] == 12
    assert folder.curve.read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert [record["step"] for record in records if "validation_bits_per_byte" in record] == [5, 10, 12]
    tuples = json.loads(folder.tuples.read_text())
    assert "StateUpdate(" in json.dumps(tuples["sequence"])
    assert "StateUpdate(" in json.dumps(tuples["data"])
    assert "StateUpdate(" in json.dumps(tuples["depth"])
    assert tuples["data"]["rules"]["head.weight"] == "adamw"
    assert tuples["data"]["rules"]["sublayers.1.gate.weight"] == "muon"


def test_a_batch_is_a_step_whatever_was_evaluated_between(text: str, tmp_path: Path) -> None:
    often = train(small(text, eval_every=1, save_every=1), tmp_path / "often")
    seldom = train(small(text, eval_every=0, save_every=0), tmp_path / "seldom")
    assert_same(often.read_checkpoint()["model"], seldom.read_checkpoint()["model"])


def test_schedules() -> None:
    for name in SCHEDULES:
        factors = [Schedule(name, warmup=4, steps=20)(step) for step in range(20)]
        assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
        assert all(0 < factor <= 1 for factor in factors)
        assert all(later <= earlier for earlier, later in zip(factors[4:], factors[5:], strict=False))
    assert Schedule("linear", 0, 10)(5) == 0.5
    assert Schedule("cosine", 0, 10)(5) == pytest.approx(0.5)
    assert Schedule("cosine", 50, 10)(9) == 1.0  # a warm-up longer than the run


def test_clipping_bounds_the_step(text: str) -> None:
    configuration = small(text, sequence="softmax-attention", optimizer="sgd", depth="residual", warmup=0, lr=1.0)
    moved = {}
    for clip in (0.0, 1e-3):
        training = Training(replace(configuration, clip=clip), configuration.corpus())
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        training.step()
        after = list(training.model.parameters())
        moved[clip] = sum(float((a - b).detach().square().sum()) for a, b in zip(after, before, strict=True)) ** 0.5
    assert moved[1e-3] == pytest.approx(1e-3, rel=1e-2)
    assert moved[0.0] > 10 * moved[1e-3]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "bfloat16-pure"])
def test_other_dtypes(text: str, tmp_path: Path, dtype: str) -> None:
    folder = train(small(text, steps=2, dtype=dtype), tmp_path / dtype)
    weight = folder.read_checkpoint()["model"]["head.weight"]
    others = {"float64": torch.float64, "bfloat16-pure": torch.bfloat16}
    assert weight.dtype == others.get(dtype, torch.float32)


@pytest.mark.parametrize("depth", ["residual", "mhc", pytest.param("post-norm", marks=pytest.mark.slow)])
def test_streams_in_16_bits_beside_weights_in_float32(text: str, tmp_path: Path, depth: str) -> None:
    """Close to autocast alone, resumed bit for bit, read again from its files; nothing that is saved is in 16 bits."""
    configuration = small(text, dtype="bfloat16-streams", depth=depth, sequence="softmax-attention", optimizer="adamw")
    assert configuration_from_dict(json.loads(json.dumps(configuration.as_dict()))) == configuration
    whole, parts = train(configuration, tmp_path / "whole"), RunFolder(tmp_path / "parts")
    first = start(configuration, parts)
    seen: list[torch.dtype] = []
    read = first.model.mixers[1].read
    first.model.mixers[1].read = lambda streams: seen.append(streams.dtype) or read(streams)  # type: ignore[func-returns-value]
    run(first, parts, stop=stop_at(first, 6))
    assert seen and set(seen) == {torch.bfloat16}
    second = resume(parts)
    run(second, parts)
    state = whole.read_checkpoint()
    assert_same(state, parts.read_checkpoint())
    assert without_seconds(whole) == without_seconds(parts)
    tensors = [*state["model"].values(), *(x for s in state["optimizer"]["state"].values() for x in s.values())]
    numbers = [x for x in tensors if isinstance(x, torch.Tensor) and x.is_floating_point()]
    assert {x.dtype for x in numbers} == {torch.float32}
    beside = train(replace(configuration, dtype="bfloat16"), tmp_path / "beside")
    losses = [[r["loss"] for r in folder.read_metrics() if "loss" in r] for folder in (whole, beside)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3) and losses[0] != losses[1]
    assert whole.read_metrics()[-1] == pytest.approx(beside.read_metrics()[-1], rel=5e-3)
    assert len(list(generate(load_model(whole), b"the", 5, 0.0))) == 5


def test_what_a_dtype_takes_counts_in_what_a_machine_must_have(text: str) -> None:
    def needed(dtype: str, **more: Any) -> int:
        return small(text, depth="residual", layers=2, width=64, dtype=dtype, **more).least_bytes()

    def weights(dtype: str) -> int:
        return needed(dtype, context=2) - (needed(dtype, context=3) - needed(dtype, context=2)) * 2

    for wide, narrow in (("float64", "float32"), ("float32", "bfloat16-pure"), ("bfloat16", "bfloat16-streams")):
        assert needed(wide, context=1003) - needed(wide, context=3) == 2 * (
            needed(narrow, context=1003) - needed(narrow, context=3)
        )
    assert weights("bfloat16") == weights("bfloat16-streams") > weights("bfloat16-pure")
    most = small(text, batch=2**20, context=2**12, layers=1, depth="residual")  # 0.5 TB
    with pytest.raises(AxesError, match="need at least .* GB"):
        most.require_machine()
    most.require_machine(64)
    replace(most, accumulate=64).require_machine()


def test_ctrl_c_saves_between_steps(text: str, tmp_path: Path) -> None:
    configuration = small(text, steps=50, save_every=0, eval_every=0)
    folder = RunFolder(tmp_path / "run")
    before = signal.getsignal(signal.SIGINT)
    with stop_requested() as stop:
        training = start(configuration, folder)

        class PressesControlC:
            def began(self, training: Training, folder: RunFolder) -> None: ...

            def prepares(self, what: str) -> None: ...

            def evaluated(self, record: dict[str, Any]) -> None: ...

            def stepped(self, record: dict[str, Any]) -> None:
                if record["step"] == 3:
                    os.kill(os.getpid(), signal.SIGINT)

        summary = run(training, folder, PressesControlC(), stop)
        with pytest.raises(KeyboardInterrupt):  # the second one does not wait
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert (summary.finished, summary.steps) == (False, 3)
    assert folder.read_checkpoint()["position"] == 3
    assert folder.curve.exists()


def test_a_gradient_that_is_not_finite_stops_and_names_its_parameter(text: str, tmp_path: Path) -> None:
    configuration = small(text, sequence="softmax-attention", optimizer="adamw", depth="residual", save_every=2)
    folder = RunFolder(tmp_path / "run")
    training = start(configuration, folder)
    run(training, folder, stop=stop_at(training, 2))
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.model.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NotFiniteError, match=r"step 3: the gradient of 'head\.weight' is not finite"):
        run(training, folder)
    assert_same(dict(training.model.state_dict()), before)
    assert training.position == 2
    assert_same(folder.read_checkpoint()["model"]["head.weight"], before["head.weight"])


def test_a_parameter_that_is_not_finite_is_named_and_never_saved(text: str, tmp_path: Path) -> None:
    configuration = small(text, sequence="softmax-attention", optimizer="adamw", depth="residual")
    folder = RunFolder(tmp_path / "run")
    training = start(configuration, folder)
    with torch.no_grad():
        training.model.embedding.weight[5] = float("inf")
    with pytest.raises(NotFiniteError, match="embedding.weight"):
        training.require_finite_parameters()
    with torch.no_grad():
        training.model.embedding.weight[:] = float("nan")
    with pytest.raises(NotFiniteError, match=r"step 1: the parameter 'embedding\.weight' is not finite"):
        run(training, folder)
    assert torch.isfinite(folder.read_checkpoint()["model"]["embedding.weight"]).all()


@pytest.mark.parametrize("sequence", ["gated-delta-net", "softmax-attention"])
def test_greedy_text_is_that_of_the_parallel_form(text: str, tmp_path: Path, sequence: str) -> None:
    folder = train(small(text, sequence=sequence, dtype="float64", steps=10), tmp_path / "run")
    model = load_model(folder)
    prompt = b"the quick "
    recurrent = list(generate(model, prompt, tokens=30, temperature=0.0))
    written = list(prompt)
    with torch.no_grad():
        for _ in range(30):
            written.append(int(model(torch.tensor([written]))[0][0, -1].argmax()))
    assert recurrent == written[len(prompt) :]


def test_sampling_follows_its_seed(text: str, tmp_path: Path) -> None:
    model = load_model(train(small(text, steps=2), tmp_path / "run"))
    one, same, other = (list(generate(model, b"a", 40, temperature=1.0, seed=seed)) for seed in (0, 0, 1))
    assert one == same != other
    assert len(list(generate(model, b"", tokens=5))) == 5
    assert list(generate(model, b"", tokens=0)) == []


def test_a_run_that_does_not_know_its_corpus_says_so(text: str, tmp_path: Path) -> None:
    folder = train(small(text, steps=2), tmp_path / "run")
    config = json.loads(folder.config.read_text())
    del config["corpus"]
    folder.config.write_text(json.dumps(config))
    with pytest.raises(AxesError, match="config.json is damaged: it does not say the unigram entropy"):
        curve_of(folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_no_numbers_are_not_sampled(text: str, tmp_path: Path, temperature: float) -> None:
    model = load_model(train(small(text, steps=2), tmp_path / "run"))
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="weights are no numbers"):
        list(generate(model, b"a", 3, temperature))


def test_streams_count_in_what_a_machine_must_have(text: str) -> None:
    small(text, streams=4).require_machine()
    with pytest.raises(AxesError, match="need at least .* GB"):
        small(text, streams=10**12).require_machine()


def test_coefficients_of_streams_and_blocks_count_in_what_a_machine_must_have(text: str) -> None:
    """A mixer of a thousand streams ended in torch's allocator, a million blocks in an hour of making them."""
    for depth in ("mhc", "jpmhc"):
        small(text, depth=depth, streams=4).require_machine()
        with pytest.raises(AxesError, match="need at least .* GB"):
            small(text, depth=depth, streams=10_000).require_machine()
    with pytest.raises(AxesError, match="need at least .* GB"):
        small(text, layers=10**8).require_machine()


def test_demonstration_continues_and_skips(text: str, tmp_path: Path) -> None:
    pair = [
        small(text, steps=4),
        small(text, steps=4, sequence="softmax-attention", optimizer="adamw", depth="residual"),
    ]
    calls = iter([False, False, True])
    stopped = demonstration.demonstrate(pair, tmp_path, stop=lambda: next(calls))
    assert [(summary.finished, summary.steps) for summary in stopped] == [(False, 2)]
    summaries = demonstration.demonstrate(pair, tmp_path)
    assert [summary.finished for summary in summaries] == [True, True]
    assert summaries[0].tokens == summaries[1].tokens
    assert (tmp_path / "comparison.png").exists()
    again = demonstration.demonstrate(pair, tmp_path, stop=lambda: pytest.fail("a finished run takes no step"))
    assert again == summaries


def test_demonstration_is_the_promised_pair() -> None:
    ours, control = demonstration.configurations()
    assert (ours.sequence, ours.optimizer, ours.depth) == ("gated-delta-net", "muon", "mhc")
    assert (control.sequence, control.optimizer, control.depth) == ("softmax-attention", "adamw", "residual")
    for name in ("seed", "steps", "batch", "context", "text", "validation_windows"):
        assert getattr(ours, name) == getattr(control, name)


def test_equal_curves_are_equal_files(tmp_path: Path) -> None:
    curve = Curve("a run", (1, 2), (4.0, 3.0), (2,), (3.5,), 4.5)
    for name in ("one.png", "two.png"):
        draw_curves([curve], tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


SMOKE = dict.fromkeys(
    [
        *((entry.name, "adamw", "residual") for entry in catalogue.entries("sequence")),
        *(("linear-attention", entry.name, "residual") for entry in catalogue.entries("data")),
        *(("linear-attention", "adamw", entry.name) for entry in catalogue.entries("depth")),
    ]
)


@pytest.mark.parametrize(("sequence", "optimizer", "depth"), drawn(SMOKE, 12))
def test_every_system_trains_for_twenty_steps(
    text: str, tmp_path: Path, sequence: str, optimizer: str, depth: str
) -> None:
    configuration = small(text, sequence=sequence, optimizer=optimizer, depth=depth, steps=20, batch=2)
    folder = train(configuration, tmp_path / "run")
    bits = [record["bits_per_byte"] for record in folder.read_metrics() if "bits_per_byte" in record]
    assert len(bits) == 20
    assert bits[-1] < bits[0], "twenty steps on a repeated sentence must lower the loss"
    # and what was saved can be loaded
    assert resume(folder).finished
