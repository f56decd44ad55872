"""Group B: costs. What each cost writes (`group_b_writes`), retrieves and holds (`group_b_energies`)."""

from axes.claims.group_b_energies import B04, B05, B06, B07, B08, B09, B10, B11, B12, B17, B18, B19, B20
from axes.claims.group_b_writes import B01, B02, B03, B13, B14, B15, B16, B21, B22, B23, B24

CLAIMS = (
    *(B01, B02, B03, B04, B05, B06, B07, B08, B09, B10, B11, B12),
    *(B13, B14, B15, B16, B17, B18, B19, B20, B21, B22, B23, B24),
)
