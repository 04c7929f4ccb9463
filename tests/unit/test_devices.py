import dataclasses
import json
import os
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import actmem.errors
from actmem.devices import DEVICES_VARIABLE, Attainable, Device, Nvme, device, known_devices
from actmem.errors import ActmemError, DeviceError
from tests.children import run

KEYS = (
    *("t4-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "a100-pcie-80gb", "h100-80gb", "h100-pcie-80gb"),
    *("h100-nvl-94gb", "h200-141gb", "h20-96gb", "gh200-96gb", "b200-180gb", "gb200-186gb", "mi300x-192gb"),
    *("mi250x-64gb", "l40s-48gb", "rtx4090-24gb", "rtx5090-32gb", "rtx3070-8gb", "rtx3080-10gb", "rtx3090-24gb"),
    *("rtx4070ti-12gb", "rtx4080-16gb", "rtx5080-16gb", "a6000-48gb", "a10-24gb", "l4-24gb"),
)
WITHOUT_BF16 = ("t4-16gb", "v100-32gb")
WITHOUT_TF32 = (*WITHOUT_BF16, "mi250x-64gb")
WITHOUT_FP8 = (*WITHOUT_TF32, "a100", "rtx30", "a6000", "a10-")
TOY = Device(
    key="toy",
    name="a toy",
    memory_bytes=1000,
    flops_per_second={"fp32": 100.0, "bf16": 400.0, "fp8": 1600.0},
    memory_bytes_per_second=10.0,
    host_link_bytes_per_second=4.0,
    nvme=Nvme("slow", 3.0, 1.0),
    attainable=Attainable(matmul=0.5, memory=0.8, link=0.25),
)


@pytest.fixture(autouse=True)
def no_file_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICES_VARIABLE, raising=False)


def refusal(which: object = "toy", path: Path | None = None) -> str:
    with pytest.raises(DeviceError) as caught:
        device(which, path=path)  # type: ignore[arg-type]
    return str(caught.value)


# --- the built-in devices ---------------------------------------------------------------------------------------------


def test_the_promised_devices_are_there_and_no_others() -> None:
    assert tuple(known_devices()) == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_every_device_has_all_figures_and_each_has_a_source(key: str) -> None:
    found = device(key)
    figures = {"memory_bytes", "memory_bytes_per_second", "host_link_bytes_per_second"}
    figures |= {"driver_bytes", "blas_workspace_bytes"} | ({"context_bytes"} if not key.startswith("mi") else set())
    figures |= {f"flops_per_second.{name}" for name in found.flops_per_second}
    figures |= {"nvme.read_bytes_per_second", "nvme.write_bytes_per_second"}
    figures |= {"attainable.matmul", "attainable.memory", "attainable.link"}
    if found.fabric is not None:
        figures |= {"fabric.peers", "fabric.peer_bytes_per_second", "fabric.network_bytes_per_second"}
    assert set(found.sources) == figures
    assert all(re.search(r"NVIDIA|AMD|Micron|Bekman|torchao|PyTorch", source) for source in found.sources.values())
    assert ("bf16" in found.flops_per_second) != (key in WITHOUT_BF16)
    assert ("tf32" in found.flops_per_second) != (key in WITHOUT_TF32)
    assert ("fp8" in found.flops_per_second) != key.startswith(WITHOUT_FP8)
    stated = int(key.rpartition("-")[2].removesuffix("gb"))
    assert 0.93 * stated * 2**30 <= found.memory_bytes <= 1.02 * stated * 2**30
    assert found.has_caching_allocator and 0 < found.outside_bytes < 0.11 * found.memory_bytes


@pytest.mark.parametrize("key", KEYS)
def test_the_figures_of_a_device_agree_with_what_its_source_says(key: str) -> None:
    """A source states the figure itself, or twice the figure and the word halved; a slip of a digit shows."""
    found = device(key)
    units = {"GB/s": 1e9, "TB/s": 1e12, "TFLOPS": 1e12, "PFLOPS": 1e15}
    stated = {"memory_bytes_per_second": found.memory_bytes_per_second}
    stated["host_link_bytes_per_second"] = found.host_link_bytes_per_second
    stated |= {f"flops_per_second.{name}": rate for name, rate in found.flops_per_second.items()}
    for name, value in stated.items():
        source = found.sources[name]
        match = re.search(r"(\d[\d,.]*) ([GT]B/s|[TP]FLOPS)", source)
        assert match is not None and value is not None, source
        figure = float(match[1].replace(",", "")) * units[match[2]]
        assert figure == pytest.approx(value * 2 ** source.count("halved")), (name, source)
    for name in ("memory_bytes", "driver_bytes", "context_bytes", "blas_workspace_bytes"):
        value = getattr(found, name)
        written = [f"{value:,} bytes", f"{value // 2**20:,} MiB"] if value is not None else [""]
        assert any(text in found.sources.get(name, "") for text in written), name


