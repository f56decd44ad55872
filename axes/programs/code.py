"""Operations of programs in Triton's language."""

from __future__ import annotations

CODE = {
    "mul": "{0} * {1}", "add": "{0} + {1}", "sub": "{0} - {1}", "div": "{0} / {1}", "neg": "-{0}",
    "sqrt": "tl.sqrt_rn({0})", "rsqrt": "1.0 / tl.sqrt_rn({0})", "reciprocal": "1.0 / {0}", "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0.0))",
    "exp": "tl.exp({0})", "log": "tl.log({0})", "log1p": "libdevice.log1p({0})", "expm1": "libdevice.expm1({0})",
    "sinh": "libdevice.sinh({0})", "asinh": "libdevice.asinh({0})", "tanh": "libdevice.tanh({0})",
    "pow": "libdevice.pow({0}, {1})", "maximum": "tl.maximum({0}, {1})", "minimum": "tl.minimum({0}, {1})",
    "clamp": "tl.minimum(tl.maximum({0}, {1}), {2})", "where": "tl.where({0}, {1}, {2})",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "and": "{0} & {1}", "or": "{0} | {1}", "not": "not {0}",
}  # fmt: skip

# of tiles: float32 sums are around them, so the last bit of a root is nobody's, and every backend has these functions
ON_TILES = {
    **{name: CODE[name] for name in CODE if name not in ("sinh", "asinh", "clamp")},
    "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})", "log1p": "functions.log1p({0})",
    "expm1": "functions.expm1({0})", "tanh": "functions.tanh({0})", "pow": "functions.power({0}, {1})",
    "sigmoid": "tl.sigmoid({0})", "not": "{0} == 0",
}  # fmt: skip
LEAST = 2.0**-126
FUNCTIONS = "from axes.kernels.token import functions"  # what text of them imports


def constant(x: float) -> str:
    """A number as text: none that float32 has, but for its least normal one, would be float64 and all that meets it."""
    if 0.0 < abs(x) < LEAST:
        x = LEAST if x > 0.0 else -LEAST
    return repr(float(x)) if abs(x) != float("inf") and x == x else f"float('{x}')"
