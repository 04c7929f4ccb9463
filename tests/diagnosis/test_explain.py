"""A known message is told from the others, with its cause and what to change; an unknown one does no harm."""

import traceback
from pathlib import Path

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import actmem
from actmem import errors
from actmem.diagnosis import CAUSES, Candidate, Explanation, explain
from actmem.error_causes import Cause
from tests.diagnosis.messages import REAL, a_parameter_that_is_ready_twice

METADATA = (
    "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors have "
    "different metadata than during the forward pass.\n"
)


def differing(*pairs: tuple[list[int], str, list[int], str]) -> str:
    return METADATA + "".join(
        f"tensor at position {place}:\n"
        f"saved metadata: {{'shape': torch.Size({saved}), 'dtype': torch.{dtype}, 'device': device(type='cuda', "
        f"index=0)}}\n"
        f"recomputed metadata: {{'shape': torch.Size({again}), 'dtype': torch.{other}, 'device': device(type='cuda', "
        "index=0)}\n"
        for place, (saved, dtype, again, other) in enumerate(pairs, 46)
    )


COMPILED = 'File "torch/_dynamo/eval_frame.py", line 736, in compile_wrapper\n'
TRACKER = "Backward pass should have cleared tracker of all tensors"
# Verbatim, as reported; what stands in `messages.py` is made by torch itself.
REPORTED: list[tuple[str, str]] = [
    ("zero3-partitioned", differing(([1024], "bfloat16", [0], "bfloat16"))),
    ("cache-grew", differing(([1, 1024, 8, 128], "bfloat16", [1, 2048, 8, 128], "bfloat16"))),
    ("cache-grew", differing(([1, 1, 8, 8], "float32", [1, 1, 16, 8], "float32"))),
    ("routing-flipped", differing(([965, 16], "bfloat16", [964, 16], "bfloat16"))),
    (
        "routing-flipped",
        differing(([2791, 512], "bfloat16", [2701, 512], "bfloat16"), ([2791], "int64", [2701], "int64")),
    ),
    ("precision-lost", differing(([2, 512, 64], "bfloat16", [2, 512, 64], "float32"))),
    ("context-lost", differing(([1, 8, 64, 64], "float32", [1, 1, 64, 64], "bool"))),
    ("other-graph", COMPILED + differing(([7, 64], "float32", [9, 32], "float32"))),
    (
        "other-operators",
        (
            "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was saved "
            "during "
            "the original forward and recomputation.\nNumber of tensors saved during forward: 27\n"
            "Number of tensors saved during recomputation: 8"
        ),
    ),
    ("compiled-then-eager", "AssertionError: Something went unexpectedly wrong in activation checkpoint."),
    ("fp8-module", "AssertionError: if early stop is enabled, we don't expect to reach here"),
    (
        "sharded-inside-region",
        "RuntimeError: fsdp.split_with_sizes_copy.default encountered during backward but not found in storage",
    ),
    ("state-took-another-path", "aten.add_.Tensor encountered during backward but not found in storage"),
    (
        "shared-weight-under-autocast",
        "aten._to_copy.default invocation index 3 encountered during backward but not found in storage.",
    ),
    ("cache-in-training", "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`..."),
    (
        "cache-in-training",
        "Caching is incompatible with gradient checkpointing in GptOssDecoderLayer. Setting `past_key_value=None`.",
    ),
    (
        "reentrant-not-said",
        (
            "torch.utils.checkpoint: the use_reentrant parameter should be passed explicitly. In version 2.5 we will "
            "raise "
            "an exception if use_reentrant is not passed."
        ),
    ),
    ("offload-not-cleared", f"AssertionError: {TRACKER.lower()}"),
    ("offload-not-cleared", f"ValueError: {TRACKER}"),
    ("offload-not-cleared", 'ValueError("Untracked tensor")'),
    (
        "flex-not-compiled",
        "UserWarning: flex_attention called without torch.compile()\nSOLUTION: Use torch.compile(flex_attention)(...)",
    ),
    (
        "compilation-skipped",
        (
            "skipping: f (reason: non-infra torch dispatch mode present, this is not supported today in torch.compile, "
            "file"
        ),
    ),
    (
        "cuda-graph-recording",
        (
            "TODO: graph recording observed an input tensor deallocate during graph  recording that did not occur "
            "during "
            "replay."
        ),
    ),
    ("seed-during-capture", "RuntimeError: Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture"),
    (
        "no-wrap-policy",
        (
            'File "/site-packages/accelerate/utils/fsdp_utils.py", line 1, in fsdp2_prepare_model\n'
            "TypeError: 'NoneType' object is not callable"
        ),
    ),
    (
        "budget-with-graph-break",
        (
            "RuntimeError: memory budget annotations must cover the entire forward of a graph, but 6103 forward op(s) "
            "are "
            "unannotated"
        ),
    ),
    ("mixed-tensors", "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all"),
    (
        "checkpointing-twice",
        (
            "ValueError: The activation_checkpointing in FSDP config and the gradient_checkpointing in training arg "
            "can't "
            "be "
            "set to True simultaneously."
        ),
    ),
    ("torch-too-old", "ImportError: cannot import name 'CheckpointPolicy' from 'torch.utils.checkpoint'"),
    (
        "marked-ready-twice",
        (
            "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following "
            "reasons: ... Parameter at index 440 with name model.layers.1.weight has been marked as ready twice."
        ),
    ),
    ("out-of-memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
]


@pytest.mark.parametrize("program", REAL)
def test_what_torch_says_is_explained_from_the_exception_and_from_its_text(program: str) -> None:
    run, name = REAL[program]
    with pytest.raises((RuntimeError, ValueError, Warning, ImportError, AttributeError, AssertionError)) as raised:
        run()
    found = explain(raised.value)
    assert found.best is not None
    assert found.best.name == name
    if program.endswith("debug"):
        assert "operator 1 was aten.sin.default in forward and aten.exp.default in recomputation" in str(found)
    text = "".join(f"[rank0]: {line}\n" for line in "".join(traceback.format_exception(raised.value)).split("\n"))
    assert explain(text) == found


@pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")  # of the process group, on some machines
def test_ddp_and_reentrant_checkpointing_are_explained(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        a_parameter_that_is_ready_twice(tmp_path)
    best = explain(raised.value).best
    assert best is not None
    assert best.name == "marked-ready-twice"


@pytest.mark.parametrize(("name", "text"), REPORTED, ids=[f"{i}-{name}" for i, (name, _) in enumerate(REPORTED)])
def test_a_reported_message_is_explained(name: str, text: str) -> None:
    best = explain(f"step 12, loss 2.5\n{text}\n").best
    assert best is not None
    assert best.name == name


def test_every_cause_is_reached_by_a_message() -> None:
    reached = {name for _, name in REAL.values()} | {name for name, _ in REPORTED}
    replays = {"unseen-kernel", "replayable-not-pure", "nondeterministic-operator"}
    assert {cause.name for cause in CAUSES if not cause.name.startswith("actmem-")} - reached == replays
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)


def every_error() -> list[type[errors.ActmemError]]:
    found = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.ActmemError)]
    return [e for e in found if e is not errors.ActmemError]


