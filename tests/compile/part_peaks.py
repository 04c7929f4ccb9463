"""One model with compiled parts in eager blocks, in one process for each form of training; prints what each took.

`python -m tests.compile.part_peaks llama inductor` forks one process for each form after the imports, so that none
inherits what another compiled or allocated. Peaks are those of torch's allocator, from the events of its profiler, with
no dispatch mode of ours around the step.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import actmem
from actmem import Full, Selective
from actmem.structure import find_blocks
from tests.children import run
from tests.compile.blocks import Block, FeedForward, attention
from tests.compile.compiling import Stack, built
from tests.zoo import ZOO, Batch, Case, seeded, square_mean
from tests.zoo_titan import TitanLike

PARTS = ("norm", "attention", "self_attn", "attn", "mlp", "moe", "feed_forward", "intermediate", "output")
"""Names of the modules of a block that are compiled by themselves, and endings of such names."""
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


MODES: dict[str, Any] = {"full": Full(), "selective": Selective(save=["matmul", "batched_matmul", "attention"])}
TORCHS: dict[str, dict[str, Any]] = {
    "torch's checkpoint": {},
    "torch's selective": {"context_fn": partial(create_selective_checkpoint_contexts, _policy)},
}
FORMS = ("plain", *MODES, *TORCHS)
NUM_STEPS = 4
_MARK = "backward begins"


def _ids(model: nn.Module) -> Batch:
    return (torch.randint(64, (2, 132), generator=torch.Generator().manual_seed(1)),)


def _sized(name: str, *, sparse: bool) -> Case:
    build = partial(TitanLike, dim=256, layers=4, heads=8, kv_heads=2, ffn=320, max_length=256, sparse=sparse)
    return Case(name, seeded(build), _ids, 4, square_mean)


def _small() -> nn.Module:
    return Stack(lambda: Block(attention, FeedForward), num_blocks=2)


def _rows(model: nn.Module) -> Batch:
    return (torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2)),)


CASES = {
    **ZOO,
    "small": Case("small", _small, _rows, 2, square_mean),
    "sized_dense": _sized("sized_dense", sparse=False),
    "sized_moe": _sized("sized_moe", sparse=True),
}
"""The zoo; a model that is quickly compiled; and two whose activations weigh more than all else that a step takes."""


def compiled_parts(blocks: list[nn.Module], backend: str) -> None:
    parts = [child for block in blocks for path, child in block.named_children() if path.endswith(PARTS)]
    assert parts, [path for path, _ in blocks[0].named_children()]
    for part in parts:
        part.compile(backend=backend)


def trained(name: str, backend: str, form: str) -> dict[str, Any]:
    """Train; return the figures of the last step."""
    case = CASES[name]
    model, batch = built(case)
    blocks = [block.module for block in find_blocks(model, case.blocks)]
    compiled_parts(blocks, backend)
    applied = actmem.apply(model, MODES[form], blocks=case.blocks) if form in MODES else None
    for block in blocks if form in TORCHS else ():
        _checkpointed(block, TORCHS[form])
    digest = hashlib.sha256()

    def step() -> None:
        torch.manual_seed(1)
        loss = case.step(model, batch)
        with record_function(_MARK):
            pass
        loss.backward()

    def note() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                digest.update(parameter.grad.contiguous().flatten().view(torch.uint8).numpy().tobytes())
                parameter.grad.zero_()

    num_graphs: list[int] = []
    for _ in range(NUM_STEPS - 1):
        step()
        note()
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    seen = _profiled(step)
    note()
    num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    report = None if applied is None else applied.report()
    return {
        **seen,
        "digest": digest.hexdigest(),
        "graphs": num_graphs,
        "replays": 0 if report is None else sum(r.num_replayed for r in report.compiled_parts),
        "notes": [] if report is None else list(report.notes),
    }


def _checkpointed(block: nn.Module, options: dict[str, Any]) -> None:
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    block.forward = run


def _profiled(step: Callable[[], None]) -> dict[str, int]:
    """Run a step; return the peak of the allocator, its bytes after forward, and how many graphs were called."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step()
    events: Any = seen.profiler.kineto_results.events()
    live = peak = saved = inductors = others = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name() == _MARK:
            saved = live
        inductors += event.name().startswith("## Call CompiledFxGraph")
        others += event.name() in ("CompiledFunction", "CompiledFunctionBackward")
    return {"peak_bytes": peak, "saved_bytes": saved, "calls": inductors or others}


def peaks(name: str, backend: str) -> dict[str, dict[str, Any]]:
    """Train a model in every form, each in a process of its own."""
    done = run("-m", "tests.compile.part_peaks", name, backend)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _forked(name: str, backend: str, form: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("r") as found:
        child = os.fork()
        if not child:
            try:
                Path(found.name).write_text(json.dumps(trained(name, backend, form)))
            finally:
                if error := sys.exception():
                    traceback.print_exception(error)
                sys.stderr.flush()
                os._exit(error is not None)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(f"{form} of {name} failed")
        return json.loads(found.read())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    importlib.import_module("torch._inductor.compile_fx")  # warns, so not where tests are collected
    torch.set_num_threads(1)
    print(json.dumps({form: _forked(sys.argv[1], sys.argv[2], form) for form in FORMS}))  # noqa: T201