@pytest.mark.parametrize("key", KEYS)
def test_narrower_numbers_are_never_slower_and_every_rate_is_plausible(key: str) -> None:
    found = device(key)
    names = ("fp32", "tf32", "fp16", "bf16", "fp8")
    rates = [found.flops_per_second[name] for name in names if name in found.flops_per_second]
    assert rates == sorted(rates)
    assert rates[0] >= 8e12 and rates[-1] <= 10e15
    assert found.memory_bytes_per_second is not None and 0.3e12 <= found.memory_bytes_per_second <= 10e12
    assert found.host_link_bytes_per_second in (16e9, 32e9, 64e9, 225e9, 450e9)
    assert all(0.3 <= part <= 1 for part in dataclasses.astuple(found.attainable))


def test_the_attainable_part_is_common_to_all_but_for_a_device_that_has_its_own() -> None:
    common = device("h100-80gb").attainable
    assert device("b200-180gb").attainable == common
    assert device("mi300x-192gb").attainable == dataclasses.replace(common, matmul=0.5)


def test_a_device_is_plain_data() -> None:
    found = device("h100-80gb")
    assert pickle.loads(pickle.dumps(found)) == found
    assert hash(found) == hash(device("h100-80gb")) != hash(device("h200-141gb"))
    assert json.loads(json.dumps(dataclasses.asdict(found)))["nvme"]["key"] == "pcie5-x4"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.memory_bytes = 1  # type: ignore[misc]


def test_devices_and_amounts_work_where_torch_cannot_be_imported() -> None:
    program = """
import sys, types
sys.modules["torch"] = None
package = types.ModuleType("actmem")
package.__path__ = [sys.argv[1]]
sys.modules["actmem"] = package
from actmem import units as amounts, devices
print(amounts.parse_budget(0.5, device_bytes=devices.device("h100-80gb").memory_bytes))
"""
    folder = str(Path(actmem.errors.__file__).parent)
    result = run("-c", program, folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["42760404992"]


# --- the roofline -----------------------------------------------------------------------------------------------------


def test_an_operator_takes_as_long_as_computing_or_moving_whichever_is_longer() -> None:
    # computing at 400 * 0.5 = 200 FLOP/s, moving at 10 * 0.8 = 8 B/s
    assert TOY.seconds(flops=1000, moved_bytes=8, dtype="bfloat16") == 5.0
    assert TOY.seconds(flops=1000, moved_bytes=80, dtype="bfloat16") == 10.0
    assert TOY.seconds(flops=0, moved_bytes=80, dtype="bfloat16") == 10.0
    assert TOY.seconds(flops=1000, moved_bytes=0, dtype="bfloat16") == 5.0
    assert TOY.seconds(flops=0, moved_bytes=0, dtype="bfloat16") == 0.0


def test_a_real_device_by_hand() -> None:
    h100 = device("h100-80gb")
    assert h100.seconds(2 * 8192**3, 3 * 2 * 8192**2, "bfloat16") == pytest.approx(2 * 8192**3 / (989.4e12 * 0.7))
    assert h100.seconds(8192**2, 3 * 2 * 8192**2, "bfloat16") == pytest.approx(3 * 2 * 8192**2 / (3.35e12 * 0.9))


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("float32", 100.0),
        ("torch.float32", 100.0),
        ("bfloat16", 400.0),
        ("float16", 400.0),  # the makers state one rate for both
        ("float8_e4m3fn", 1600.0),
        ("float8_e5m2", 1600.0),
        ("float64", 100.0),  # no figure of its own: fp32's
        ("complex64", 100.0),
        ("tf32", 100.0),
        ("int64", None),
        ("uint8", None),
        ("bool", None),
    ],
)
def test_each_dtype_has_its_rate_else_that_of_fp32_and_integers_none(dtype: str, rate: float | None) -> None:
    assert TOY.flop_rate(dtype) == rate


