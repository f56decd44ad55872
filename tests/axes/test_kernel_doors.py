"""What kernels' host code promises before a launch: what it refuses, and in what two calls differ."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

if sys.platform != "linux":  # there its absence is an error, not a reason to skip
    pytest.importorskip("triton")

from axes.errors import ShapeError
from axes.kernels.blocks import products
from axes.kernels.blocks.leave import LARGEST as LARGEST_HEAD
from axes.kernels.blocks.leave import leave
from axes.kernels.common import versions
from axes.kernels.common.ahead import _alike, rehearsal
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


def test_powers_of_two_are_the_least_that_are_enough() -> None:
    for x in range(1, 70):
        found = sizes.power_of_2(x)
        assert found.bit_count() == 1 and found >= x > found // 2, x


def test_tiles_say_where_heads_and_rows_of_matrices_lie() -> None:
    bulk = importlib.import_module("axes.kernels.common.bulk")
    x = torch.empty(2, 80, 3, 64, dtype=torch.bfloat16)
    made = bulk.head_tiles(x, 32)
    assert made.shape == [2, 3, 80, 64] and made.block_shape == [1, 1, 32, 64]
    assert made.strides == [80 * 3 * 64, 64, 3 * 64, 1]
    y = torch.empty(5, 16, 64, dtype=torch.bfloat16)
    cases: tuple[tuple[dict[str, int], list[int], list[int]], ...] = (
        ({}, [80, 64], [16, 64]),
        ({"rows": 8}, [80, 64], [8, 64]),
        ({"columns": 32}, [80, 64], [16, 32]),
        ({"width": 32}, [160, 32], [16, 32]),
        ({"width": 128, "columns": 64}, [40, 128], [16, 64]),
    )
    for given, shape, tile in cases:
        made = bulk.matrix_tiles(y, **given)
        assert (made.shape, made.strides, made.block_shape) == (shape, [shape[1], 1], tile), given


def test_inverses_of_float32_are_merged_by_whole_products() -> None:
    constants = importlib.import_module("axes.kernels.common.inverse").constants
    assert [constants(d, 64, 4)["MERGE"] for d in (torch.float32, torch.bfloat16, torch.float16)] == [
        "ieee", "tf32x3", "tf32x3",
    ]  # fmt: skip
    assert constants(torch.float32, 64, 4)["LANES"] == 128 and constants(torch.float32, 256, 4)["LANES"] == 256


def test_what_is_compiled_for_holds_no_tensor_of_a_tuple() -> None:
    class Named(NamedTuple):
        x: int

    x = torch.zeros(64)
    one, (two, number), named = _alike((x, (x[1:], 3), Named(1)))
    assert one.numel() == 1 and one.data_ptr() % 16 == 0 and two.data_ptr() % 16 == 4
    assert number == 3 and type(named) is Named and not {one.data_ptr(), two.data_ptr()} & {x.data_ptr()}


def test_a_cut_has_a_place_for_every_token() -> None:
    for length, segments in ((300, 1), (1000, 3), (1024, 4), (64, 5), (65, 2)):
        made = sizes.cut(2, length, 64, segments, None)
        assert made.L * made.S >= length > made.L * (made.S - 1) and made.N * 64 >= made.L > (made.N - 1) * 64
        assert segments >= made.S and (made.units, made.slots) == (2 * made.S, 2 * made.S * made.N)
    assert [sizes.cut(1, 1024, 64, s, None).S for s in (1, 2, 4)] == [1, 2, 4]


def test_segments_for_hopper_take_the_least_time() -> None:
    """2.7 microseconds for a chunk; cut, 1.7 more for its map, 2 to merge a segment, 10 for more launches."""
    for programs, chunks in ((1, 1), (4, 64), (16, 500), (1000, 64)):
        most = max(1, min(sizes.PROCESSORS // programs, chunks))
        times = {s: 2.7 * chunks if s == 1 else 4.4 * -(-chunks // s) + 2 * s + 10 for s in range(1, most + 1)}
        assert times[sizes.plain_segments_of(programs, chunks)] == min(times.values())


def test_packed_sequences_without_tokens_hand_their_states_on() -> None:
    q, v, cu = torch.zeros(1, 0, 1, 4), torch.zeros(1, 0, 1, 3), torch.zeros(4, dtype=torch.int32)
    _, final, _ = scalar._forward(q, q, v, None, None, None, None, None, cu, False, False, 1, False)
    assert final.shape == (3, 1, 3, 4)
    assert scalar._cut(torch.zeros(1, 256, 1, 64), torch.zeros(1, 256, 1, 64), None, None, None, False, False, 4).S == 4


def test_a_mass_of_one_channel_is_taken() -> None:
    for y, m in ((torch.zeros(2, 3, 1), torch.zeros(2, 3, 1)), (torch.zeros(3, 2), torch.zeros(3, 1))):
        with pytest.raises(Exception) as refused:  # by whoever launches: there is no GPU
            over_mass(y, m)
        assert "over_mass: y is" not in str(refused.value)
    with pytest.raises(ShapeError, match=r"over_mass: y is \(\.\.\., D\)"):
        over_mass(torch.zeros(2, 3, 1), torch.zeros(3, 2, 1))


def test_a_skip_is_of_what_leaves() -> None:
    y, skip = torch.zeros(1, 2, 3, 4), torch.zeros(12)
    for v, says in ((torch.zeros(1, 2, 3, 5), r"not torch.float32 \(1, 2, 3, 5\)"), (y.double(), "not torch.float64")):
        with pytest.raises(ShapeError, match=r"leave: v is torch.float32 \(1, 2, 3, 4\), " + says):
            leave(y, skip=skip, v=v)
    with pytest.raises(Exception) as refused:
        leave(y, skip=skip, v=y)
    assert "leave: v is" not in str(refused.value)


def test_rows_that_fill_a_product_up_are_zero() -> None:
    drawn = [torch.randn(n, 4) for n in (3, 2)]
    made = products._stacked(drawn, 8, torch.float32)
    assert torch.equal(made[:5], torch.cat(drawn)) and made.shape == (8, 4) and not made[5:].any()
    assert torch.equal(products._stacked(drawn, 4, torch.float32), torch.cat(drawn))


def test_what_is_read_of_no_tokens_is_nothing() -> None:
    from axes.kernels.substitution.reading import shown

    made = shown(torch.zeros(2, 0, 1, 4), "nobody asks for it", (), torch.bfloat16)
    assert made.shape == (2, 0, 1, 4) and made.dtype == torch.bfloat16


def test_a_write_and_a_look_are_refused_by_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.common import layout
    from axes.kernels.streams.follow import write_look

    monkeypatch.setattr(layout, "interpreted", lambda: True)
    x, y, w, a, b = torch.zeros(3, 4, 8), torch.zeros(3, 8), torch.zeros(4), torch.zeros(4), torch.zeros(1, 4)
    with pytest.raises(ShapeError, match=r"write_look: phi is \(4, 32\) beside streams"):
        write_look(x, y, w, None, torch.zeros(4, 31), a, b, "sigmoid")


def test_matrices_that_stand_on_chip() -> None:
    """Programs of eight warps own 128 hidden units or more, whatever F is."""
    hold = importlib.import_module("axes.kernels.network.hold")
    for d, f in ((16, 16), (64, 128), (128, 512), (100, 300)):
        k, w2 = (torch.empty(1, 1, n, d, device="meta", dtype=torch.bfloat16) for n in (1, f))
        rows, hidden = sizes.power_of_2(max(d, 16)), sizes.power_of_2(max(f, 128))
        assert hold.fits(k, w2) == (rows * hidden <= hold.ENTRIES), (d, f)
    most = torch.empty(1, 1, 1, hold.ENTRIES // 128, device="meta", dtype=torch.bfloat16)
    assert hold.fits(most, torch.empty(1, 1, 16, 1, device="meta"))
    for other in (torch.cat((most, most), -1), most.double()):
        assert not hold.fits(other, torch.empty(1, 1, 16, 1, device="meta"))


def test_what_hoppers_kernels_of_two_layers_may_be_called_for(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("axes.kernels.network.hopper_hold")
    refused: list[str | None] = [None]
    monkeypatch.setattr(module.versions, "hopper_refusal", lambda device: refused[0])
    monkeypatch.setattr(module, "known_response", lambda name: (SimpleNamespace(text=name),))

    def made(width: int, hidden: int, name: str = "plain", dtype: torch.dtype = torch.bfloat16) -> bool:
        k = torch.empty(1, 5, 2, width, dtype=dtype, device="meta")
        return bool(module.fits(k, torch.empty(1, 2, hidden, width, device="meta"), name))

    w, h = module.WIDTH, module.HIDDEN
    assert made(w, h) and not made(w, h + 1) and not made(w // 2, h) and not made(w, h, "functions.gelu")
    assert not made(w, h, dtype=torch.float64)
    refused[0] = "another processor"
    assert not made(w, h)


def test_two_pieces_of_a_chain_ask_for_what_three_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a piece makes of the state before it reads sums of gates, which all pieces of a chain have."""
    from axes.kernels.scalar import chain, hopper_write
    from tests.hopper import asked

    monkeypatch.setattr(hopper_write, "fits", lambda *_: True)
    q, k, v = (torch.randn(1, 512, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    beta, g = torch.rand(1, 512, 1), -torch.rand(1, 512, 1)
    launched = []
    for pieces in (2, 3):
        with asked() as found:
            chain.scalar_chain(q, k, v, beta, g, rule="write", segments=pieces)
        launched.append([each.kernel for each in found])
    assert launched[0] == launched[1] and "cumulate" in launched[0]


def test_a_memory_of_two_layers_names_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from axes.kernels.common import layout
    from axes.kernels.network.chain import BLOCK, Terms, network_chain
    from axes.kernels.substitution.chain import Response, register
    from tests.kernel_cases import delta_text

    monkeypatch.setattr(layout, "interpreted", lambda: True)
    b, t, h, d, hidden, n = 2, 20, 1, 16, 64, 2
    shapes = ((b, t, h), (b, t, h), (b, t, h, BLOCK), (b, n, h), (b, n, h, BLOCK))
    k, weights = torch.zeros(b, t, h, d), (torch.zeros(b, h, d, hidden), torch.zeros(b, h, hidden, d))
    numbers, inputs = Terms(*(torch.zeros(shape) for shape in shapes)), [k, torch.zeros(b, t, h)]
    name = register(Response(delta_text(), (True, False), False))

    def refused(says: str, inputs=inputs, numbers=numbers, weights=weights, held=weights) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(ShapeError, match=says):
            network_chain(k, k, name, inputs, numbers, weights, held)

    floats = "is floating point of shape"
    refused(rf"^network_chain: input 1 {floats} \(2, 20, 1\), not", inputs=[k, k])
    refused("^network_chain: the response has 2 inputs, not 1$", inputs=[k])
    refused(rf"^network_chain: c {floats} \(2, 20, 1, 16\), not", numbers=numbers._replace(c=numbers.a))
    refused(rf"^network_chain: weights {floats} \(2, 1, 64, 16\), not", weights=(weights[0], weights[1][..., 1:]))
    refused(rf"^network_chain: held {floats} \(2, 1, 16, 64\), not", held=weights[::-1])
    refused("^network_chain: b, e0 and e are of a filter", held=None)
