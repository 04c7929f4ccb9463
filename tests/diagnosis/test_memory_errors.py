"""An out-of-memory error is read in every wording of torch, and answered with its own numbers."""

from types import SimpleNamespace

import pytest

from actmem import ModeError
from actmem.diagnosis import explain
from actmem.diagnosis.memory_errors import OutOfMemory, read_out_of_memory

MIB, GIB = 2**20, 2**30

# As reported in public threads; the address of each is beside it.
REPORTED: dict[str, tuple[str, OutOfMemory]] = {
    # https://github.com/Li-Chongyi/Zero-DCE/issues/52
    "2.0": (
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.71 GiB (GPU 0; 6.00 GiB total capacity; "
            "3.49 GiB already allocated; 1.04 GiB free; 3.50 GiB reserved in total by PyTorch) If reserved memory "
            "is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
        ),
        OutOfMemory(
            "CUDA",
            int(1.71 * GIB),
            5368710,
            total=6 * GIB,
            free=int(1.04 * GIB),
            allocated=int(3.49 * GIB),
            unallocated=int(3.5 * GIB) - int(3.49 * GIB),
        ),
    ),
    # https://github.com/Synthintel0/MyGirlGPT/issues/11, with torch's own spelling of that release
    "2.1": (
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total "
            "capacty of 4.00 GiB of which 41.56 MiB is free. Including non-PyTorch memory, this process has 3.44 "
            "GiB memory in use. Of the allocated memory 2.58 GiB is allocated by PyTorch, and 1.90 MiB is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "max_split_size_mb"
        ),
        OutOfMemory(
            "CUDA",
            32 * MIB,
            5243,
            total=4 * GIB,
            free=int(41.56 * MIB),
            process=int(3.44 * GIB),
            allocated=int(2.58 * GIB),
            unallocated=int(1.9 * MIB),
        ),
    ),
    # https://github.com/ROCm/TheRock/issues/2118
    "HIP, a limit and private pools": (
        (
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of "
            "255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is "
            "allocated by PyTorch, with 17.00 MiB allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is "
            "reserved by PyTorch but unallocated."
        ),
        OutOfMemory(
            "HIP",
            2 * MIB,
            5243,
            total=int(255.98 * GIB),
            free=int(244.65 * GIB),
            allowed=int(1.05 * GIB),
            allocated=int(1017.01 * MIB),
            unallocated=int(54.99 * MIB),
            private=17 * MIB,
        ),
    ),
    # https://github.com/intel/torch-xpu-ops/issues/3157
    "XPU": (
        (
            "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity "
            "of 11.59 GiB of which 9.01 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and "
            "0 bytes is reserved by PyTorch but unallocated. Please use empty_cache to release all unoccupied "
            "cached memory."
        ),
        OutOfMemory("XPU", 32 * GIB, 5368710, total=int(11.59 * GIB), free=int(9.01 * GIB), allocated=0, unallocated=0),
    ),
    # https://github.com/Comfy-Org/ComfyUI/issues/8984
    "MPS": (
        (
            "MPS backend out of memory (MPS allocated: 15.72 GiB, other allocations: 2.41 MiB, max allowed: 18.13 "
            "GiB). Tried to allocate 5.81 GiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to "
            "disable upper limit"
        ),
        OutOfMemory("MPS", int(5.81 * GIB), 5368710, allowed=int(18.13 * GIB), allocated=int(15.72 * GIB)),
    ),
}


@pytest.mark.parametrize("wording", REPORTED)
def test_every_wording_is_read(wording: str) -> None:
    text, expected = REPORTED[wording]
    assert read_out_of_memory(text) == expected
    best = explain(text).best
    assert best is not None and best.name == "out-of-memory"


@pytest.mark.parametrize(
    ("wanted", "low", "high"),
    [("2.00 MiB", 1, MIB), ("20.00 MiB", MIB + 1, 20 * MIB), ("22.00 MiB", 20 * MIB - 5242, 22 * MIB)],
)
def test_the_tensor_is_smaller_than_the_segment_that_was_asked_for(wanted: str, low: int, high: int) -> None:
    found = read_out_of_memory(f"CUDA out of memory. Tried to allocate {wanted}.")
    assert found is not None and found.tensor_bytes == (low, high)