def test_figures_of_their_own_go_before_those_of_other_dtypes() -> None:
    own = dataclasses.replace(TOY, flops_per_second={**TOY.flops_per_second, "fp16": 7.0, "fp64": 8.0, "tf32": 9.0})
    assert [own.flop_rate(dtype) for dtype in ("float16", "float64", "tf32", "float32")] == [7.0, 8.0, 9.0, 100.0]


def test_integer_arithmetic_costs_only_what_it_moves() -> None:
    assert TOY.seconds(flops=10**9, moved_bytes=8, dtype="int64") == 1.0


@settings(deadline=None)  # a shared machine may pause
@given(st.integers(0, 10**18), st.integers(0, 10**15), st.sampled_from(KEYS), st.sampled_from(["bfloat16", "float32"]))
def test_more_work_or_more_bytes_never_take_less_time(flops: int, moved: int, key: str, dtype: str) -> None:
    found = device(key)
    least = found.seconds(flops, moved, dtype)
    assert 0 <= least <= min(found.seconds(2 * flops + 1, moved, dtype), found.seconds(flops, 2 * moved + 1, dtype))


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        DeviceError, match=r"dtype = 'bananas' is not known. Expected the name of a torch dtype, such as bfloat16"
    ):
        TOY.flop_rate("bananas")


def test_offloading_counts_the_slowest_part_of_the_way() -> None:
    assert TOY.offload_rate("host") == 1.0  # 4 * 0.25
    assert dataclasses.replace(TOY, nvme=Nvme("fast", 8.0, 9.0)).offload_rate("disk") == 1.0  # the link
    assert dataclasses.replace(TOY, nvme=Nvme("slow", 0.5, 9.0)).offload_rate("disk") == 0.5
    assert dataclasses.replace(TOY, nvme=Nvme("slow", 9.0, 0.25)).offload_rate("disk") == 0.25
    assert (
        dataclasses.replace(TOY, host_link_bytes_per_second=None).offload_rate("disk") == 1.0
    )  # a CPU has no such link


@pytest.mark.parametrize(
    ("change", "use", "line"),
    [
        ({"memory_bytes_per_second": None}, lambda d: d.seconds(1, 1, "float32"), "memory_bytes_per_second = 2e12"),
        ({"flops_per_second": {"bf16": 1.0}}, lambda d: d.seconds(1, 1, "float32"), "flops_per_second.fp32 = 100e12"),
        ({"flops_per_second": {}}, lambda d: d.seconds(1, 1, "bfloat16"), "flops_per_second.bf16 = 100e12"),
        ({"host_link_bytes_per_second": None}, lambda d: d.offload_rate("host"), "host_link_bytes_per_second = 64e9"),
        ({"nvme": None}, lambda d: d.offload_rate("disk"), 'nvme = "pcie4-x4"'),
        ({}, lambda d: d.peer_rate(8), 'fabric = "dgx-h100"'),
    ],
)
def test_a_missing_figure_is_named_and_its_repair_works(change, use, line: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        use(dataclasses.replace(TOY, **change))
    message = str(caught.value)
    assert "the device 'toy' (a toy) has no figure for" in message and DEVICES_VARIABLE in message
    repair = message.partition("with these lines:\n")[2]
    assert repair == f"[devices.toy]\n{line}"
    file = tmp_path / "own.toml"
    file.write_text(f'{repair}\nname = "a toy"\nmemory_bytes = 1000\n')
    found = device("toy", path=file)
    assert next(iter(set(found.sources) & {line.partition(" ")[0], "nvme.read_bytes_per_second", "fabric.peers"}))


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["h100-80gb", "H100-80GB", "H100 80GB", "h100_80gb", " h100-80gb "])
def test_upper_case_and_separators_do_not_matter(spelling: str) -> None:
    assert device(spelling).key == "h100-80gb"


def test_a_device_is_taken_as_it_is() -> None:
    assert device(TOY) is TOY


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("h100", "'h100-80gb' or 'h100-pcie-80gb' or 'h100-nvl-94gb'"),
        ("NVIDIA H100 80GB HBM3", "'h100-80gb' or 'h100-pcie-80gb' or 'h100-nvl-94gb'"),
        ("RTX 4090", "'rtx4090-24gb'"),
        ("b200", "'b200-180gb'"),
        ("mi300", "'mi300x-192gb'"),
        ("l40", "'l40s-48gb'"),
        ("h1000-80gb", "'h100-80gb' or 'h100-pcie-80gb' or 'h100-nvl-94gb'"),
        ("gb20", "'gb200-186gb'"),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest_names(name: str, near: str) -> None:
    message = refusal(name)
    assert f"device {name!r} is not known. Permitted: {', '.join(KEYS)}. Did you mean {near}? Add others" in message


