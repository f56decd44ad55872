"""Kernels of others for `axes bench depth` where no network is: `python -m tests.peers`, then carry the folder.

Wheels are fetched by pip and unpacked into `.cache/peers`, to be put on PYTHONPATH there. Liger and fla are Python as
they come. TransformerEngine is 1 GB of libraries, of which its operators along depth are none: their two files are kept
alone, and the one product that they ask of a library, cuBLAS through its extension, is cuBLAS through torch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "peers"
WHEELS = {"liger-kernel": "0.8.5", "fla-core": "0.6.0", "transformer-engine": "2.20.2"}
ENGINE = ("transformer_engine/common/triton/mhc.py", "transformer_engine/pytorch/triton/mhc.py")
PRODUCT = '''import torch


def general_gemm(a, b, out_dtype, layout):
    """b^T a of row-major a (m, k) and b (m, n), as cuBLAS is asked for it."""
    assert layout == "NT"
    return (torch.mm(b.T, a).to(out_dtype),)
'''


def fetch(folder: Path = FOLDER) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as at:
        named = [f"{name}=={version}" for name, version in WHEELS.items()]
        line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", at]
        subprocess.run([*line, *named], check=True)
        for wheel in sorted(Path(at).glob("*.whl")):
            with zipfile.ZipFile(wheel) as whole:
                names = whole.namelist()
                if wheel.name.startswith("transformer_engine"):
                    names = [name for name in names if name in ENGINE]
                whole.extractall(folder, names)
    for name in ENGINE:
        for place in (folder / name).parents:
            if place == folder:
                break
            (place / "__init__.py").touch()
    extension = folder / "transformer_engine" / "pytorch" / "cpp_extensions"
    extension.mkdir()
    (extension / "__init__.py").touch()
    (extension / "gemm.py").write_text(PRODUCT)


if __name__ == "__main__":
    fetch()
    print(FOLDER, sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) // 1000, "kB")
