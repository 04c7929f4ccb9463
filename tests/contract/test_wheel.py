"""What is built and installed by itself works: no file of the source tree, no development tool, no extra."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def run(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)  # noqa: PLW1510
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_wheel_installs_into_an_empty_environment_and_its_demo_plans_and_reports_there(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("actmem-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"actmem/devices.toml", "actmem/py.typed"} <= set(names)
    assert all(name.startswith(("actmem/", "actmem-")) for name in names)

    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", home, cwd=tmp_path)
    run(home / "bin" / "pip", "install", "--quiet", wheel, cwd=tmp_path)
    installed = {line.split("==")[0].lower() for line in run(home / "bin" / "pip", "freeze", cwd=tmp_path).splitlines()}
    assert {"torch", "highspy", "tyro"} <= installed
    assert installed & {"accelerate", "lightning", "plotly", "pytest", "transformers", "trl"} == set()
    said = run(home / "bin" / "actmem", "demo", cwd=tmp_path)
    assert "Llama-3.1-8B" in said
    assert "h100-80gb" in run(home / "bin" / "actmem", "devices", cwd=tmp_path)
