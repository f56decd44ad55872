"""Text of C for Newton-Schulz iterations of one small matrix, with their adjoint: what a stage of a step is.

    d = max(factor |X|_F + shift, floor),   Z_0 = X / d,   Z_{i+1} = a Z_i + Z_i Q_i,   Q = b G + c G G,   G = Z^T Z

and Y = size Z_n. The shorter side of X is that of G, so Z is X or its transpose, and no product reads a transpose: both
factors of G have the index that is summed over as that of their rows. Backwards, with S = Z^T dZ' and D = S + S^T,

    dZ = a dZ' + dZ' Q + Z (b D + c (D G + G D))

and dX = dZ_0 / d - factor <dZ_0, Z_0> Z_0 / |X|_F, without the second term where |X|_F is zero or d is the floor; that
of a matrix of zeros is zero (`axes.linalg.polynomials` is the same of torch's products).

What the way back reads lies on a tape: Y, and Z, G and Q of every step. Products are of four rows by two vectors of the
processor at a time, which stay in its registers while they are summed. Shorter sides are padded with zeros to whole
vectors, longer ones to four, where they stay zeros.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Real = Literal["float", "double"]
_BYTES = {"float": 4, "double": 8}
_VECTOR = 32  # bytes that rows are padded to; a processor's own vectors are these or two or half of these
_LINE = 16  # numbers that parts of a tape are padded to
_SIZES = """\
enum {{ TALL = {tall}, LONG = {long}, SHORT = {short}, ROWS = {rows} }};  // of Z, with padding
#define SIDE {side}  // of G, and of rows of Z
enum {{ Z_SIZE = {z_size}, G_SIZE = SIDE * SIDE, STEP = Z_SIZE + 2 * G_SIZE, BEGUN = {begun} }};
"""
_TEXT = """\
#if defined(__AVX512F__) && SIDE % (64 / SIZE_OF_REAL) == 0
enum { BYTES = 64 };
#elif defined(__AVX__)
enum { BYTES = 32 };
#else
enum { BYTES = 16 };
#endif
typedef real vector __attribute__((vector_size(BYTES)));
enum { LANES = BYTES / sizeof(real) };
#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))
// four rows from i and `wide` vectors from j of scale given + weight A B: A(i, p) = a[i * row + p * column], and all
// others have rows of SIDE
INLINE void block(real *out, const real *given, real scale, real weight, const real *a, long row, long column,
                  const real *b, long count, long i, long j, const int wide) {
    vector sum[4][2] = {{{0}}};
    for (long p = 0; p < count; p++)
        for (int w = 0; w < wide; w++) {
            const vector right = *(const vector *)(b + p * SIDE + j + w * LANES);
            for (int r = 0; r < 4; r++) sum[r][w] += a[(i + r) * row + p * column] * right;
        }
    for (int r = 0; r < 4; r++)
        for (int w = 0; w < wide; w++) {
            const long at = (i + r) * SIDE + j + w * LANES;
            vector made = weight * sum[r][w];
            if (given != NULL) made += scale * *(const vector *)(given + at);
            *(vector *)(out + at) = made;
        }
}
INLINE void product(real *out, const real *given, real scale, real weight, const real *a, long row, long column,
                    const real *b, long rows, long count) {
    for (long i = 0; i < rows; i += 4) {
        long j = 0;
        for (; j + 2 * LANES <= SIDE; j += 2 * LANES)
            block(out, given, scale, weight, a, row, column, b, count, i, j, 2);
        if (j < SIDE) block(out, given, scale, weight, a, row, column, b, count, i, j, 1);
    }
}
APART void inner(real *out, const real *a, const real *b) {  // A^T B
    product(out, NULL, 0, 1, a, 1, SIDE, b, SIDE, LONG);
}
APART void square(real *out, const real *given, real scale, real weight, const real *a, const real *b) {
    product(out, given, scale, weight, a, SIDE, 1, b, SIDE, SHORT);
}
APART void outer(real *out, const real *given, real scale, const real *a, const real *b) {
    product(out, given, scale, 1, a, SIDE, 1, b, ROWS, SHORT);
}
APART void symmetrised(real *x) {  // x + x^T
    for (long i = 0; i < SHORT; i++)
        for (long j = 0; j <= i; j++) x[i * SIDE + j] = x[j * SIDE + i] = x[i * SIDE + j] + x[j * SIDE + i];
}
#define PLACE(v, k) (TALL ? (v) * SIDE + (k) : (k) * SIDE + (v))
// numbers: factor, shift, floor, size, and a, b, c of every step; keep: all steps stay on the tape, not two by turns
APART void newton_schulz(const real *restrict x, real *restrict tape, const real *numbers, long steps, int keep) {
    real squares = 0, there = 0;
#pragma omp simd reduction(+: squares, there)
    for (long i = 0; i < V * K; i++) {
        squares += x[i] * x[i];
        there += x[i] != 0;
    }
    const real norm = SQRT(squares), moving = norm * numbers[0] + numbers[1], divisor = largest(moving, numbers[2]);
    tape[0] = divisor, tape[1] = norm > 0 && moving >= numbers[2] ? numbers[0] / norm : 0, tape[2] = there > 0;
    real *const y = tape + BEGUN, *const first = tape + BEGUN + Z_SIZE;
    memset(first, 0, Z_SIZE * sizeof(real));
    for (long v = 0; v < V; v++)
        for (long k = 0; k < K; k++) first[PLACE(v, k)] = x[v * K + k] / divisor;
    const real *z = first;
    for (long i = 0; i < steps; i++) {
        const real *const number = numbers + 4 + 3 * i;
        real *const gram = first + (keep ? i : i % 2) * STEP + Z_SIZE, *const q = gram + G_SIZE;
        real *const next = first + (keep ? i + 1 : (i + 1) % 2) * STEP;
        inner(gram, z, z);
        square(q, gram, number[1], number[2], gram, gram);
        outer(next, z, number[0], z, q);
        z = next;
    }
    for (long v = 0; v < V; v++)
        for (long k = 0; k < K; k++) y[v * K + k] = numbers[3] * z[PLACE(v, k)];
}
// room: two matrices like Z and two like G
APART void newton_schulz_back(const real *restrict tape, const real *restrict dy, real *restrict dx,
                              real *restrict room, const real *numbers, long steps) {
    const real *const first = tape + BEGUN + Z_SIZE;
    real *now = room, *next = room + Z_SIZE, *const s = room + 2 * Z_SIZE, *const p = s + G_SIZE;
    memset(now, 0, Z_SIZE * sizeof(real));
    for (long v = 0; v < V; v++)
        for (long k = 0; k < K; k++) now[PLACE(v, k)] = numbers[3] * dy[v * K + k];
    for (long i = steps - 1; i >= 0; i--) {
        const real *const z = first + i * STEP, *const gram = z + Z_SIZE, *const q = gram + G_SIZE;
        const real *const number = numbers + 4 + 3 * i;
        inner(s, z, now);
        symmetrised(s);
        square(p, s, number[1] / 2, number[2], s, gram);
        symmetrised(p);
        outer(next, now, number[0], now, q);
        outer(next, next, 1, z, p);
        real *const last = now;
        now = next, next = last;
    }
    real along = 0;
#pragma omp simd reduction(+: along)
    for (long i = 0; i < ROWS * SIDE; i++) along += now[i] * first[i];
    along *= tape[1];
    for (long v = 0; v < V; v++)
        for (long k = 0; k < K; k++) {
            const long at = PLACE(v, k);
            dx[v * K + k] = tape[2] != 0 ? now[at] / tape[0] - along * first[at] : 0;
        }
}
"""


class Sizes(NamedTuple):
    """Of matrices (rows, keys) on a tape, in numbers."""

    rows: int
    keys: int
    real: Real

    @property
    def _side(self) -> int:
        return _up(min(self.rows, self.keys), _VECTOR // _BYTES[self.real])

    @property
    def _z(self) -> int:
        return _up(_up(max(self.rows, self.keys), 4) * self._side, _LINE)

    def tape(self, steps: int) -> int:
        """Of an iteration whose steps are kept, so many."""
        return _LINE + self._z + steps * (self._z + 2 * self._side**2) + self._z

    def room(self) -> int:
        """Beside it on the way back."""
        return 2 * self._z + 2 * self._side**2

    def text(self) -> str:
        """Both functions of C: `newton_schulz` and `newton_schulz_back`."""
        long = max(self.rows, self.keys)
        sizes = _SIZES.format(
            tall=int(self.rows >= self.keys), long=long, short=min(self.rows, self.keys), rows=_up(long, 4),
            side=self._side, z_size=self._z, begun=_LINE,
        )  # fmt: skip
        return f"#define SIZE_OF_REAL {_BYTES[self.real]}\n{sizes}{_TEXT}"


RESULT = _LINE  # where Y is on a tape


def _up(x: int, to: int) -> int:
    return -(-x // to) * to


__all__ = ["RESULT", "Real", "Sizes"]
