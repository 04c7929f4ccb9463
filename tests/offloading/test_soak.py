"""Long runs stay flat; faults end in a clear error or a clean end: no hang, no wrong number, nothing left."""

import gc
import itertools
import os
import random
import shutil
import signal
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem import Full, Offload, OffloadError, Rule, Rules
from actmem.modes import Mode
from tests.children import child, ended
from tests.patience import eventually

PLACES = ("disk", "host")


class Block(nn.Module):
    """A block with a second result, which a loss may leave aside."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.up(self.norm(x)))
        return x + self.down(hidden), hidden.tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        aside = []
        for block in self.blocks:
            x, side = block(x)
            aside.append(side)
        return self.head(x), aside


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(rows: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def how(place: str, folder: Path | None = None, **rest: Any) -> Offload:
    where = {"directory": str(folder)} if place == "disk" and folder is not None else {}
    return Offload(**{"to": place, "min_bytes": 0, "copy_cpu": place == "host", **where, **rest})


def everything(offload: Offload) -> Mode:
    return Rules([Rule("offload")], offload=offload)


def left_over() -> tuple[list[str], list[str]]:
    files = [str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink() and f.exists()]
    return sorted(t.name for t in threading.enumerate()), sorted(files)


def live_bytes() -> int:
    """Add up the storages of all tensors that Python knows of."""
    found = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.device.type != "meta":  # those take no bytes, at one address
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


# ---------------------------------------------------------------- the soak


@pytest.mark.parametrize(
    ("form", "place", "num_steps"),
    [
        ("everything", "disk", 60),
        ("inputs", "host", 60),
        ("context", "disk", 60),
        *(
            pytest.param(form, place, 1000, marks=pytest.mark.slow)
            for form, place in (("everything", "disk"), ("inputs", "host"), ("context", "host"))
        ),
    ],
)
def test_a_run_of_varying_lengths_dead_branches_and_skipped_steps_stays_flat(
    form: str, place: str, num_steps: int, tmp_path: Path
) -> None:
    """Sequence lengths vary as with packing; every fifth step is skipped, and a branch is dead in two of three."""
    before, chance = left_over(), random.Random(1)
    lengths = [chance.choice([32, 64, 96, 128, 200, 256]) for _ in range(num_steps)]
    plain, managed = build(), build()
    offload, away, applied = how(place, tmp_path, in_flight_bytes=2**16), None, None
    if form == "context":
        fields = {"to": place, "min_bytes": 0, "copy_cpu": place == "host", "in_flight_bytes": 2**16}
        away = actmem.offload(managed, **fields, **({"directory": str(tmp_path)} if place == "disk" else {}))
    else:
        applied = actmem.apply(managed, everything(offload) if form == "everything" else Full(offload_inputs=offload))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, managed)]

    def loss(model: nn.Module, step: int) -> Tensor:
        out, aside = model(batch(lengths[step], step))
        value = out.square().mean()
        return value + aside[1].mean() if step % 3 == 0 else value

    live: list[int] = []
    stored: list[int] = []
    sent = [0]
    gc.collect()
    gc.disable()  # what a step leaves must be gone by reference count alone
    try:
        for step in range(num_steps):
            for model, optimizer in zip((plain, managed), optimizers, strict=True):
                if model is managed and away is not None:
                    with away:
                        value = loss(model, step)
                else:
                    value = loss(model, step)
                if step % 5 != 4:
                    value.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                del value
            ledger = applied.report().moved if applied is not None else away.ledger
            assert ledger.waiting_bytes == 0
            assert ledger.out_bytes == ledger.back_bytes + ledger.dropped_bytes
            stored.append(ledger.store_bytes)
            sent.append(ledger.out_bytes)
            if step % 10 == 9:
                live.append(live_bytes())
    finally:
        gc.enable()
    assert ledger.dropped_bytes > 0 < ledger.back_bytes
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), managed.parameters(), strict=True))
    most = max(after - before for before, after in itertools.pairwise(sent))
    warm = num_steps // 3
    assert max(stored[warm:]) <= max(*stored[:warm], 1.25 * most), "the store grows to what one step sends, no further"
    third = len(live) // 3  # what is on its way out at the moment counts too, and a worker may hold one more
    assert max(live[-third:]) <= max(live[:third]) + 2**16 + 256 * 64 * 4
    if applied is not None:
        applied.remove()
    else:
        away.close()
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- faults in training


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(batch())[0].square().mean().backward()
    return gradients(model)


@pytest.mark.parametrize("place", PLACES)
def test_no_room_in_mid_step_raises_in_forward_and_the_next_smaller_step_is_right(place: str, tmp_path: Path) -> None:
    before = left_over()
    plain, model = build(), build()
    limit_bytes = 3 * 64 * 1024 * 2
    with actmem.apply(model, everything(how(place, tmp_path, limit_bytes=limit_bytes))) as applied:
        with pytest.raises(OffloadError, match=r"no room for .*limit_bytes = "):
            model(batch(4096))
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(train(plain), train(model), strict=True))
        ledger = applied.report().moved
        assert ledger.waiting_bytes == 0 < ledger.dropped_bytes
        assert ledger.store_bytes <= limit_bytes
    assert left_over() == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of one MiB, where the user may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no permission to mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_raises_at_the_step_that_filled_it_with_path_and_sizes(small_disk: Path) -> None:
    before, plain, model = left_over(), build(), build()
    with actmem.apply(model, everything(how("disk", small_disk))) as applied:
        with pytest.raises(OffloadError, match=r"no room for .* in .*actmem-offload.* are free on the disk"):
            model(batch(4096))
        assert all(torch.equal(a, b) for a, b in zip(train(plain), train(model), strict=True))
        assert applied.report().moved.waiting_bytes == 0
    assert left_over() == before
    assert list(small_disk.iterdir()) == []


def test_a_directory_that_is_removed_raises_at_the_next_send_and_what_is_away_comes_back(tmp_path: Path) -> None:
    before, plain, model = left_over(), build(), build()
    with actmem.apply(model, everything(how("disk", tmp_path))) as applied:
        loss = model(batch())[0].square().mean()
        settle(applied)
        shutil.rmtree(next(tmp_path.iterdir()))
        loss.backward()  # the file has no name any more, but its bytes are there
        assert all(torch.equal(a, b) for a, b in zip(train(plain), gradients(model), strict=True))
        del loss
        with pytest.raises(OffloadError, match=r"removed while in use.*name another"):
            model(batch())
    assert left_over() == before


def settle(applied: Any) -> None:
    """Wait until all that was sent has arrived."""
    applied._offloader.lane.settle()


def test_a_flipped_byte_raises_in_backward_and_no_gradient_is_wrong(tmp_path: Path) -> None:
    before, plain, model = left_over(), build(), build()
    plain(batch(1024))[0].square().mean().backward()
    with actmem.apply(model, everything(how("disk", tmp_path))) as applied:
        loss = model(batch(1024))[0].square().mean()
        settle(applied)
        model(batch(1))  # takes note that all copies are done
        (file,) = tmp_path.rglob("activations")
        with file.open("r+b") as raw:
            for place in range(0, 2**20, 4096):  # one byte of every part: whatever comes first is wrong
                raw.seek(place + 5)
                byte = raw.read(1)
                raw.seek(place + 5)
                raw.write(bytes([byte[0] ^ 0x10]))
        with pytest.raises(OffloadError, match="checksum"):
            loss.backward()
        pairs = list(zip(plain.parameters(), model.parameters(), strict=True))
        assert any(b.grad is None for _, b in pairs), "it stopped there"
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs if b.grad is not None), "what was computed is right"
        del loss
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- faults of processes

PROGRAM = """
    import sys, time, os, torch, actmem
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4)])
    mode = actmem.OffloadActivations(to="disk", min_bytes=0, directory=sys.argv[1], in_flight_bytes=2**20)
    applied = actmem.apply(model, mode)
    print("began", flush=True)
