import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from actmem.cli import main

DEVICES = Path(__file__).parents[1] / "devices.toml"

MINE = """
import torch
from torch import nn

NUM_CALLS = [0]


class Net(nn.Module):
    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(num_layers)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Narrow(Net):
    def forward(self, x):
        return super().forward(x.view(-1, 63))


class Block(nn.Sequential):
    def forward(self, x):
        from torch.utils._python_dispatch import _get_current_dispatch_mode as mode

        return super().forward(x) * (2 if type(mode()).__name__ == "Tape" else 1)


class Spoiled(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])


class Drifting(Net):
    def forward(self, x):
        NUM_CALLS[0] += 1
        return super().forward(x * NUM_CALLS[0])


def make(batch=256):
    print("a line of the user's own")
    return Net(), (torch.randn(batch, 64),), torch.sum


def ignoring(batch=256):
    return Net(), (torch.randn(8, 64),), torch.sum


def large():
    return Net(), (torch.randn(8, 64),), torch.sum


def on_meta():
    with torch.device("meta"):
        return Net(), (torch.randn(8, 64),), torch.sum


def spoiled():
    return Spoiled(), (torch.randn(8, 64),), torch.sum


def drifting():
    return Drifting(), (torch.randn(8, 64),), torch.sum


def without_loss():
    return Net(), (torch.randn(8, 64),)


def without_batch():
    return Net()


def a_list():
    return Net(), [1, 2]


def a_number():
    return 3


def raising():
    raise ValueError("my own mistake")


def misfit():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(8, 63),), torch.sum


def leaving():
    raise SystemExit(0)


class Looking(Net):
    def forward(self, x):
        return super().forward(x * (1 + int(x.sum().item() > 0)))


def looking():
    return Looking(), (torch.randn(8, 64),), torch.sum


def wrong_batch():
    return Net(), {"input_ids": torch.randn(8, 64)}, torch.sum


def narrow():
    return Narrow(), (torch.randn(8, 64),), torch.sum
"""


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run a command line in this process, in a folder of its own that has the module `mine`."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "ACTMEM_DEVICES": str(DEVICES)}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    for name in ("FORCE_COLOR", "ACTMEM_TRACEBACK", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def typed(*words: str) -> Outcome:
        capsys.readouterr()
        code = main(words)
        said = capsys.readouterr()
        return Outcome(code, said.out, said.err)

    yield typed
    sys.modules.pop("mine", None)
