"""A plan run in processes of its own, to be killed: `python killed.py FOLDER`. Workers import this too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import small

from axes.transfer.plan import planned
from axes.transfer.running import run

small.put()
if __name__ == "__main__":
    run(planned(("D4",), form="quick"), sys.argv[1], workers=2, watch=lambda *said: print(*said, flush=True))
