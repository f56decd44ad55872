"""`axes bench depth-training`: equal weights and batches under every mixer, runs that continue, paired differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import scipy.stats
import torch

from axes import catalogue
from axes.bench import depth_training, depth_training_report, optim_tasks
from axes.bench.depth_training import Size
from axes.bench.optim_training_report import summaries
from axes.cli import main

SMALL = Size(layers=2, width=16, heads=2, batch=2, context=8)
NAMES = ("pre-norm", "mhc", "denseformer")


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor(list(b"words are made of letters, and lines are made of words. " * 40), dtype=torch.uint8)
    corpus = type("Text", (), {"train": words, "validation": words})()
    monkeypatch.setattr(optim_tasks, "_corpus", lambda: corpus)


def test_weights_of_a_seed_are_the_same_under_every_mixer() -> None:
    def weights(name: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return depth_training.task(name, SMALL).model().state_dict()

    plain = weights("pre-norm")
    for entry in catalogue.entries("depth"):
        found = weights(entry.name)
        shared = [name for name in plain if name in found and "mixers" not in name]
        assert len(shared) >= len(plain) - 5, entry.name  # one that normalises what it writes has no norms
        assert all(torch.equal(plain[name], found[name]) for name in shared), entry.name


def test_streams_are_as_many_as_a_mixer_needs() -> None:
    assert depth_training.architecture("mhc", SMALL).streams == 4
    assert depth_training.architecture("denseformer", SMALL).streams == 5


def test_mixers_train_and_are_compared_seed_by_seed(
    tmp_path: Path, text: None, capsys: pytest.CaptureFixture[str]
) -> None:
    size = "--layers 2 --width 16 --heads 2 --batch 2 --context 8"
    line = f"bench depth-training {size} --steps 4 --rates 0 --seeds 2 --points 2 --out".split()
    line += [str(tmp_path), *(f"--mixer={name}" for name in NAMES)]
    with pytest.raises(SystemExit, match="0"):
        main(line)
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES) and "±" in shown
    page = (tmp_path / "depth-training.md").read_text()
    assert "| pre-norm |" in page and "all at one rate" in page
    assert (tmp_path / "depth-training.png").read_bytes()[:4] == b"\x89PNG"
    results = json.loads((tmp_path / depth_training.FILE).read_text())
    found = {s.who: s for s in summaries(results)}
    assert set(found) == set(NAMES) == set(results["parameters"])
    starts = {name: [run.curve[0][1] for run in s.runs] for name, s in found.items()}
    assert starts["mhc"] == pytest.approx(starts["pre-norm"], rel=1e-5)  # every mixer begins as pre-norm
    assert all(run.loss < run.curve[0][1] for s in found.values() for run in s.runs)
    pairs = zip(found["mhc"].runs, found["pre-norm"].runs, strict=True)
    less = [a.loss - b.loss for a, b in pairs]
    mean, half = depth_training_report.differences(list(found.values()))["mhc"]
    low, high = scipy.stats.ttest_1samp(less, 0.0).confidence_interval(0.95)
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert "pre-norm" not in depth_training_report.differences(list(found.values()))
    # nothing is trained twice, and another size is refused
    with pytest.raises(SystemExit, match="0"):
        main(line)
    assert json.loads((tmp_path / depth_training.FILE).read_text())["rows"] == results["rows"]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*line, "--width", "32"])
    assert "another length or task" in capsys.readouterr().err
