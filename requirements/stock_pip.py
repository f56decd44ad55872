"""pip as on a machine that nobody configured: `python stock_pip.py install ...`, the arguments are pip's.

A folder of wheels, a mirror or a constraint that pip is configured with on this machine chooses other packages than a
user gets, so pip sees none of it. What chooses nothing but may be needed to reach an index at all stays.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

REACH = {"cert", "client-cert", "proxy", "trusted-host", "timeout", "default-timeout", "retries"}
CACHE = {"cache-dir", "no-cache-dir"}
SECTIONS = ("global", "install", ":env:")  # the later one decides, as in pip


def kept(listing: str) -> dict[str, str]:
    """As variables, the settings that stay of those that `pip config list` prints."""
    variables = {}
    settings = [line.partition("=") for line in listing.splitlines()]
    for section in SECTIONS:
        for key, _, value in settings:
            found, _, name = key.rpartition(".")
            if found == section and name in REACH | CACHE:
                variables["PIP_" + name.upper().replace("-", "_")] = ast.literal_eval(value)
    return variables


def main() -> None:
    pip = [sys.executable, "-m", "pip"]
    listing = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    # pip reads no configuration file at all when this one is the null device
    os.execve(sys.executable, [*pip, *sys.argv[1:]], others | kept(listing) | {"PIP_CONFIG_FILE": os.devnull})


if __name__ == "__main__":
    main()
