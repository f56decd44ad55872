"""Four sibling folders, one import name: mapping, links and guards agree, in the tree and in the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("optim", "sequence", "depth")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, started in the given folder."""
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300)


def files() -> Iterator[tuple[str, Path]]:
    """(package, file) for every Python file that installs, each by its real path."""
    for prefix, top in [("axes", "axes"), *((f"axes.{family}", family) for family in FAMILIES)]:
        for folder, below, names in os.walk(ROOT / top, followlinks=False):
            below[:] = [name for name in below if name != "__pycache__" and not (Path(folder) / name).is_symlink()]
            inside = Path(folder).relative_to(ROOT / top).parts
            for name in names:
                if name.endswith(".py"):
                    yield ".".join((prefix, *inside)), Path(folder) / name


def modules() -> list[str]:
    """Dotted names of all modules that import everywhere: kernels and extras need others, __main__ runs the command."""
    names = [package if path.stem == "__init__" else f"{package}.{path.stem}" for package, path in files()]
    others = ("axes.kernels.", "axes.integrations.transformers")
    return sorted(name for name in names if not name.startswith(others) and not name.endswith("__main__"))


def test_declared_packages_are_the_folders() -> None:
    with_code = {package for package, _ in files()}
    with_init = {package for package, path in files() if path.name == "__init__.py"}
    assert with_code == with_init, f"folders without __init__.py: {sorted(with_code - with_init)}"
    declared = PYPROJECT["tool"]["setuptools"]["packages"]
    assert sorted(declared) == sorted(with_init), "pyproject.toml: [tool.setuptools] packages"


def test_mapping_names_the_sibling_folders() -> None:
    expected = {"axes": "axes"} | {f"axes.{family}": family for family in FAMILIES}
    assert PYPROJECT["tool"]["setuptools"]["package-dir"] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_link_is_relative(family: str) -> None:
    link = ROOT / "axes" / family
    assert link.is_symlink() and os.readlink(link) == f"../{family}"
    assert link.resolve() == ROOT / family


@pytest.mark.parametrize("family", FAMILIES)
def test_guard_refuses_the_bare_name(family: str) -> None:
    refused = python(f"import {family}")
    assert refused.returncode != 0
    assert f"ImportError: import axes.{family}, not {family}" in refused.stderr


@pytest.mark.parametrize("place", ["root", "elsewhere"])
def test_no_file_is_imported_twice(place: str, tmp_path: Path) -> None:
    if place == "elsewhere" and not installed():
        pytest.skip("the package is not installed in this environment")
    expected = {str(path) for _, path in files()}
    code = f"""
import collections, importlib, os, sys
for name in {modules()!r}:
    importlib.import_module(name)
names = collections.defaultdict(list)
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if file and os.path.realpath(file) in {expected!r}:
        names[os.path.realpath(file)].append(name)
assert len(names) >= {len(modules())}, names
twice = {{file: found for file, found in names.items() if len(found) > 1}}
assert not twice, twice
assert all(found[0].split(".")[0] == "axes" for found in names.values()), names
"""
    done = python(code, ROOT if place == "root" else tmp_path)
    assert done.returncode == 0, done.stderr


def test_import_is_light() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import axes
heavy = {"triton", "matplotlib", "typer", "rich", "pytest", "hypothesis"} & (set(sys.modules) - before)
assert not heavy, heavy
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_version_is_said_once() -> None:
    version = PYPROJECT["project"]["version"]
    said = re.search(r'^__version__ = "(.+)"$', (ROOT / "axes" / "__init__.py").read_text(), re.MULTILINE)
    assert said is not None and said[1] == version
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released and released[0] == version, "CHANGELOG.md: the newest release"


