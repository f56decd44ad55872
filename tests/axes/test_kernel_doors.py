"""What kernels' host code promises before a launch: what it refuses, and in what two calls differ."""

from __future__ import annotations

import importlib
import sys
import sysconfig

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from axes.kernels.blocks.leave import LARGEST as LARGEST_HEAD
from axes.kernels.blocks.leave import leave
from axes.kernels.common import versions
from axes.kernels.common.ahead import rehearsal
from axes.kernels.common.launch import _closed
from axes.kernels.common.line import recording
from axes.kernels.diagonal_delta import chain as delta
from axes.kernels.products import outer
from axes.kernels.rows import mass
from axes.kernels.rows.mass import LARGEST, over_mass
from axes.kernels.scalar import chain as scalar
from axes.kernels.scalar import sizes
from axes.kernels.streams.cayley import _rotate, cayley
from axes.kernels.streams.look import look
from axes.kernels.streams.mix import _Cut, _spread, mix_read, mix_write


def test_streams_of_no_width_are_refused_whatever_stands_before_them() -> None:
    for shape in ((2, 3, 0), (2, 0, 4), (2, 3, 99, 4)):
        with pytest.raises(ShapeError, match=r"streams are \(\.\.\., n, d\) with n from 1"):
            mix_read(torch.zeros(shape), torch.zeros(shape[-2]))
        with pytest.raises(ShapeError, match=r"look: streams are \(\.\.\., n, d\) with n from 1"):
            look(torch.zeros(shape), torch.zeros(1), torch.zeros(1), torch.zeros(1), chart="sigmoid")


def test_streams_are_judged_by_their_last_dimensions() -> None:
    x, y = torch.zeros(5, 2, 3, 4), torch.zeros(5, 2, 4)
    with pytest.raises(ShapeError, match="need a CUDA device"):  # all else fits
        mix_write(x, y, torch.zeros(3))
    with pytest.raises(ShapeError, match=r"w is \(3,\) or \(5, 2, 3\), not \(4,\)"):
        mix_write(x, y, torch.zeros(4))
    with pytest.raises(ShapeError, match=r"m is \(3, 3\) or \(5, 2, 3, 3\), not \(3,\)"):
        mix_write(x, y, torch.zeros(3), torch.zeros(3))
    with pytest.raises(ShapeError, match=r"y is \(5, 2, 4\) beside"):
        mix_write(x, y[:, :1], torch.zeros(3))


def test_rotations_are_of_square_matrices() -> None:
    for shape in ((3,), (2, 3, 4), (2, 17, 17), (2, 0, 0)):
        with pytest.raises(ShapeError, match=r"cayley: logits are \(\.\.\., n, n\) with n from 1"):
            cayley(torch.zeros(shape), 1.0)
    with pytest.raises(ShapeError, match="needs a CUDA device"):
        cayley(torch.zeros(2, 3, 3), 1.0)


@pytest.mark.parametrize(("tokens", "d"), [(1, 1), (7, 100), (300, 2048), (5000, 64)])
def test_tiles_cover_every_token_and_column_once(tokens: int, d: int) -> None:
    cut = _Cut.of(torch.empty(tokens, 4, d, device="meta", dtype=torch.bfloat16))
    assert cut.rows & (cut.rows - 1) == 0 and cut.parts * cut.columns >= d > (cut.parts - 1) * cut.columns
    down = cut.programs // cut.parts
    assert cut.programs % cut.parts == 0 and down * cut.rows >= tokens > (down - 1) * cut.rows
    for tiles, others in ((1, 1), (40, 3), (1000, 500), (3, 100_000)):
        span, programs = _spread(tiles, others)
        assert span * programs >= tiles > span * (programs - 1)


def test_a_launch_is_another_one_where_an_integer_or_a_dtype_is() -> None:
    assert _closed(None) is None and _closed(3) == 3 and _closed(3) != _closed(4)
    x = torch.zeros(8)
    assert _closed(x) == _closed(torch.ones(9)) != _closed(x.double()) and _closed(0.5) == _closed(1.5)
    assert len(_rotate._kinds) == len(_rotate.names)  # compiled, not interpreted: every argument is looked at


