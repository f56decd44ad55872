"""Lets the tests of the core share `systems`: test folders are no packages."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
