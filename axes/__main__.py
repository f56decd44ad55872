"""`python -m axes`."""

from axes.cli import main

main()
