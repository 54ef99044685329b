"""What a user gets who installs shoal and has no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    pytest.importorskip("setuptools", "77")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("src", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(source)], cwd=source, check=True, capture_output=True)
    [wheel] = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    return site


def _shoal(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_wheel_holds_the_configurations_of_the_checkout(site: Path) -> None:
    shipped = {path.name: path.read_bytes() for path in (site / "shoal" / "configs").iterdir()}
    assert shipped == {path.name: path.read_bytes() for path in (ROOT / "configs").iterdir()}
    assert (site / "shoal/cli/remote/shoal-servers.service").is_file()


def test_without_a_checkout_the_sandbox_and_the_other_configurations_are_found(site: Path, tmp_path: Path) -> None:
    done = _shoal(site, tmp_path, "run-local", "--print-config")
    assert done.returncode == 0, done.stderr
    assert "experiment_prefix: sandbox" in done.stdout
    done = _shoal(site, tmp_path, "run-local", "--print-config", "--config-path", "configs/resnet18_split.yaml")
    assert done.returncode == 0, done.stderr
    assert "family: resnet18" in done.stdout


def test_a_file_of_the_user_s_own_comes_before_the_one_that_is_shipped(site: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sandbox.yaml").write_text("experiment_prefix: mine\n")
    done = _shoal(site, tmp_path, "run-local", "--print-config")
    assert "experiment_prefix: mine" in done.stdout, done.stderr
