"""Models of the catalogue in transformers: files, generation with and without states, padding, Trainer, export."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from axes import catalogue
from axes.cli import main
from axes.errors import AxesError, ShapeError, UnknownName
from axes.models import Architecture, LanguageModel
from axes.tasks import language_modelling, tokens
from axes.tasks.configuration import Configuration
from axes.tasks.run_folder import RunFolder
from axes.tasks.sample import generate as sample
from axes.tasks.sample import load_model

ROOT = Path(__file__).resolve().parents[2]
transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")

from axes.integrations import transformers as ours  # noqa: E402

HYBRID = ["gated-delta-net", "softmax-attention"]
SOME = (HYBRID, ["rwkv7", "rope"], ["mamba2", "delta-net"])
IDS = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.disable_progress_bar()
    yield


def build(sequence: Any, depth: str = "residual", layers: int | None = None, **others: Any) -> Any:
    torch.manual_seed(0)
    number = layers or (1 if isinstance(sequence, str) else len(sequence))
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64, "num_hidden_layers": number}
    streams = {"denseformer": 5, "dynamic-dense": 5}.get(depth, 4)
    config = ours.AxesConfig(**{"sequence": sequence, "depth": depth, "streams": streams, **sizes, **others})
    model = ours.AxesForCausalLM(config).double().eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)  # large enough that predictions differ
    return model


def again(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


# ---- the model -------------------------------------------------------------------------------------------------------


def test_it_is_the_language_model() -> None:
    plain = LanguageModel(Architecture(tuple(HYBRID), "mhc", layers=2, width=16, heads=2, vocabulary=64))
    model = ours.from_language_model(plain)
    assert torch.equal(model(IDS).logits, plain(IDS)[0])
    assert model.config.architecture() == plain.architecture


@pytest.mark.parametrize("sequence", SOME, ids="-".join)
def test_what_is_saved_is_loaded(sequence: list[str], tmp_path: Path) -> None:
    model = build(sequence, "mhc")
    loaded = again(model, tmp_path)
    assert (tmp_path / "model.safetensors").exists() and isinstance(loaded, ours.AxesForCausalLM)
    assert loaded.config.to_diff_dict().items() >= {"sequence": sequence, "depth": "mhc"}.items()
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in model.state_dict().items())
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    trunk = transformers.AutoModel.from_pretrained(tmp_path)
    torch.testing.assert_close(trunk(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_tied_tables_are_one_in_memory_and_on_disk(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build("gated-delta-net", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.trunk.embedding.weight
    loaded = again(model, tmp_path)
    assert loaded.lm_head.weight is loaded.model.trunk.embedding.weight
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    fresh = ours.AxesForCausalLM(ours.AxesConfig(hidden_size=64, tie_word_embeddings=True))
    assert abs(float(fresh(IDS, labels=IDS).loss.detach()) - math.log(256)) < 2  # not the sqrt(width) of unit rows


def test_first_predictions_are_nearly_uniform_and_seeded() -> None:
    def made() -> Any:
        torch.manual_seed(3)
        return ours.AxesForCausalLM(ours.AxesConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1))

    model = made()
    assert abs(float(model(IDS, labels=IDS).loss.detach()) - math.log(256)) < 0.2
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), made().parameters(), strict=True))


def test_a_head_may_be_missing_and_a_layer_may_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = build(HYBRID)
    model.model.save_pretrained(tmp_path)
    headed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(headed.model(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    assert 0.5 < float(headed.lm_head.weight.detach().std()) * 16 < 2
    file = tmp_path / "model.safetensors"
    weights = {name: x for name, x in load_file(file).items() if not name.endswith("o_proj.weight")}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(AxesError, match="the file lacks 2 of .* weights, .*o_proj.weight among them: it is of another"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_losses_count_what_is_labelled() -> None:
    model, labels = build(HYBRID), IDS.clone()
    labels[0, :5] = -100
    logits = model(IDS).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(model(IDS, labels=labels).loss, wanted.float())  # transformers' loss is
    part = model(IDS, logits_to_keep=2)
    torch.testing.assert_close(part.logits, model(IDS).logits[:, -2:])
    loss, *_ = model(IDS, labels=labels, return_dict=False)
    torch.testing.assert_close(loss, wanted.float())


@pytest.mark.parametrize("depth", ["mhc", "attention-residuals", "residual"])
def test_hidden_states_and_checkpoints_of_blocks(depth: str) -> None:
    model = build(HYBRID, depth)
    seen = model(IDS, output_hidden_states=True).hidden_states
    assert len(seen) == 3 and torch.equal(seen[0], model.model.trunk.embedding(IDS))
    torch.testing.assert_close(seen[-1], model.model(IDS).last_hidden_state)
    assert not torch.allclose(seen[1], seen[0])

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.train()
    plain = gradients()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    ran = []
    handle = model.model.trunk.sublayers[0].register_forward_hook(lambda *_: ran.append(1))
    for x, y in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    assert len(ran) == 2  # once more in the backward
    handle.remove()
    assert model(IDS).past_key_values is None  # states are not kept of what is computed twice


def test_a_resized_table_keeps_what_it_had(tmp_path: Path) -> None:
    model = build(HYBRID)
    before = model(IDS).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.config.vocab_size == 70 and model.model.trunk.architecture.vocabulary == 70
    after = model(IDS).logits
    assert after.shape[-1] == 70 and torch.equal(after[..., :64], before)
    torch.testing.assert_close(again(model, tmp_path)(IDS).logits, after)


def test_dtypes_and_devices(tmp_path: Path) -> None:
    build(HYBRID, "mhc").save_pretrained(tmp_path)
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16} and half(IDS).logits.dtype == torch.bfloat16
    assert torch.equal(half.generate(IDS, **GREEDY)[:, :7], IDS)
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    assert len({p.device for p in auto.parameters()}) == 1 and auto(IDS).logits.shape == (2, 7, 64)


def test_packed_sequences_do_not_see_each_other() -> None:
    model = build(HYBRID)
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    got = model(IDS[:1], position_ids=places, use_cache=False).logits
    for part in (slice(0, 3), slice(3, 7)):
        torch.testing.assert_close(got[:, part], model(IDS[:1, part]).logits)
    given = model(IDS[:1], cu_seq_lens_q=torch.tensor([0, 3, 7]), use_cache=False).logits
    assert torch.equal(given, got)
    with pytest.raises(AxesError, match="packed sequences are for training: give use_cache=False"):
        model(IDS[:1], cu_seq_lens_q=torch.tensor([0, 3, 7]))


# ---- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", SOME, ids="-".join)
def test_states_change_no_token(sequence: list[str]) -> None:
    """Greedy and sampled, two sequences of which one is padded in front, and alone."""
    model = build(sequence)
    padded = {"attention_mask": MASK, "pad_token_id": 0}
    alone = model(IDS[:1, 3:]).logits
    torch.testing.assert_close(model(IDS, attention_mask=MASK).logits[:1, 3:], alone, rtol=1e-9, atol=1e-9)
    assert float((model(IDS).logits[:1, 3:] - alone).detach().abs().max()) > 1e-5  # padding that is seen is written
    greedy = model.generate(IDS, **GREEDY, **padded)
    assert torch.equal(greedy, model.generate(IDS, **GREEDY, **padded, use_cache=False))
    assert torch.equal(greedy[:1, 3:], model.generate(IDS[:1, 3:], **GREEDY))
    assert torch.equal(greedy[1:], model.generate(IDS[1:], **GREEDY))

    def sampled(**others: Any) -> Tensor:
        torch.manual_seed(5)
        found: Tensor = model.generate(IDS, max_new_tokens=12, do_sample=True, top_k=20, **padded, **others)
        return found

    assert torch.equal(sampled(), sampled(use_cache=False))
    assert not torch.equal(sampled()[:, 7:13], greedy[:, 7:])


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in catalogue.entries("sequence")])
def test_every_layer_generates_and_is_loaded(name: str, tmp_path: Path) -> None:
    model = build(name)
    padded = {"attention_mask": MASK, "pad_token_id": 0}
    wanted = model.generate(IDS, **GREEDY, **padded, use_cache=False)
    assert torch.equal(wanted[:1, 3:], model.generate(IDS[:1, 3:], **GREEDY))
    assert torch.equal(model.generate(IDS, **GREEDY, **padded), wanted)
    torch.testing.assert_close(again(model, tmp_path)(IDS).logits, model(IDS).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", [entry.name for entry in catalogue.entries("depth")])
def test_every_mixer_generates_and_is_loaded(name: str, tmp_path: Path) -> None:
    model = build(HYBRID, name)
    assert torch.equal(model.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY, use_cache=False))
    torch.testing.assert_close(again(model, tmp_path)(IDS).logits, model(IDS).logits)
    assert len(model(IDS, output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize("sequence", SOME[:2], ids="-".join)
def test_generation_goes_on_from_a_returned_cache(sequence: list[str]) -> None:
    model = build(sequence)
    whole = model.generate(IDS, **{**GREEDY, "max_new_tokens": 12, "min_new_tokens": 12})
    first = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    assert kept.get_seq_length() == 12  # the last token has not been read yet
    on = model.generate(first.sequences, **GREEDY, past_key_values=first.past_key_values)
    assert torch.equal(on, whole)
    # and once more from the copy, with words of another in between: the copy was not moved on
    more = torch.cat((first.sequences, IDS[:, :3]), 1)
    torch.testing.assert_close(
        model.generate(more, **GREEDY, past_key_values=kept), model.generate(more, **GREEDY, use_cache=False)
    )


def test_a_token_is_never_written_twice() -> None:
    model = build(HYBRID)
    cache = model(IDS).past_key_values
    with pytest.raises(ShapeError, match=r"attention_mask must be \(2, 14\), for the 7 positions .* each once"):
        model(IDS, attention_mask=torch.ones(2, 7), past_key_values=cache)
    for nothing_new in (IDS, IDS[:, :3]):  # the second lacks the mask that says what came before
        with pytest.raises(ShapeError, match="seen 7 positions and input_ids has .: give all tokens"):
            model.generate(nothing_new, **GREEDY, past_key_values=cache)
    with_mask = {"attention_mask": torch.ones(2, 10, dtype=torch.long), "past_key_values": copy.deepcopy(cache)}
    alone, whole = model.generate(IDS[:, :3], **GREEDY, **with_mask), torch.cat((IDS, IDS[:, :3]), 1)
    assert torch.equal(alone[:, 3:], model.generate(whole, **GREEDY)[:, 10:])
    assert cache.get_seq_length() == 7
    step = model(IDS[:, :1], past_key_values=cache).logits
    torch.testing.assert_close(step, model(torch.cat((IDS, IDS[:, :1]), 1)).logits[:, -1:])


@pytest.mark.parametrize("sequence", SOME, ids="-".join)
def test_beams_take_their_states_with_them(sequence: list[str]) -> None:
    model = build(sequence)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 8, "do_sample": False}
    padded = {"attention_mask": MASK, "pad_token_id": 0}
    beams = model.generate(IDS, **options, **padded)
    assert torch.equal(beams, model.generate(IDS, **options, **padded, use_cache=False))


def test_prompts_may_be_read_in_parts() -> None:
    model = build(HYBRID)
    assert torch.equal(model.generate(IDS, **GREEDY, prefill_chunk_size=3), model.generate(IDS, **GREEDY))


def test_layers_that_go_by_the_place_of_a_token_continue_prompts_of_unequal_length() -> None:
    model, padded = build("titans"), {"attention_mask": MASK, "pad_token_id": 0}
    wanted = model.generate(IDS, **GREEDY, **padded, use_cache=False)
    assert torch.equal(model.generate(IDS, **GREEDY, **padded), wanted)


def test_what_caches_refuse() -> None:
    model = build(HYBRID)
    with pytest.raises(AxesError, match="is an AxesCache, .* not a DynamicCache"):
        model(IDS, past_key_values=transformers.DynamicCache())
    with pytest.raises(AxesError, match="cache_implementation='static' stores keys and values"):
        model.generate(IDS, **GREEDY, cache_implementation="static")
    with pytest.raises(ShapeError, match="holds 2 sequences, the input 1"):
        model(IDS[:1], past_key_values=model(IDS).past_key_values)
    with pytest.raises(AxesError, match="with use_cache=False nothing goes on"):
        model(IDS, past_key_values=model(IDS).past_key_values, use_cache=False)
    with pytest.raises(AxesError, match="none can be taken out again"):
        model(IDS).past_key_values.crop(-1)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(IDS[:1], **GREEDY, assistant_model=build(HYBRID))
    with pytest.raises(AxesError, match="no matrix of attention weights"):
        model(IDS, output_attentions=True)
    with pytest.raises(AxesError, match="input_ids or inputs_embeds, and not both"):
        model()
    assert "2 layers, 7 positions of 2 sequences" in repr(model(IDS).past_key_values)


def test_wrong_configurations_are_refused() -> None:
    with pytest.raises(UnknownName, match="did you mean gated-delta-net"):
        ours.AxesConfig(sequence="gated-deltanet")
    with pytest.raises(AxesError, match="2 names are given for 4 layers"):
        ours.AxesConfig(sequence=HYBRID)


# ---- training --------------------------------------------------------------------------------------------------------


def trainer(folder: Path, steps: int) -> Any:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    torch.manual_seed(0)
    config = ours.AxesConfig(
        sequence=HYBRID, num_hidden_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=16, depth="residual"
    )
    rows = [{"input_ids": (torch.arange(12) * (1 + i % 3)) % 16} for i in range(24)]
    data = [{**row, "labels": row["input_ids"], "attention_mask": torch.ones(12, dtype=torch.long)} for row in rows]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=4,
        logging_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, seed=1, lr_scheduler_type="constant",
    )  # fmt: skip
    return transformers.Trainer(model=ours.AxesForCausalLM(config), args=arguments, train_dataset=data)


@pytest.mark.filterwarnings("ignore")  # what Trainer warns of is its own
def test_trainer_learns_and_resumes(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 8)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    resumed = trainer(tmp_path / "whole", 8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for x, y in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(x, y)


# ---- runs of axes train ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun(tmp_path_factory.mktemp("runs") / "run")


def begun(path: Path, **changes: Any) -> Path:
    folder = RunFolder(path)
    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 2, "text_limit": 20000, "device": "cpu"}
    language_modelling.start(Configuration(**{**sizes, **changes}), folder)
    folder.release()
    return folder.path


def main_quietly(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code


def test_a_run_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "exported"
    main_quietly(["export", str(run), "--to", "transformers", str(folder)])
    assert f"AutoModelForCausalLM.from_pretrained('{folder}')" in capsys.readouterr().out
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    model, plain = transformers.AutoModelForCausalLM.from_pretrained(folder), load_model(RunFolder(run))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = "def f(x):\n\treturn 'é' + \"\0\""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert bytes(ids[0].tolist()) == prompt.encode()
    assert torch.equal(model(ids).logits, plain(ids)[0])
    wanted = bytes(sample(plain, prompt.encode(), 8, temperature=0))
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    got = model.generate(ids, **options, eos_token_id=-1)[0, ids.shape[1] :]  # past an end of document too
    assert bytes(got.tolist()) == wanted
    padded = tokenizer(["a", "bcd"], padding=True)
    assert padded.input_ids[0] == [0, 0, ord("a")] and padded.attention_mask[0] == [0, 0, 1]


def test_a_run_whose_streams_had_16_bits_is_exported_as_its_weights(tmp_path: Path) -> None:
    run, folder = begun(tmp_path / "run", dtype="bfloat16-streams"), tmp_path / "exported"
    main_quietly(["export", str(run), str(folder)])
    model, plain = transformers.AutoModelForCausalLM.from_pretrained(folder), load_model(RunFolder(run))
    assert model.dtype == torch.float32
    assert torch.equal(model(IDS).logits, plain(IDS)[0])


@pytest.mark.parametrize("end", ["</s>", None])
def test_a_run_on_tokens_is_exported_with_the_tokenizer_that_made_them(
    end: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["u", *map(str, range(50)), *([end] if end else [])])}
    made = theirs.Tokenizer(theirs.models.WordLevel(words, unk_token="u"))
    made.pre_tokenizer = theirs.pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(3)
    made.save(str(tmp_path / "words.json"))
    by, folder = tokens.Trained(tmp_path / "words.json"), tmp_path / "tokens"
    texts = [(str(n), " ".join(str((n * 7 + i) % 50) for i in range(20)).encode()) for n in range(30)]
    tokens.write(folder, texts, by, held_out=0.3)
    run = begun(tmp_path / "run", tokens=str(folder), vocabulary=64, text_limit=0)
    main_quietly(["export", str(run), str(tmp_path / "exported")])
    assert "AutoTokenizer" in capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    text = texts[0][1]
    assert tokenizer(text.decode()).input_ids == by.encode([text])[0]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "exported")
    assert config.eos_token_id == config.pad_token_id == by.separator and config.vocab_size == 64
    assert (tokenizer.eos_token, tokenizer.pad_token) == (end, end)
    said = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps({**said, "tokenizer": None}))
    main_quietly(["export", str(run), str(tmp_path / "bare")])
    shown = capsys.readouterr().out
    assert "without a tokenizer" in shown and "AutoTokenizer" not in shown
    assert not [*(tmp_path / "bare").glob("tokenizer*")]


def test_an_export_replaces_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept.txt").write_text("x")
    for arguments, complaint in (
        ([str(run), str(tmp_path)], "is not an empty folder: choose another one"),
        ([str(tmp_path / "no"), str(tmp_path / "new")], "there is no run folder"),
        ([str(run), str(tmp_path / "new"), "--to", "onnx"], "unknown format 'onnx'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["export", *arguments])
        said = capsys.readouterr().err
        assert ended.value.code == 1 and said.startswith("error: ") and complaint in said
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]


def test_letters_of_bytes_are_those_of_the_library() -> None:
    from axes.integrations.transformers.export import _letters

    pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers
    assert set(_letters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_letters().values()) == list(range(256))
    everything = "".join(map(chr, [*range(1, 0x250), 0x4E00, 0x1F600]))
    tokenizer = ours.byte_tokenizer()
    ids = tokenizer(everything).input_ids
    assert bytes(ids) == everything.encode() and tokenizer.decode(ids) == everything


# ---- words -----------------------------------------------------------------------------------------------------------


def test_a_model_of_the_library_may_be_looked_up_first() -> None:
    """`transformers` finds its names by itself, and then some that were imported are no attributes of it."""
    code = (
        "import transformers; transformers.LlamaForCausalLM\n"
        "from axes.integrations.transformers import AxesConfig, AxesForCausalLM\n"
        "AxesForCausalLM(AxesConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2))"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_missing_extra_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("axes.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "transformers" else found(name))
    monkeypatch.delattr("axes.integrations.transformers")
    with pytest.raises(SystemExit) as ended:
        main(["export", "run", "folder"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "pip install 'axes-state-update[transformers]'" in said and said.count("\n") == 1


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(run)
    page = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.S):
        exec(compile(code, "docs/transformers.md", "exec"), names)
    for command in re.findall(r"^axes (export .*)$", page, flags=re.M):
        main_quietly(command.split())
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["model_type"] == "axes"
