"""Group I: cross-axis identities: the same numbers through an optimizer and through a sequence layer."""

from axes.claims.base import untestable
from axes.claims.group_i_descent import I01, I02, I03, I04, I05, I10, I11, I12, I13
from axes.claims.group_i_memory import I06, I07, I08, I09
from axes.claims.sources import BLOG

I14 = untestable(
    "I14",
    "Which aspect (capacity, forgetting, conditioning, noise) matters on which axis.",
    BLOG("Table of relevance by axis"),
    "a qualitative judgement without a quantity",
)

CLAIMS = (I01, I02, I03, I04, I05, I06, I07, I08, I09, I10, I11, I12, I13, I14)
