"""Group C: algorithms. The delta rule in `_writes`, steps in a geometry in `_steps`, oracles in `_frank_wolfe`."""

from axes.claims.base import untestable
from axes.claims.group_c_frank_wolfe import C14, C15, C16, C17, C18, C19
from axes.claims.group_c_steps import C10, C11, C12, C13, C20, C21
from axes.claims.group_c_writes import C01, C02, C03, C04, C05, C06, C07, C08, C09, C22, C23, C24
from axes.claims.sources import BLOG

C25 = untestable(
    "C25",
    "What LUCID gains by preconditioning its read is the analogue of natural gradient.",
    BLOG("LUCID, and citations of old optimizers with new norms"),
    "an empirical result about trained models, without an equation in the source",
)

CLAIMS = (
    *(C01, C02, C03, C04, C05, C06, C07, C08, C09, C10, C11, C12, C13),
    *(C14, C15, C16, C17, C18, C19, C20, C21, C22, C23, C24, C25),
)
