"""Group A: the core framework, by subject: updates, keys, proximal steps, constraint sets, normalisation."""

from axes.claims.group_a_constrained import A29, A30, A31, A32, A33, A34
from axes.claims.group_a_keys import A09, A10, A11, A12, A13, A14, A15, A16, A17
from axes.claims.group_a_normalisation import A35, A36, A37, A38, A39, A40, A41, A42
from axes.claims.group_a_proximal import A18, A19, A20, A21, A22, A23, A24, A25, A26, A27, A28
from axes.claims.group_a_updates import A01, A02, A03, A04, A05, A06, A07, A08

CLAIMS = (
    *(A01, A02, A03, A04, A05, A06, A07, A08, A09, A10, A11, A12, A13, A14),
    *(A15, A16, A17, A18, A19, A20, A21, A22, A23, A24, A25, A26, A27, A28),
    *(A29, A30, A31, A32, A33, A34, A35, A36, A37, A38, A39, A40, A41, A42),
)
