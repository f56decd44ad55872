"""Group D: monoids and positional encodings. Gates as biases, maps as positions, what products of maps can express."""

from axes.claims.group_d_biases import D01, D02, D03, D04, D05, D06, D07, D08
from axes.claims.group_d_gates import D17, D18, D19, D20, D21, D22, D23, D24
from axes.claims.group_d_transport import D09, D10, D11, D12, D13, D14, D15, D16

CLAIMS = (
    *(D01, D02, D03, D04, D05, D06, D07, D08, D09, D10, D11, D12),
    *(D13, D14, D15, D16, D17, D18, D19, D20, D21, D22, D23, D24),
)
