"""Whether layers learn multi-query recall, or text: each with several rates, processes side by side, a line a run.

    python -m tests.gpu.recall --out recall.jsonl                # every nonlinear layer, on a GPU if there is one
    python -m tests.gpu.recall --layer ttt-linear --rate 3e-3 --device cpu --pairs 8 --length 64 --tokens 64
    python -m tests.gpu.recall --table recall.jsonl              # what a file says, as a table
    python -m tests.gpu.recall --text --length 512 --width 320 --heads 5 --layers 8 --batch 16 --steps 300 --autocast
                                                                 # bytes of text that ships with Python, 10 M parameters

Blocks of the layer and an MLP on a residual stream, AdamW with a warm-up and a cosine. A run ends early once it answers
99.9 % of what unseen windows ask. In a line: accuracy and cross-entropy on unseen windows as they came, the gradient's
largest norm, seconds, and why a run did not go on. --change layer:rate=start,scale tries another chart without code.
--layer fla:GatedDeltaNet has fla's layer of that name in the same model, --change "fla:GatedDeltaNet:use_gate=0" an
argument of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import math
import multiprocessing
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from axes import catalogue
from axes.bench import peers
from axes.models import Architecture, LanguageModel
from axes.sequence.charts import Capped, Constant, LogSigmoid
from axes.sequence.features import Centred
from axes.tasks.batches import training_batch
from axes.tasks.corpus import Corpus, embedded
from axes.tasks.recall import MultiQueryRecall
from axes.tasks.synthetic import IGNORED

NONLINEAR = (
    "longhorn", "longhorn-diagonal", "yaad-matrix", "frank-wolfe-delta", "ttt-linear", "lattice-sim", "lattice-enc",
    "lattice-dec", "lattice-osr", "moneta-matrix", "memora-matrix", "adam-net", "rls-net", "shampoo-net", "muon-net",
    "muon-net-state", "ttt-mlp", "yaad", "yaad-switch", "titans", "titans-matrix", "moneta", "moneta-literal", "memora",
    "memora-literal",
)  # fmt: skip
BESIDE = ("gated-delta-net",)
RATES = (3e-3, 1e-3, 1e-2)
_FLA = "fla:"
EVERY = 50  # steps between looks
UNSEEN = 10**6  # a step that no run takes


class Fla(nn.Module):
    """A layer of flash-linear-attention as a model of ours calls its own."""

    def __init__(self, name: str, width: int, heads: int, **given: float) -> None:
        super().__init__()
        made = getattr(peers.fla("fla.layers"), name)
        asked = inspect.signature(made).parameters
        sizes = {"hidden_size": width, "num_heads": heads, "head_dim": width // heads, "expand_v": 1.0}
        self.layer = made(**{k: v for k, v in sizes.items() if k in asked}, **given)

    def forward(self, x: torch.Tensor, state: None = None) -> tuple[torch.Tensor, None]:
        return self.layer(x)[0], None


class Text(NamedTuple):
    """Bytes of text, every one of which is asked for."""

    length: int
    pairs = 0
    tokens = vocabulary = 256

    def draw(self, batch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = _corpus().validation if step >= UNSEEN else _corpus().train
        windows = training_batch(text, 0, step, batch, self.length)
        return windows[:, :-1], windows[:, 1:]


@functools.cache
def _corpus() -> Corpus:
    return embedded()


class Run(NamedTuple):
    layer: str
    rate: float
    task: MultiQueryRecall | Text
    width: int
    heads: int
    layers: int
    steps: int
    batch: int
    device: str
    seed: int
    seconds: float
    changes: tuple[str, ...] = ()
    autocast: bool = False
    deviation: float = 0.02


def made_of(run: Run) -> Any:
    """What makes the run's layer in a model, or None for the catalogue's."""
    if run.layer.startswith(_FLA):
        given = {name: float(value) for name, _, value in (change.partition("=") for change in run.changes)}
        return lambda width, *_, **__: Fla(run.layer.removeprefix(_FLA), run.width, run.heads, **given)
    if run.changes:
        cls: Any = catalogue.get(run.layer, axis="sequence").cls
        return lambda *_, **__: cls(run.width, run.heads, block=block_of(cls, run.changes))
    return None


def block_of(layer: type[Any], changes: tuple[str, ...]) -> Any:
    """The layer's block with other charts: "eta=0.2,1.0" starts at 0.2 and stays below 1, "ln_gain=1" is constant,
    "decay=6" a gate with this bias; other fields of the block as "conv=4", "key_norm=1", "initial=0.1",
    "output_gate=sigmoid", "value_norm=none", "feature_map=centred"."""
    block = layer.block
    charts = dict(block.charts)
    for change in changes:
        name, _, value = change.partition("=")
        if name in {f.name for f in dataclasses.fields(block)}:
            block = dataclasses.replace(block, **{name: field_of(getattr(block, name), value)})
            continue
        numbers = [float(x) for x in value.split(",")]
        rank = getattr(charts.get(name), "rank", None)
        if len(numbers) == 2:
            charts[name] = Capped(numbers[0], scale=numbers[1], rank=rank)
        elif isinstance(charts.get(name), LogSigmoid) or "decay" in name or "momentum" in name:
            charts[name] = LogSigmoid(bias=numbers[0], rank=rank)
        else:
            charts[name] = Constant(numbers[0])
    return dataclasses.replace(block, charts=tuple(charts.items()))


def field_of(old: Any, value: str) -> Any:
    """A field of a block as it is written: "none", a word (gates, norms), else a number of the kind that was there."""
    if value == "centred":
        return Centred()
    if value == "none" or value.isalpha():
        return None if value == "none" else value
    return float(value) if old is None else type(old)(float(value))


def train(run: Run) -> dict[str, Any]:
    with peers.lifted_guard() if run.layer.startswith(_FLA) else nullcontext():  # fla refuses Hopper's gated backward
        return _trained(run)


def _trained(run: Run) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    begun = time.monotonic()
    device = torch.device(run.device)
    row: dict[str, Any] = {"layer": run.layer, "rate": run.rate, "changes": list(run.changes), "width": run.width}
    row |= {"pairs": run.task.pairs, "length": run.task.length, "vocabulary": run.task.tokens, "seed": run.seed}
    looks: list[tuple[int, float, float]] = []
    largest = 0.0
    try:
        ours = "delta-net" if run.layer.startswith(_FLA) else run.layer
        form = Architecture(ours, "residual", run.layers, run.width, run.heads, 1, run.task.vocabulary)
        model = LanguageModel(form, layer=made_of(run))
        nn.init.normal_(model.embedding.weight, std=run.deviation)
        model = model.to(device)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=0.01, betas=(0.9, 0.99))
        warm = max(1, run.steps // 20)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warm) * (0.05 + 0.475 * (1 + math.cos(math.pi * step / run.steps)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        unseen = [x.to(device) for x in run.task.draw(256, UNSEEN)]
        for step in range(run.steps):
            windows, targets = (x.to(device) for x in run.task.draw(run.batch, step))
            with torch.autocast(device.type, torch.bfloat16, enabled=run.autocast):
                loss = asked(model, windows, targets)
            optimizer.zero_grad()
            loss.backward()
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            largest = max(largest, norm)
            if not math.isfinite(norm):
                row["stopped"] = f"the gradient of step {step} is not finite"
                break
            optimizer.step()
            schedule.step()
            if (step + 1) % EVERY == 0 or step + 1 == run.steps:
                accuracy, left = judged(model, *unseen, autocast=run.autocast)
                looks.append((step + 1, round(accuracy, 4), round(left, 4)))
                if accuracy > 0.999:
                    break
                if time.monotonic() - begun > run.seconds:
                    row["stopped"] = f"time: {step + 1} of {run.steps} steps"
                    break
    except Exception as error:
        row["stopped"] = f"{type(error).__name__}: {str(error)[:200]}"
    best = max((a for _, a, _ in looks), default=0.0)
    return {**row, "accuracy": best, "gradient": largest, "seconds": round(time.monotonic() - begun, 1), "looks": looks}


def asked(model: LanguageModel, windows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy where something is asked: no other logits are made."""
    hidden, _ = model.hidden(model.embedding(windows))
    where = targets != IGNORED
    return cross_entropy(model.head(hidden[where]).float(), targets[where])