CARD = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 23.65 GiB "
    "of which {free} is free. Including non-PyTorch memory, this process has {process} memory in use. Of the allocated "
    "memory {allocated} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated."
)


def card(wanted: str, *, free: str, process: str, allocated: str, unused: str) -> str:
    return CARD.format(wanted=wanted, free=free, process=process, allocated=allocated, unused=unused)


FRAGMENTED = card("2.00 GiB", free="0.10 GiB", process="23.50 GiB", allocated="15.00 GiB", unused="8.00 GiB")
TOO_LARGE = card("30.00 GiB", free="20.00 GiB", process="3.60 GiB", allocated="3.00 GiB", unused="0.10 GiB")


FULL = card("1.96 GiB", free="0.50 GiB", process="23.10 GiB", allocated="22.00 GiB", unused="0.40 GiB")


def test_the_command_has_the_numbers_of_the_card_and_of_no_other() -> None:
    found = explain(FULL, model="llama-3.1-8b", sequence=8192).best
    assert found is not None
    assert found.actmem.startswith(
        "actmem fit llama-3.1-8b --sequence 8192 --device this --budget 22.8GiB, on the machine of the card"
    )
    assert "callbacks=[ActmemCallback(actmem.Budget('22.8GiB'))]" in found.actmem
    assert "h100" not in str(explain(FULL)) and "h100" not in str(explain("CUDA out of memory."))


def test_the_tensor_is_a_product_of_the_models_sizes() -> None:
    (candidate,) = explain(FULL, model="llama-3.1-8b", sequence=8192).candidates
    # 8192 tokens and the width of the model, 2 bytes and 4: both are 2,004 MiB, which torch prints as 1.96 GiB.
    logits = "1 batch x 8192 sequence x 128256 vocabulary x 2 bytes: logits"
    assert candidate.evidence[-1].startswith(logits)
    config = SimpleNamespace(hidden_size=4096, vocab_size=128256, intermediate_size=14336, num_attention_heads=32)
    assert explain(FULL, model=config, sequence=8192).candidates[0].evidence[-1] == candidate.evidence[-1]
    (other,) = explain(FULL, model="llama-3.1-8b", sequence=1000).candidates
    assert "logits" not in other.evidence[-1]
    (none,) = explain(
        card("100.00 MiB", free="0.01 GiB", process="23.60 GiB", allocated="23.00 GiB", unused="0 bytes"),
        model="llama-3.1-8b",
        sequence=1000,
    ).candidates
    assert none.evidence[-1] == "no tensor that follows from the model's sizes fits that"


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModeError, match=r"llama"):
        explain(FULL, model="lama-3.1-8b")


def test_fragmentation_and_other_processes_are_told_from_a_full_card() -> None:
    fix = {
        name: found.fix
        for name, text in {
            "full": FULL,
            "fragmented": FRAGMENTED,
            "shared": card("2.00 GiB", free="0.10 GiB", process="12.00 GiB", allocated="11.50 GiB", unused="0.10 GiB"),
            "too large": TOO_LARGE,
        }.items()
        if (found := explain(text).best) is not None
    }
    assert "expandable_segments" not in fix["full"] and "Other processes" not in fix["full"]
    assert "8.00 GiB are reserved in pieces that do not fit: PYTORCH_CUDA_ALLOC_CONF=expandable" in fix["fragmented"]
    assert "Other processes hold 11.55 GiB on this card" in fix["shared"]
    assert fix["too large"].startswith("This tensor alone is larger than the card")


def test_of_several_errors_in_a_log_the_last_is_read() -> None:
    other = card("4.00 GiB", free="1.00 GiB", process="20.00 GiB", allocated="19.00 GiB", unused="0.50 GiB")
    found = read_out_of_memory(f"{FULL} and later {other}")
    assert found is not None and found.wanted == 4 * GIB