@pytest.mark.parametrize("name", ["", "-", "bananas"])
def test_where_nothing_is_near_nothing_is_proposed(name: str) -> None:
    assert "Did you mean" not in refusal(name) and "Permitted" in refusal(name)


@pytest.mark.parametrize("which", [None, 7, b"h100-80gb", ["h100-80gb"]])
def test_what_is_no_name_is_refused(which: object) -> None:
    assert refusal(which).startswith(f"device = {which!r} is not a device. Expected one of t4-16gb")


def test_the_error_can_be_caught_as_a_value_error_and_as_one_of_actmem() -> None:
    assert issubclass(DeviceError, ActmemError) and issubclass(DeviceError, ValueError)


# --- a file of the user's ---------------------------------------------------------------------------------------------

OWN = """
[attainable]
memory = 0.6

[nvme.array]
read_bytes_per_second = 50e9
write_bytes_per_second = { value = 40e9, source = "our own fio run" }

[devices.h100-80gb]
memory_bytes = 85_000_000_000
nvme = "array"
flops_per_second.fp8 = { value = 1.5e15 }

[devices.ours]
name = "a card of ours"
memory_bytes = 16e9
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    return file


def test_a_users_file_is_read_over_the_built_in_one_figure_by_figure(own: Path) -> None:
    found, plain = device("h100-80gb", path=own), device("h100-80gb")
    assert found.memory_bytes == 85_000_000_000 and found.sources["memory_bytes"] == str(own)
    assert found.nvme == Nvme("array", 50e9, 40e9)
    assert found.sources["nvme.read_bytes_per_second"] == str(own)
    assert found.sources["nvme.write_bytes_per_second"] == "our own fio run"
    assert found.flops_per_second == {**plain.flops_per_second, "fp8": 1.5e15}
    assert found.attainable == dataclasses.replace(plain.attainable, memory=0.6)
    assert device("b200-180gb", path=own).attainable.memory == 0.6
    untouched = {"name", "memory_bytes_per_second", "host_link_bytes_per_second"}
    assert {name: getattr(found, name) for name in untouched} == {name: getattr(plain, name) for name in untouched}
    assert plain.memory_bytes == 81_559 * 2**20  # and nothing of it stays


def test_a_users_own_device_may_be_incomplete(own: Path) -> None:
    ours = device("ours", path=own)
    assert ours.memory_bytes == 16_000_000_000 and type(ours.memory_bytes) is int
    assert (ours.flops_per_second, ours.memory_bytes_per_second, ours.nvme) == ({}, None, None)
    assert tuple(known_devices(path=own)) == (*KEYS, "ours")


def test_the_environment_names_the_file_unless_a_path_is_given(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICES_VARIABLE, os.fspath(own))
    assert device("ours").name == "a card of ours"
    other = tmp_path / "other.toml"
    other.write_text('[devices.theirs]\nname = "another"\nmemory_bytes = 1e9\n')
    assert tuple(known_devices(path=other)) == (*KEYS, "theirs")
    monkeypatch.setenv(DEVICES_VARIABLE, "")
    assert tuple(known_devices()) == KEYS


NEW = '[devices.new]\nname = "new"\nmemory_bytes = 1e9\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            NEW + "memory_bites = 5",
            "devices.new.memory_bites is not a known key. Permitted: name, memory_bytes, flops_",
        ),
        (NEW + "memory_bites = 5", "Did you mean 'memory_bytes'?"),
        (NEW + "flops_per_second.fp9 = 5", "fp9 is not a known key. Permitted: bf16, fp16, fp32, tf32, fp8, fp64."),
        (NEW + "attainable.matmull = 0.5", "Permitted: matmul, memory, link. Did you mean 'matmul'?"),
        ("[gadgets.x]\nname = 'x'", "gadgets is not a known key. Permitted: devices, nvme, fabric, attainable."),
        (
            '[devices.new]\nname = "new"',
            "devices.new.memory_bytes is missing. Add the line memory_bytes = 80_000_000_000",
        ),
        ("[devices.new]\nmemory_bytes = 1e9", 'devices.new.name is missing. Add the line name = "what it is" to [dev'),
        (NEW.replace("1e9", '"80GB"'), "devices.new.memory_bytes = '80GB' is not a figure. Expected a number above 0."),
        (NEW.replace("1e9", '"80GB"'), "Write memory_bytes = 80_000_000_000."),
        (NEW.replace("1e9", "0"), "devices.new.memory_bytes = 0 is not a figure."),
        (NEW.replace("1e9", "-5"), "devices.new.memory_bytes = -5 is not a figure."),
        (NEW.replace("1e9", "nan"), "devices.new.memory_bytes = nan is not a figure."),
        (NEW.replace("1e9", "true"), "devices.new.memory_bytes = True is not a figure."),
        (NEW + "flops_per_second.bf16 = inf", "devices.new.flops_per_second.bf16 = inf is not a figure."),
        (
            NEW + 'flops_per_second.bf16 = { value = "fast" }',
            "devices.new.flops_per_second.bf16 = 'fast' is not a figure.",
        ),
        (
            NEW + "flops_per_second.bf16 = { source = 'x' }",
            "devices.new.flops_per_second.bf16 has no value. Write bf16 =",
        ),
        (
            NEW + "flops_per_second.bf16 = { value = 1, source = '' }",
            "bf16.source = '' is not a string. Write source =",
        ),
        (
            NEW + "flops_per_second.bf16 = { value = 1, page = 3 }",
            "bf16.page is not a known key. Permitted: value, source.",
        ),
        (
            NEW + 'flops_per_second = "fast"',
            "devices.new.flops_per_second = 'fast' is not a table. Expected [devices.new.flop",
        ),
        (
            NEW + "attainable.link = 80",
            "devices.new.attainable.link = 80 is more than the whole peak. Expected a fraction",
        ),
        ("[attainable]\nmatmul = 1.2", "attainable.matmul = 1.2 is more than the whole peak."),
        (
            "[attainable]\nmatmul = 0",
            "attainable.matmul = 0 is not a figure. Expected a number above 0. Write matmul = 0.8.",
        ),
        (
            NEW + 'fabric = "string"',
            "devices.new.fabric = 'string' is not known. Permitted: dgx-a100, dgx-h100, dgx-b200,",
        ),
        (
            NEW + 'nvme = "floppy"',
            "devices.new.nvme = 'floppy' is not a known class of drives. Permitted: pcie4-x4, pcie5-x4.",
        ),
        (NEW + "nvme = ['pcie4-x4']", "devices.new.nvme = ['pcie4-x4'] is not a string."),
        ("[nvme.array]\nread_bytes_per_second = 5e9", "nvme.array.write_bytes_per_second is missing."),
        (
            "[devices]\nnew = 'h100'",
            "devices.new = 'h100' is not a table. Expected [devices.new], with name, memory_bytes",
        ),
        ("devices = 5", "devices = 5 is not a table. Expected [devices], with one table for each name."),
        ("attainable = 0.8", "attainable = 0.8 is not a table. Expected [attainable], with matmul, memory, link."),
        (NEW + "flops_per_second = 3e12", "devices.new.flops_per_second = 3000000000000.0 is not a table."),
        (NEW + "nvme = 4", "devices.new.nvme = 4 is not a string."),
        ('[devices.""]\nname = "x"\nmemory_bytes = 1', "devices has a table without a name. Write [devices.NAME]."),
        ("[devices.new", "cannot be read as TOML"),
        (NEW + NEW, "cannot be read as TOML"),
    ],
)
def test_a_mistake_in_a_users_file_is_named_with_its_place_and_its_repair(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    found = refusal("new", path=file)
    assert found.startswith(f"the device file {str(file)!r}")
    assert message in found
    assert not re.search(r"pydantic|validation error|model_type|Input should", found)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing.toml"
    assert f"the device file {str(missing)!r} cannot be read: No such file" in refusal("toy", path=missing)
    assert "cannot be read" in refusal("toy", path=tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as TOML" in refusal("toy", path=binary)
    monkeypatch.setenv(DEVICES_VARIABLE, os.fspath(missing))
    assert DEVICES_VARIABLE in refusal("h100-80gb")