def test_nothing_is_written_down_or_rehearsed_unasked() -> None:
    assert recording() is None and rehearsal() is None


def test_headers_of_debian_are_looked_for_where_triton_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    find = sysconfig.get_path

    def told(name: str, scheme: str) -> str:
        asked.append(scheme)
        return find(name, "posix_prefix")

    monkeypatch.setattr(sysconfig, "get_path", told)
    monkeypatch.setenv("CC", sys.executable)
    for scheme, wanted in (("posix_local", "posix_prefix"), ("posix_home", "posix_home")):
        monkeypatch.setattr(sysconfig, "get_default_scheme", lambda scheme=scheme: scheme)
        versions.no_compiler()
        assert asked[-1] == wanted


def test_a_mass_is_one_number_for_every_row() -> None:
    y = torch.zeros(2, 3, 4)
    with pytest.raises(ShapeError, match=r"over_mass: y is \(\.\.\., D\)"):
        over_mass(y, torch.zeros(2, 3))
    for width in (0, LARGEST + 1):
        with pytest.raises(ShapeError, match=r"over_mass: y is \(\.\.\., D\)"):
            over_mass(torch.zeros(2, 3, width), torch.zeros(2, 3, 1))
    for n, d in ((1, 1), (77, 64), (5000, 100)):
        programs, sizes = mass._sizes(torch.empty(n, d, device="meta"), 0.0)
        each = int(sizes["BR"])
        assert sizes["N"] == n and sizes["D"] == d <= sizes["DP"] and programs * each >= n > (programs - 1) * each


def test_what_leaves_a_block_is_four_dimensions_of_a_width_that_there_is() -> None:
    for shape in ((2, 3, 4), (2, 0, 1, 4), (1, 2, 3, LARGEST_HEAD + 1)):
        with pytest.raises(ShapeError, match=r"leave: y is \(B, T, H, D\)"):
            leave(torch.zeros(shape))


def test_a_sequence_of_no_tokens_hands_its_state_on() -> None:
    q, v = torch.zeros(2, 0, 1, 4), torch.zeros(2, 0, 1, 3)
    start = torch.randn(2, 1, 3, 4)
    given = (None, None, None, None)
    out, final, kept = scalar._forward(q, q, v, *given, start, None, False, False, 1, False)
    assert out.shape == v.shape and torch.equal(final, start) and kept == []
    _, final, _ = scalar._forward(q, q, v, *given, None, None, False, False, 1, False)
    assert final.shape == start.shape and not final.any()


def test_blocks_of_short_and_wide_heads() -> None:
    def made(d_k: int, d_v: int, dtype: torch.dtype, kernel: str) -> tuple[int, int]:
        found = delta._sizes(*(torch.empty(1, 1, 1, d, dtype=dtype, device="meta") for d in (d_k, d_v)), kernel)
        return found["BK"], found["BV"]

    assert made(128, 16, torch.float32, "prepare") == (32, 16) and made(128, 16, torch.float32, "serial") == (128, 64)
    assert made(256, 16, torch.float32, "prepare") == (64, 16) and made(256, 16, torch.float32, "serial") == (256, 16)
    assert made(16, 128, torch.float32, "gradients") == (16, 32)
    assert made(128, 16, torch.bfloat16, "serial") == (128, 64)
    assert [delta._chunk(torch.empty(1, d, device="meta")) for d in (64, 128, 256)] == [16, 16, 16]
    assert delta._chunk(torch.empty(1, 256, device="meta", dtype=torch.bfloat16)) == 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("d_k", [64, 256])
