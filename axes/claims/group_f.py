"""Group F: duality, parallel and chunk forms, by subject: scalar gates, the delta rule, other axes and hierarchies."""

from axes.claims.group_f_axes import F18, F19, F20, F21, F22, F23, F26, F27
from axes.claims.group_f_delta import F07, F08, F09, F10, F11, F12, F13, F14, F24, F25
from axes.claims.group_f_linear import F01, F02, F03, F04, F05, F06, F15, F16, F17

CLAIMS = (
    *(F01, F02, F03, F04, F05, F06, F07, F08, F09, F10, F11, F12, F13, F14),
    *(F15, F16, F17, F18, F19, F20, F21, F22, F23, F24, F25, F26, F27),
)