@pytest.mark.parametrize("error", every_error())
def test_every_error_of_actmem_is_explained_by_its_type(error: type[errors.ActmemError]) -> None:
    found = explain(error("a message"))
    assert found.best is not None
    assert found.best.name.startswith("actmem-")
    assert len(found.candidates) == 1


def test_an_error_is_named_before_the_warnings_of_the_same_log() -> None:
    log = "UserWarning: None of the inputs have requires_grad=True. Gradients will be None\n" + REPORTED[0][1]
    assert [c.cause.name for c in explain(log).candidates] == ["zero3-partitioned", "inputs-without-gradient"]


def test_more_than_one_cause_may_fit_and_the_names_in_the_traceback_decide() -> None:
    text = COMPILED + differing(([964, 16], "bfloat16", [965, 16], "bfloat16"))
    assert [c.cause.name for c in explain(text).candidates] == ["routing-flipped", "other-graph"]


class Counting(nn.Module):
    """Ask a function that was declared pure and is not, or write where torch does not look."""

    def __init__(self, declared: bool) -> None:
        super().__init__()
        self.weight = nn.Linear(4, 4)
        self.calls = 0
        self.scale = actmem.replayable(self._scaled) if declared else self._written

    def _scaled(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.detach() * self.calls

    def _written(self, x: Tensor) -> Tensor:
        y = x.detach() * 2
        y.numpy()[:] = 1
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.weight(x).sin() * self.scale(x).exp()


@pytest.mark.parametrize(("declared", "name"), [(True, "replayable-not-pure"), (False, "unseen-kernel")])
def test_a_replay_that_differs_names_its_likely_cause(declared: bool, name: str) -> None:
    model = nn.Sequential(Counting(declared))
    with actmem.apply(model, actmem.Full(), blocks="0"), pytest.raises(actmem.SelfCheckError) as raised:
        model(torch.ones(2, 4)).sum().backward()
    found = explain(raised.value)
    assert [c.cause.name for c in found.candidates] == [name]
    assert found.candidates[0].cause.fix in str(raised.value)


def test_what_is_not_known_is_said_to_be_unknown(snapshot: SnapshotAssertion) -> None:
    found = explain(ValueError("the cat sat on the mat"))
    assert not found
    assert found.best is None
    assert found.to_dict() == {"candidates": []}
    assert str(found) == snapshot


@settings(max_examples=60)
@drawn(
    st.one_of(
        st.text(), st.binary().map(repr), st.sampled_from([t for _, t in REPORTED]).map(lambda t: t[: len(t) // 2])
    )
)
def test_no_text_whatever_makes_it_raise(text: str) -> None:
    assert isinstance(str(explain(text)), str)


def test_an_error_that_cannot_be_printed_is_no_error_here() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert not explain(Silent())


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_the_text_of_every_explanation(cause: Cause, snapshot: SnapshotAssertion) -> None:
    assert str(Explanation((Candidate(cause, ("message",), 1.0),))) == snapshot