def test_pinned_environment_satisfies_the_declared_ranges() -> None:
    """Each dependency and test dependency is pinned to one version, inside the range that pyproject declares."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins: dict[str, str] = {}
    for line in (ROOT / "requirements" / "dev.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pinned = Requirement(line)
            (version,) = pinned.specifier
            assert version.operator == "==", f"not pinned: {line}"
            pins[canonicalize_name(pinned.name)] = version.version
    project = PYPROJECT["project"]
    tested, built = project["optional-dependencies"]["test"], PYPROJECT["build-system"]["requires"]
    for text in project["dependencies"] + tested + built:
        requirement = Requirement(text)
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text}: pinned to {version}"


def installed() -> bool:
    try:
        metadata.version(PYPROJECT["project"]["name"])
    except metadata.PackageNotFoundError:
        return False
    return True


def copy_of_tree(target: Path) -> Path:
    """The files that matter for a build or a `make`, links kept as links."""
    names = ("axes", *FAMILIES, "requirements", "pyproject.toml", "Makefile", "LICENSE", "README.md", "CHANGELOG.md")
    target.mkdir()
    for name in names:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-index", "--no-build-isolation", "-w", "out"]
    done = subprocess.run(build, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tree / "out").glob("axes_state_update-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {f"{package.replace('.', '/')}/{path.name}" for package, path in files()} | {"axes/py.typed"}
    statements = {path.relative_to(ROOT).as_posix() for path in (ROOT / "axes/claims/statements").iterdir()}
    assert "axes/claims/statements/A.toml" in statements
    assert held == expected | statements


def make(tree: Path, *arguments: str) -> str:
    """What `make` complains of; it must fail, in words."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "STOCK"))}
    done = subprocess.run(["make", *arguments], cwd=tree, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


def fake_python(folder: Path, script: str) -> Path:
    """A Python that does as a shell script does, and otherwise as this one."""
    fake = folder / "python3"
    fake.write_text(f'#!/bin/sh\n{script}\nexec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    return fake


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not on the path")


@needs_make
@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("exit 1", "no Python 3.11 to 3.14 found"),
        ('case "$2" in *venv*) exit 1;; esac', "has no venv module"),
        ('case "$*" in *"-m venv"*) exit 7;; esac', "could not create .venv; "),
    ],
    ids=["old-python", "no-venv", "venv-fails"],
)
def test_make_says_what_is_missing(tmp_path: Path, script: str, complaint: str) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    assert complaint in make(tree, "test", f"PYTHON={fake_python(tmp_path, script)}")


@needs_make
@pytest.mark.parametrize(("stock", "asked"), [("", "-m pip"), ("1", "requirements/stock_pip.py")])
def test_make_says_why_pip_may_have_failed(tmp_path: Path, stock: str, asked: str) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    fake = fake_python(
        tmp_path,
        'case "$*" in *"-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; exit;;\n'
        '*" install "*) echo "$0 asked for $*" >&2; exit 1;; esac',
    )
    said = make(tree, "test", f"PYTHON={fake}", f"STOCK={stock}")
    venv = ".venv-stock" if stock else ".venv"
    assert f"{venv}/bin/python asked for {asked} install " in said
    assert "--no-index --find-links DIR" in said and "GB free in .," in said
    assert ("without it pip follows the configuration of this machine" in said) == bool(stock)


@needs_make
def test_stock_is_one_or_nothing() -> None:
    assert 'STOCK is 1 or empty, got "yes"' in make(ROOT, "help", "STOCK=yes")


def test_stock_pip_keeps_the_way_to_the_index_and_no_choice_of_packages(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".config" / "pip").mkdir(parents=True)
    (home / ".config" / "pip" / "pip.conf").write_text(
        "[global]\nproxy = http://configured\ncert = /a b/c.pem\nextra-index-url = https://one\n  https://two\n"
        "[install]\nproxy = http://installing\npre = true\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "XDG_"))}
    env |= {"HOME": str(home), "PIP_FIND_LINKS": "/wheels", "PIP_CONSTRAINT": "c.txt", "PIP_DEFAULT_TIMEOUT": "180"}

    def configured(cert: dict[str, str]) -> dict[str, str]:
        command = [sys.executable, "requirements/stock_pip.py", "config", "list"]
        done = subprocess.run(command, cwd=ROOT, env=env | cert, capture_output=True, text=True, timeout=60, check=True)
        return dict(line.split("=", 1) for line in done.stdout.splitlines())

    expected = {
        ":env:.config-file": f"'{os.devnull}'",
        ":env:.proxy": "'http://installing'",
        ":env:.cert": "'/a b/c.pem'",
        ":env:.default-timeout": "'180'",
    }
    assert configured({}) == expected
    assert configured({"PIP_CERT": "/d.pem"}) == expected | {":env:.cert": "'/d.pem'"}
