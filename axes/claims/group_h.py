"""Group H: the data axis, gradients, schedules, mini-batch noise and optimizers as printed."""

from axes.claims.group_h_gradients import H01, H02, H03, H16, H17, H18, H24, H25, H26
from axes.claims.group_h_methods import H19, H20, H21, H22, H23, H27, H28, H29, H30, H31, H32
from axes.claims.group_h_noise import H12, H13, H14, H15
from axes.claims.group_h_schedules import H04, H05, H06, H07, H08, H09, H10, H11

CLAIMS = (
    *(H01, H02, H03, H04, H05, H06, H07, H08, H09, H10, H11, H12, H13, H14, H15, H16),
    *(H17, H18, H19, H20, H21, H22, H23, H24, H25, H26, H27, H28, H29, H30, H31, H32),
)
