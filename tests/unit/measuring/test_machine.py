import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from actmem.devices import Attainable, device
from actmem.errors import DeviceError
from actmem.measuring.machine import measure_machine

SHORT = 0.05


def test_the_machine_at_hand_is_a_device_with_what_was_measured() -> None:
    here = measure_machine(seconds=SHORT, dtypes=["bfloat16"])
    assert here.key == "this-machine" and device(here) is here
    assert set(here.flops_per_second) == {"fp32", "bf16"}
    assert all(1e8 < rate < 1e16 for rate in here.flops_per_second.values())
    assert here.memory_bytes_per_second is not None and 1e8 < here.memory_bytes_per_second < 1e14
    assert here.attainable == Attainable(1.0, 1.0, 1.0)  # what was reached needs no discount
    assert here.nvme is None and here.host_link_bytes_per_second is None
    measured = {"flops_per_second.fp32", "flops_per_second.bf16", "memory_bytes_per_second", "memory_bytes"}
    assert set(here.sources) == measured


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator's memory is reported then")
def test_its_memory_is_no_more_than_the_physical_one() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**28 < measure_machine(seconds=SHORT).memory_bytes <= physical


def test_it_is_measured_once_for_each_number_of_threads_and_leaves_the_random_state_alone() -> None:
    threads = torch.get_num_threads()
    first = measure_machine(seconds=SHORT)
    assert first.name.endswith(f", {threads} thread{'s' * (threads > 1)}")
    random = torch.get_rng_state()
    try:
        torch.set_num_threads(threads + 1)
        other = measure_machine(seconds=SHORT)
    finally:
        torch.set_num_threads(threads)
    assert other.name.endswith(f", {threads + 1} threads") and other is not first
    assert torch.equal(random, torch.get_rng_state()) and torch.is_grad_enabled()
    assert measure_machine(seconds=SHORT) is first


def test_the_disk_is_measured_where_a_folder_is_named_and_nothing_stays_there(tmp_path: Path) -> None:
    here = measure_machine(seconds=SHORT, directory=tmp_path)
    assert here.nvme is not None
    assert 1e5 < here.nvme.write_bytes_per_second < 1e12 and 1e5 < here.nvme.read_bytes_per_second < 1e12
    assert here.sources["nvme.write_bytes_per_second"] == f"measured in {tmp_path}"
    assert list(tmp_path.iterdir()) == []
    assert here.offload_rate("disk") == min(dataclasses.astuple(here.nvme)[1:])
    assert measure_machine(seconds=SHORT).nvme is None


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(DeviceError, match="leaves no time to measure"):
            measure_machine(seconds=seconds)
    with pytest.raises(DeviceError, match=r"cannot be measured: No such file or directory. Name a folder"):
        measure_machine(seconds=SHORT, directory=tmp_path / "missing")
    with FakeTensorMode(), pytest.raises(DeviceError, match="where tensors are not real, as under FakeTensorMode"):
        measure_machine(seconds=SHORT)