def test_segments_are_as_many_as_leave_every_processor_enough_chunks(
    d_k: int, dtype: torch.dtype, delta_rule: bool
) -> None:
    """With rule "delta" 16 chunks or more of one and a program for each processor at most, else 8 and two."""
    least, most = (16, sizes.PROCESSORS) if delta_rule else (8, 2 * sizes.PROCESSORS)
    chunk = sizes.chunk_length(dtype, d_k)
    for d_v, length in ((64, 100_000), (128, 8192), (128, 300), (256, 1 << 20)):
        programs = 2 * -(-d_v // (32 if sizes.form(dtype, d_k) == "ieee" else 64))
        made = sizes.segments_of(1, length, 2, d_k, d_v, dtype, delta_rule)
        assert made == max(1, min(most // programs, -(-length // chunk) // least))


# On a Hopper: what may be called for q and v of these widths in bfloat16, float32 and bfloat16 without tokens.
_EQUAL = {64: {64: True, 128: False, 96: False}, 128: {64: False, 128: True, 96: False}, 96: {96: False}}
_EACH = {64: {64: True, 128: True, 96: False}, 128: {64: True, 128: True}, 96: {64: False, 96: False}}
FITS: dict[str, dict[int, dict[int, bool]]] = {
    "block.hopper": _EQUAL, "diagonal_delta.hopper": _EQUAL, "scalar.hopper": _EQUAL, "scalar.hopper_write": _EACH,
}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_what_hoppers_kernels_may_be_called_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"axes.kernels.{name}")
    refused: list[str | None] = [None]
    monkeypatch.setattr(module, "hopper_refusal", lambda device: refused[0])

    def made(k: int, v: int, dtype: torch.dtype = torch.bfloat16, tokens: int = 5) -> bool:
        return bool(module.fits(*(torch.empty(2, tokens, 3, d, dtype=dtype, device="meta") for d in (k, v))))

    for k, row in FITS[name].items():
        for v, fits in row.items():
            assert made(k, v) is fits and made(k, v, torch.float16) is fits, (k, v)
            assert not made(k, v, torch.float32) and not made(k, v, tokens=0)
    refused[0] = "another processor"
    assert not made(64, 64) and not made(128, 128)


def test_what_hoppers_symmetric_products_take(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("axes.kernels.products.hopper_symmetric")
    refused: list[str | None] = [None]
    monkeypatch.setattr(module, "hopper_refusal", lambda device: refused[0])
    x = torch.empty(4, 6, device="meta")
    assert module.fits(x) and not module.fits(x.mT) and not module.fits(x[:, :0]) and not module.fits(x.double())
    assert module.fits(x.bfloat16()) and module.fits(x.half().mT)
    refused[0] = "another processor"
    assert not module.fits(x)


def test_attention_on_hopper_takes_strides_of_bulk_copies() -> None:
    fits = importlib.import_module("axes.kernels.attention.hopper").fits

    def made(d: int, dtype: torch.dtype = torch.bfloat16, tokens: int = 5, heads: int = 2) -> torch.Tensor:
        return torch.empty(2, tokens, heads, d, dtype=dtype, device="meta")

    for d, fine in ((64, True), (128, True), (96, False)):
        assert fits(made(d), made(d), made(d)) is fine
    assert not fits(made(64), made(64), made(128)) and not fits(made(64, tokens=0), made(64), made(64))
    assert not fits(made(64, torch.float32), made(64, torch.float32), made(64, torch.float32))
    wide = made(68)[..., :64]  # rows of 68 numbers, which no copy of 16 bytes begins at
    assert not fits(wide, made(64), made(64)) and not fits(made(64), made(64), wide)
    shared = made(64, heads=1).expand(2, 5, 2, 64)
    assert not fits(made(64), shared, made(64))


def test_parts_of_a_sum_fill_a_gpu_and_are_not_too_short() -> None:
    for programs, side, length, made in ((1, 128, 1 << 20, None), (1000, 128, 1 << 20, 1), (1, 64, 100, 1)):
        found = outer.parts(programs, side, length)
        wanted = max(1, min(outer._PROCESSORS * (4 if side == 64 else 1) // programs, length // outer._LEAST))
        assert found == wanted and made in (None, found)
    assert outer.parts(16, 64, 1 << 20) == 4 * outer._PROCESSORS // 16 != outer.parts(16, 128, 1 << 20)