@torch.no_grad()
def judged(model: LanguageModel, windows: torch.Tensor, targets: torch.Tensor, autocast: bool) -> tuple[float, float]:
    """How many answers are right, and their cross-entropy in nats."""
    right, left, count = 0, 0.0, 0
    device = windows.device.type
    for part, wanted in zip(windows.split(64), targets.split(64), strict=True):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            hidden, _ = model.hidden(model.embedding(part))
        where = wanted != IGNORED
        logits = model.head(hidden[where].float())
        right += int((logits.argmax(-1) == wanted[where]).sum())
        left += float(cross_entropy(logits, wanted[where], reduction="sum"))
        count += int(where.sum())
    return right / count, left / count


def table(file: Path) -> str:
    """The best rate of every layer, and the others."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        found[" ".join([row["layer"], *row["changes"]])].append(row)
    lines = [
        "| layer | accuracy | nats | at rate | steps | largest gradient | every rate |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in found.items():
        best = max(rows, key=lambda r: (r["accuracy"], -len(r["looks"])))
        every = ", ".join(f"{r['rate']:g}: {r['accuracy']:.3f}{'*' if 'stopped' in r else ''}" for r in rows)
        steps, _, nats = best["looks"][-1] if best["looks"] else (0, 0.0, math.nan)
        said = f"{best['accuracy']:.3f} | {nats:.3f} | {best['rate']:g} | {steps} | {best['gradient']:.1f}"
        lines.append(f"| {name} | {said} | {every} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=Path("recall.jsonl"))
    add("--table", type=Path)
    add("--text", action="store_true", help="in the place of recall")
    add("--layer", action="append", default=[])
    add("--rate", action="append", type=float, default=[])
    add("--change", action="append", default=[], help="layer:field=value or layer:rate=start,scale")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in (("pairs", 16), ("length", 128), ("tokens", 512), ("width", 128), ("heads", 2), ("layers", 2)):
        add(f"--{name}", type=int, default=value)
    add("--steps", type=int, default=3000)
    add("--batch", type=int, default=64)
    add("--seed", type=int, default=0)
    add("--parallel", type=int, default=14)
    add("--autocast", action="store_true", help="bfloat16")
    add("--deviation", type=float, default=0.02, help="of tokens' vectors; beside vectors of 1 recall is not learned")
    add("--seconds", type=float, default=500.0, help="of one run")
    add("--limit", type=float, default=570.0, help="seconds of all")
    given = parser.parse_args()
    if given.table:
        print(table(given.table))
        return
    task = Text(given.length) if given.text else MultiQueryRecall(given.pairs, given.length, given.tokens)
    rest = (given.width, given.heads, given.layers, given.steps, given.batch, given.device, given.seed)
    changes: dict[str, list[str]] = defaultdict(list)
    for change in given.change:
        layer, _, what = change.rpartition(":")
        changes[layer].append(what)
    begun, seconds = time.monotonic(), min(given.seconds, given.limit - 20)
    runs = [
        Run(layer, rate, task, *rest, seconds, tuple(changes[layer]), given.autocast, given.deviation)
        for rate in given.rate or RATES
        for layer in given.layer or (*BESIDE, *NONLINEAR)
    ]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(min(given.parallel, len(runs)), maxtasksperchild=4) as pool:
        waiting = pool.imap_unordered(train, runs)
        for done in range(len(runs)):
            try:
                row = waiting.next(timeout=max(given.limit - (time.monotonic() - begun), 0.1))
            except multiprocessing.TimeoutError:
                print(f"{len(runs) - done} of {len(runs)} runs were not done within {given.limit:.0f} s", flush=True)
                break
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shown = {n: row[n] for n in ("layer", "rate", "changes", "accuracy", "gradient", "seconds")}
            print(shown, row.get("stopped", ""), row["looks"][-1:], flush=True)
        pool.terminate()
    print(table(given.out))


if __name__ == "__main__":
    main()