"""


@contextmanager
def started(folder: Path, rest: str) -> Iterator[subprocess.Popen[str]]:
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(rest)
    one_thread = {"OMP_NUM_THREADS": "1"}  # the threads of OpenMP do not survive a fork
    with child("-c", code, str(folder), env=one_thread) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        yield process


def has_written(folder: Path) -> bool:
    return any(file.stat().st_size for file in folder.rglob("activations"))


FOREVER = """
    while True:
        model(torch.randn(2048, 256)).square().mean().backward()
"""


def test_ctrl_c_in_mid_step_ends_the_process_in_seconds_and_leaves_no_file(tmp_path: Path) -> None:
    with started(tmp_path, FOREVER) as process:
        assert eventually(lambda: has_written(tmp_path))
        process.send_signal(signal.SIGINT)
        _, errors = ended(process)
        assert "KeyboardInterrupt" in errors
        assert "Fatal" not in errors
        assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    with started(tmp_path, FOREVER):
        assert eventually(lambda: has_written(tmp_path))
    # Leaving the block has killed it.
    assert len(list(tmp_path.iterdir())) == 1, "nobody could clean up"
    model = build()
    with actmem.apply(model, everything(how("disk", tmp_path))):
        assert [f"-{os.getpid()}-" in p.name for p in tmp_path.iterdir()] == [True]
        train(model)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_without_remove_leaves_no_file_and_does_not_hang(tmp_path: Path) -> None:
    holds_its_graph = "loss = model(torch.randn(64, 256)).sum()\n"
    with started(tmp_path, holds_its_graph) as process:
        _, errors = ended(process)
        assert (process.returncode, errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_is_told_to_apply_for_itself_and_harms_nothing(tmp_path: Path) -> None:
    program = """
        loss = model(torch.randn(64, 256)).square().mean()
        pid = os.fork()
        if pid == 0:
            try:
                model(torch.randn(64, 256))
            except actmem.OffloadError as error:
                print("child:", error, flush=True)
                os._exit(7)
            os._exit(0)
        print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        loss.backward()
        print("files", len(os.listdir(sys.argv[1])), "moved", applied.report().moved.back_bytes > 0)
        del loss
        applied.remove()
    """
    with started(tmp_path, program) as process:
        printed, errors = ended(process)
    assert errors == ""
    assert "child: " in printed and "forked" in printed
    assert "status 7" in printed
    assert "files 1 moved True" in printed
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_backward_leaves_nothing_after_remove(tmp_path: Path) -> None:
    before = left_over()
    model = build()
    with actmem.apply(model, everything(how("disk", tmp_path))) as applied:
        for _ in range(2):
            out = model(batch())[0]
            out.register_hook(lambda gradient: (_ for _ in ()).throw(ValueError("in backward")))
            with pytest.raises(ValueError, match="in backward"):
                out.square().mean().backward()
            del out
        gc.collect()
        train(model)
        ledger = applied.report().moved
        assert ledger.waiting_bytes == 0
    assert left_over() == before
    assert list(tmp_path.iterdir()) == []
