"""Token files: what is written is what is trained on, mapped from disk; and what a step costs, counted by hand."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from axes.cli import main
from axes.errors import AxesError
from axes.models import Architecture, LanguageModel
from axes.models.flops import training_flops
from axes.tasks import tokens
from axes.tasks.batches import training_batch
from axes.tasks.configuration import Configuration
from axes.tasks.corpus import as_tokens
from axes.tasks.language_modelling import run, start
from axes.tasks.run_folder import RunFolder
from axes.tasks.trackers import Several, tracker
from axes.tasks.training import Training

SMALL: dict[str, Any] = dict(
    optimizer="adamw", layers=1, width=16, heads=2, streams=2, context=8, batch=4, steps=2, validation_windows=2,
    device="cpu",
)  # fmt: skip


class Words:
    """A tokenizer whose numbers need all bits of their dtype."""

    name = "words.json"

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.separator = vocabulary, vocabulary - 1

    def encode(self, texts: Any) -> list[list[int]]:
        return [[self.vocabulary - 2 - int(w) for w in text.split()] for text in texts]

    def decode(self, tokens: Any) -> str:
        return " ".join(str(self.vocabulary - 2 - t) for t in tokens)


def documents(count: int = 30) -> list[tuple[str, bytes]]:
    return [(str(n), " ".join(str((n * 7 + i) % 50) for i in range(20)).encode()) for n in range(count)]


@pytest.mark.parametrize("vocabulary", [60, 1 << 16, 1 << 17])
def test_tokens_come_back(tmp_path: Path, vocabulary: int) -> None:
    words = Words(vocabulary)
    made = tokens.write(tmp_path / "t", documents(), words, held_out=0.3)
    kept = [as_tokens(x).tolist() for x in (made.train, made.validation)]
    texts = sorted(" ".join(words.decode(d).split()) for part in kept for d in _cut(part, words.separator))
    assert texts == sorted(text.decode() for _, text in documents())
    assert made.vocabulary == vocabulary and made.bytes_per_token == pytest.approx(
        sum(len(t) for _, t in documents()) / (len(kept[0]) + len(kept[1]))
    )
    window = training_batch(made.train, 0, 0, 2, 8)
    assert window.dtype == torch.int64 and int(window.min()) >= 0 and int(window.max()) < vocabulary
    size = 2 if vocabulary <= 1 << 16 else 4
    assert (tmp_path / "t" / "train.bin").stat().st_size == size * len(kept[0])


def _cut(stream: list[int], separator: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in stream:
        if token == separator:
            found.append([])
        else:
            found[-1].append(token)
    return found[:-1]


def test_a_run_on_tokens_and_bad_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    for n, (_, text) in enumerate(documents()):
        (tmp_path / "text" / f"{n}.txt").write_bytes(text + b"\n" + text)
    folder = tmp_path / "t"
    main_ok("tokenize", folder, "--text", tmp_path / "text", "--held-out", 0.3)
    out = tmp_path / "run"
    main_ok(
        "train", "--tokens", folder, "--out", out, "--layers", 1, "--width", 16, "--heads", 2, "--context", 8,
        "--batch", 4, "--steps", 2, "--accumulate", 2, "--dtype", "bfloat16-pure", "--device", "cpu", "--peak", 1e-3,
        "--optimizer", "adamw", "--vocabulary", 300,
    )  # fmt: skip
    records = RunFolder(out).read_metrics()
    assert records[0]["tokens_per_second"] > 0 and 0 < records[0]["mfu"] < 1
    main_ok("sample", out, "--tokens", 3)
    with pytest.raises(AxesError, match="holds tokens already"):
        tokens.write(folder, documents(), tokens.Bytes())
    with pytest.raises(AxesError, match="vocabulary must be at least 256"):
        Configuration(tokens=str(folder), vocabulary=100, context=8).corpus()
    with pytest.raises(AxesError, match="left out where tokens are given"):
        Configuration(tokens=str(folder), text=("x",))
    with pytest.raises(AxesError, match="holds no tokens"):
        tokens.read(tmp_path)
    (tmp_path / "train.bin").write_bytes(b"xx")  # as nanoGPT writes it
    with pytest.raises(AxesError, match="has a train.bin and no tokens.json, which says what its tokens are"):
        tokens.read(tmp_path)
    with (folder / "train.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(AxesError, match=r"train.bin has \d+ bytes, and tokens.json says"):
        tokens.read(folder)
    (folder / "tokens.json").write_text("{")
    with pytest.raises(AxesError, match="is damaged"):
        tokens.read(folder)
    with pytest.raises(AxesError, match="cut it into several files"):
        tokens.write(tmp_path / "few", documents(1), tokens.Bytes())
    for share, part in ((1e-9, "validation"), (1 - 1e-9, "train")):  # what is said is enough
        with pytest.raises(AxesError, match=f"none is for {part}") as refused:
            tokens.write(tmp_path / part, documents(3), tokens.Bytes(), share)
        said = float(str(refused.value).rpartition(" ")[2])
        assert tokens.write(tmp_path / part, documents(3), tokens.Bytes(), said).validation.numel()
    with pytest.raises(AxesError, match="not one document"):
        tokens.write(tmp_path / "none", [], tokens.Bytes())


def test_tokens_that_a_vocabulary_does_not_have(tmp_path: Path) -> None:
    """Found when a folder is read, or at the latest in the window that holds one; no device is asked for its row."""
    folder = tmp_path / "t"
    tokens.write(folder, documents(), tokens.Bytes(), held_out=0.3)
    said = json.loads((folder / "tokens.json").read_text())

    def says(**changes: Any) -> None:
        (folder / "tokens.json").write_text(json.dumps({**said, **changes}))

    says(vocabulary=50)
    with pytest.raises(AxesError, match=r"holds the token 57 and is said to have a vocabulary of 50"):
        tokens.read(folder)
    says(vocabulary=70_000)
    with pytest.raises(AxesError, match="uint16 holds no number of a vocabulary of 70000"):
        tokens.read(folder)
    tokens_of = {"tokens": "x", "sha256": ""}
    for changes in ({"bytes": "many"}, {"documents": [1]}, {"train": tokens_of}, {"vocabulary": None}):
        says(**changes)
        with pytest.raises(AxesError, match="is damaged"):
            tokens.read(folder)
    says()
    corpus = tokens.read(folder)
    training = Training(Configuration(**SMALL), corpus)
    training.step()
    corpus.train[:] = 300  # as of a file whose first tokens are right
    training._drawn = {}
    with pytest.raises(AxesError, match="holds the token 300"):
        training.step()
    corpus.validation[:] = 300
    with pytest.raises(AxesError, match="holds the token 300"):
        training.validation_bits_per_byte()


def trained(tmp_path: Path, vocabulary: dict[str, int], unknown: str | None = None, **asked: Any) -> Path:
    theirs = pytest.importorskip("tokenizers")
    made = theirs.Tokenizer(theirs.models.WordLevel(vocabulary, **({"unk_token": unknown} if unknown else {})))
    made.pre_tokenizer = theirs.pre_tokenizers.WhitespaceSplit()
    if asked:
        made.enable_truncation(**asked)
        made.enable_padding(length=64)
    file = tmp_path / "tokenizer.json"
    made.save(str(file))
    return file


def test_a_tokenizers_file_is_taken_for_its_tokens_alone(tmp_path: Path) -> None:
    """Files of models' inputs ask for a length, at which documents would be cut and filled; numbers may have gaps."""
    words = {str(n): 2 * n for n in range(50)} | {"</s>": 70_001}
    by = tokens.Trained(trained(tmp_path, words, max_length=5))
    assert (by.vocabulary, by.separator) == (70_002, 70_001)
    made = tokens.write(tmp_path / "t", documents(), by, held_out=0.3)
    kept = [as_tokens(x).tolist() for x in (made.train, made.validation)]
    texts = sorted(by.decode(d) for part in kept for d in _cut(part, by.separator))
    assert texts == sorted(text.decode() for _, text in documents())
    with pytest.raises(AxesError, match=r"the tokenizer .* does not take this text: .*UNK"):
        tokens.Trained(trained(tmp_path, words)).encode([b"unheard"])
    (tmp_path / "none").write_text("{}")
    for wrong, says in (("none", "is no tokenizer of the library"), (".", "there is no tokenizer")):
        with pytest.raises(AxesError, match=says):
            tokens.tokenizer(str(tmp_path / wrong))


def test_bytes_of_a_model_with_more_tokens_are_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model that has hardly learned says tokens that are no bytes: the text goes on behind them."""
    assert tokens.Bytes().decode([72, 300, 105]) == "Hi"
    folder = RunFolder(tmp_path / "run")
    training = start(Configuration(**SMALL, text_limit=20_000, vocabulary=5000), folder)
    run(training, folder, stop=lambda: True)
    capfd.readouterr()
    main_ok("sample", folder, "--tokens", 20, "--prompt", "Hi", "--temperature", 5)
    assert capfd.readouterr().out.startswith("Hi")


def main_ok(*arguments: object) -> None:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    assert not end.value.code, arguments


def test_parts_of_a_batch_have_its_gradient(tmp_path: Path) -> None:
    records = []
    for parts in (1, 2):
        folder = RunFolder(tmp_path / str(parts))
        run(start(Configuration(**SMALL, dtype="float64", text_limit=20_000, accumulate=parts), folder), folder)
        records.append([r["loss"] for r in folder.read_metrics() if "loss" in r])
    assert records[1] == pytest.approx(records[0], rel=1e-12)


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("tokenizers", "datasets", "wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(AxesError, match=r"pip install 'axes-state-update\[tokens\]'"):
        tokens.tokenizer("tokenizer.json")
    with pytest.raises(AxesError, match=r"pip install 'axes-state-update\[datasets\]'"):
        next(tokens.dataset("some"))
    for name in ("wandb", "tensorboard"):
        with pytest.raises(AxesError, match=rf"pip install 'axes-state-update\[{name}\]'"):
            tracker(name)


def test_a_dataset_says_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = types.ModuleType("datasets")
    theirs.load_from_disk = lambda name: {"train": [{"text": "a"}], "test": []}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", theirs)
    assert list(tokens.dataset(str(tmp_path))) == [(f"{tmp_path}/0", b"a")]
    with pytest.raises(AxesError, match="has no split 'valid', but train, test"):
        next(tokens.dataset(str(tmp_path), "valid"))
    with pytest.raises(AxesError, match="has no field 'body', but text"):
        next(tokens.dataset(str(tmp_path), field="body"))
    rows = [{"text": None}, {"text": "b"}, {"text": ["c"]}]
    theirs.load_from_disk = lambda name: {"train": rows}  # type: ignore[attr-defined]
    found = tokens.dataset(str(tmp_path))
    assert next(found)[1] == b"b"  # a row without text is no document "None"
    with pytest.raises(AxesError, match="has no text in its field 'text', but lists"):
        next(found)


def test_numbers_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    theirs = types.ModuleType("wandb")
    logged = types.SimpleNamespace(log=lambda numbers, step: seen.append((step, numbers)))
    theirs.init = lambda **options: seen.append(options) or logged  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", theirs)
    folder = RunFolder(tmp_path / "run")
    run(start(Configuration(**SMALL, text_limit=20_000), folder), folder, Several([tracker("wandb")]))
    assert seen[0]["name"] == "run" and seen[0]["resume"] == "allow" and seen[0]["config"]["width"] == 16
    assert [step for step, _ in seen[1:]] == [1, 2, 2] and "loss" in seen[1][1] and "step" not in seen[1][1]


def test_what_a_stopped_run_has_passed_on_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    theirs = types.ModuleType("torch.utils.tensorboard")
    theirs.SummaryWriter = lambda place, purge_step: types.SimpleNamespace(  # type: ignore[attr-defined]
        add_scalar=lambda *row: seen.append(row[2]), flush=lambda: seen.append("flushed"), close=lambda: None
    )
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    monkeypatch.setattr("atexit.register", lambda close: seen.append(close))
    folder = RunFolder(tmp_path / "run")
    training = start(Configuration(**SMALL, text_limit=20_000), folder)
    run(training, folder, tracker("tensorboard"), stop=lambda: training.position == 1)
    assert callable(seen[0]) and set(seen[1:]) == {1}  # not flushed: the end of the process has to


def test_operations_of_a_token() -> None:
    model = LanguageModel(Architecture("gated-delta-net", "residual", layers=2, width=16, heads=2, vocabulary=50))
    weights = sum(p.numel() for p in model.parameters()) - 50 * 16
    assert training_flops(model, 64) == 6 * weights + 2 * 3 * (2 * 8 * 8 * 2 * 3)  # two heads: write, read and predict
    attention = LanguageModel(Architecture("softmax-attention", "residual", layers=1, width=16, heads=2, vocabulary=50))
    weights = sum(p.numel() for p in attention.parameters()) - 50 * 16
    assert training_flops(attention, 63) == 6 * weights + 3 * (2 * 2 * 16 * 32)
