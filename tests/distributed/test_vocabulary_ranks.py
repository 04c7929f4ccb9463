"""A head whose classes are divided over two ranks: logits in chunks, right, small, and as predicted."""

from __future__ import annotations

import contextlib
import itertools
import json
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import actmem
from actmem import Layout
from actmem.catalogue import build, example, tiny
from actmem.distributedcompat import forget_meshes
from actmem.errors import ModeError, UnsupportedError, VersionError
from actmem.parallelism import build_job, find_parts, profile_layout
from actmem.structure import find_blocks
from actmem.verification import SPLIT_FACTOR
from tests.distributed.layouts import block_plan, decoder
from tests.distributed.ranks import NUM_RANKS, local, patiently, run, step_bytes
from tests.flat_device import FLAT
from tests.patience import PATIENCE_SECONDS

WIDTH, CLASSES, TOKENS, CHUNKS = 32, 1024, 256, 16
IGNORED = -100
GATHERED = Replicate()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, num_classes: int, *, bias: bool) -> None:
        super().__init__()
        self.body, self.lm_head = Body(), nn.Linear(WIDTH, num_classes, bias=bias)
        self.part: int | None = None
        """Which part of the sequence this rank passes to the head: all of it, or its own."""

    def forward(self, ids: Tensor) -> Any:
        x = self.body(ids)
        return self.lm_head(x if self.part is None else x.chunk(NUM_RANKS, 1)[self.part])


def ids() -> Tensor:
    return torch.randint(0, 64, (4, TOKENS // 4), generator=torch.Generator().manual_seed(1))


def labels(num_classes: int) -> Tensor:
    """Return a label for each token. All those of the first chunks, and some others, are ignored."""
    given = torch.Generator().manual_seed(2)
    found = torch.randint(0, num_classes, (TOKENS,), generator=given)
    found[torch.rand(TOKENS, generator=given) < 0.2] = IGNORED
    found[: 2 * TOKENS // CHUNKS] = IGNORED
    return found


@dataclass(frozen=True)
class Kind:
    """How the head is divided, and what is computed of its logits."""

    layout: Any = GATHERED
    is_local: bool = True
    sequence: bool = False
    num_classes: int = CLASSES
    bias: bool = False
    reduction: str = "mean"
    weighted: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """Say it in a line."""
        given = "gathered" if self.layout == Replicate() else "divided"
        parts = ["of a part of the sequence"] if self.sequence else []
        parts += [f"{self.num_classes} classes, {self.reduction}", "a tensor" if self.is_local else "a DTensor"]
        return ", ".join([given, *parts, *(["bias"] * self.bias), *(["class weights"] * self.weighted)])

    def model(self, mesh: DeviceMesh | None, dtype: torch.dtype | None = None) -> Model:
        torch.manual_seed(0)
        model = Model(self.num_classes, bias=self.bias).train()
        if (wanted := dtype or self.dtype) != torch.float32:  # fake tensors cannot be cast in place
            model.to(wanted)
        if mesh is not None:
            model.part = mesh.get_local_rank() if self.sequence else None
            given = Shard(1) if self.sequence else Replicate()
            options: Any = {"output_layouts": self.layout, "use_local_output": self.is_local}
            parallelize_module(model, mesh, {"lm_head": ColwiseParallel(input_layouts=given, **options)})
        return model

    def around(self) -> contextlib.AbstractContextManager[Any]:
        return loss_parallel() if self.layout == Shard(-1) else contextlib.nullcontext()

    def loss(self, model: Model) -> Any:
        """Compute the loss; one value, or one for each token."""
        logits = model(ids()).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target, weight = labels(self.num_classes), None
        if self.weighted:
            target = target.clamp(min=0)  # torch's loss_parallel() fails if labels are ignored
            weight = torch.rand(self.num_classes, generator=torch.Generator().manual_seed(3)).to(logits.dtype)
        if self.layout == Replicate() and hasattr(logits, "device_mesh"):  # torch wants DTensors everywhere
            target = distribute_tensor(target, logits.device_mesh, [Replicate()])
        return F.cross_entropy(logits, target, weight=weight, ignore_index=IGNORED, reduction=self.reduction)


BY_CLASS: dict[str, Any] = {"layout": Shard(-1), "is_local": False}
KINDS = [
    *(Kind(reduction=how) for how in ("mean", "sum", "none")),
    *(Kind(**BY_CLASS, reduction=how) for how in ("mean", "sum", "none")),
    *(Kind(**BY_CLASS, reduction=how, weighted=True) for how in ("mean", "none")),
    *(Kind(sequence=True), Kind(**BY_CLASS, sequence=True), Kind(**BY_CLASS, sequence=True, reduction="none")),
    *(Kind(num_classes=CLASSES + 1, bias=True), Kind(**BY_CLASS, num_classes=CLASSES + 1, bias=True)),
    *(Kind(is_local=False), Kind(dtype=torch.bfloat16), Kind(**BY_CLASS, dtype=torch.bfloat16)),
]


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


class Issued(TorchDispatchMode):
    """Writes down the collectives that run while entered, in their order, with the shapes of what they send."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func is not torch.ops._c10d_functional.wait_tensor.default:
            self.names.append(f"{func} {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- right


@dataclass
class Trained:
    """What one step gave."""

    values: Any
    results: dict[str, Tensor]
    """The loss and the gradients, whole."""
    kinds: dict[str, type]
    notes: tuple[str, ...]


def trained(kind: Kind, mesh: DeviceMesh | None, split: actmem.Split | None, dtype: Any = None) -> Trained:
    model = kind.model(mesh, dtype)
    with actmem.apply(model, actmem.Full(), split=split) as applied:
        with kind.around() if mesh is not None else contextlib.nullcontext():
            values = kind.loss(model)
            # Of values for each token, a sum that gives each its own gradient.
            loss = values if kind.reduction != "none" else (values * values.detach()).sum()
            loss.backward()
        notes = applied.report().notes
    found = {"loss": loss, **{name: p.grad for name, p in model.named_parameters()}}
    return Trained(values, {k: whole(v) for k, v in found.items()}, {k: type(v) for k, v in found.items()}, notes)


def error(found: Trained, truth: Trained) -> float:
    """Return the largest distance from the truth, of the largest value of its tensor."""
    pairs = [(found.results[name], z) for name, z in truth.results.items()]
    return max(float((x.double() - z).abs().max() / z.abs().max()) for x, z in pairs)


def chunks_train_as_the_same_ranks_do_without(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for kind, gradients in itertools.product(KINDS, ("forward", "backward")):
        plain = trained(kind, mesh, None)
        with Issued() as issued:
            found = trained(kind, mesh, actmem.Split(loss=CHUNKS, gradients=gradients))  # pyright: ignore[reportArgumentType]
        said = f"{kind.name}, gradients in {gradients}"
        assert found.notes == (f"lm_head: logits in {CHUNKS} chunks of tokens, for cross_entropy.",), (
            said,
            found.notes,
        )
        assert found.kinds == plain.kinds, said
        by_rank: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(by_rank, issued.names)
        assert issued.names, said
        assert by_rank[0] == by_rank[1], said
        truth = trained(kind, None, None, torch.float64)
        assert error(found, truth) <= SPLIT_FACTOR * error(plain, truth), said
        for name, value in plain.results.items():
            limit = 1e-5 if kind.dtype == torch.float32 else 0.05
            assert (found.results[name] - value).abs().max() <= limit * value.abs().max(), (said, name)
        if kind.reduction == "none" and rows_are_independent(kind, mesh):
            assert torch.equal(whole(found.values), whole(plain.values)), said


def rows_are_independent(kind: Kind, mesh: DeviceMesh) -> bool:
    """Return whether this machine's matrix product has the same bits for a chunk as for all rows."""
    head: Any = kind.model(mesh).lm_head
    weight, rows = local(head.weight).detach(), torch.randn(TOKENS, WIDTH, dtype=kind.dtype)
    chunks = [F.linear(x, weight) for x in rows.split(TOKENS // CHUNKS)]
    return torch.equal(torch.cat(chunks), F.linear(rows, weight))


def a_frozen_head_in_exact_chunks_is_bitwise_plain(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    kinds = (Kind(), Kind(reduction="sum"), Kind(is_local=False), Kind(**BY_CLASS), Kind(**BY_CLASS, bias=True))
    for kind in kinds:
        if not rows_are_independent(kind, mesh):
            continue

        def step(split: actmem.Split | None, kind: Kind = kind) -> dict[str, Tensor]:
            model = kind.model(mesh)
            model.lm_head.requires_grad_(False)
            with actmem.apply(model, actmem.Full(), split=split), kind.around():
                loss = kind.loss(model)
                loss.backward()
            return {"loss": whole(loss)} | {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}

        plain, found = step(None), step(actmem.Split(loss=CHUNKS, exact=True))
        assert all(torch.equal(found[name], value) for name, value in plain.items()), kind.name


def backward_outside_of_loss_parallel_is_as_inside(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    kind = Kind(**BY_CLASS)
    plain = trained(kind, mesh, None)
    for gradients in ("forward", "backward"):
        model = kind.model(mesh)
        with actmem.apply(model, actmem.Full(), split=actmem.Split(loss=CHUNKS, gradients=gradients)):
            with loss_parallel():
                loss = kind.loss(model)
            loss.backward()
        torch.testing.assert_close(whole(model.lm_head.weight.grad), plain.results["lm_head.weight"])


def gathered_logits_are_used_in_chunks_as_those_of_any_head_are(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))

    def use(logits: Any) -> Tensor:
        logs = F.log_softmax(logits / 0.7, dim=-1)
        chosen = logs.gather(-1, ids().unsqueeze(-1)).squeeze(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        return (chosen + 0.1 * entropy + 1e-3 * logits.logsumexp(-1).square()).mean()

    results: list[list[Tensor]] = []
    for split in (None, actmem.Split(loss=CHUNKS)):
        model = Kind(dtype=torch.float64).model(mesh)
        with actmem.apply(model, actmem.Full(), split=split) as applied:
            loss = use(model(ids()))
            loss.backward()
            assert not any("whole tensor" in note for note in applied.report().notes)
        results.append([loss.detach(), *(whole(p.grad) for p in model.parameters())])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def a_tensor_of_this_ranks_classes_is_what_it_would_be(rank: int) -> None:
    """With a loss of one's own over ranks, as Megatron's: the largest, the sum and the chosen logit of each token."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    group = mesh.get_group()
    results: list[list[Tensor]] = []
    for split in (None, actmem.Split(loss=CHUNKS)):
        model = Kind(layout=Shard(-1), dtype=torch.float64).model(mesh)
        with actmem.apply(model, actmem.Full(), split=split) as applied:
            logits = model(ids())
            assert logits.shape == (*ids().shape, CLASSES // NUM_RANKS)
            largest = logits.amax(-1).detach()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            loss = (logits.logsumexp(-1) - largest).mean()
            loss.backward()
            assert not any("whole tensor" in note for note in applied.report().notes)
        results.append([loss.detach(), *(whole(p.grad) for p in model.parameters())])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def other_uses_of_divided_logits_make_them_whole(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = Kind(**BY_CLASS).model(mesh)
    plain: DTensor = model(ids())
    uses: dict[str, Callable[[Any], Any]] = {
        "full_tensor": lambda x: x.full_tensor(),
        "to_local": lambda x: x.to_local(),
        "redistribute": lambda x: x.redistribute(placements=[Replicate()]).to_local(),
        "logsumexp": lambda x: torch.logsumexp(x, -1).full_tensor(),
    }
    with actmem.apply(model, actmem.SaveEverything(), split=actmem.Split(loss=CHUNKS)) as applied:
        for name, use in uses.items():
            logits = model(ids())
            assert (logits.placements, logits.device_mesh) == (plain.placements, plain.device_mesh)
            assert logits.shape == plain.shape
            assert torch.equal(use(logits), use(plain)), name
        (note,) = applied.report().notes
        assert "whole tensor" in note
        assert all(name in note for name in uses), note
        few = ids()[:1, :8]
        assert torch.equal(model(few).to_local(), plain[:1, :8].to_local())  # fewer rows than chunks
        handle = model.lm_head.register_forward_hook(lambda *_: None)
        assert type(model(ids())) is DTensor  # nothing is split under hooks of one's own
        handle.remove()
        assert type(model.eval()(ids())) is DTensor


def logits_are_refused_once_the_weights_have_changed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for foreach in (False, True):  # torch does not count the latter's writes to a DTensor
        model = Kind(**BY_CLASS).model(mesh)
        optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1, foreach=foreach)
        with actmem.apply(model, actmem.Full(), split=actmem.Split(loss=CHUNKS)), loss_parallel():
            logits = model(ids())
            F.cross_entropy(logits.flatten(0, 1), labels(CLASSES)).backward()
            optimizer.step()
            with pytest.raises(VersionError, match="these logits were not kept"):
                logits.full_tensor()


def by_rows_of_the_weight(name: str, module: Any, mesh: DeviceMesh) -> None:
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))


def scaled(module: Any, outputs: Any, mesh: DeviceMesh) -> Any:
    return outputs * 2


def what_cannot_be_done_is_refused_by_name(rank: int) -> None:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    split = actmem.Split(loss=CHUNKS)

    def refused(model: Model, said: str) -> None:
        with actmem.apply(model, actmem.Full(), split=split), pytest.raises(UnsupportedError, match=said):
            model(ids())

    refused(Kind(layout=Shard(1)).model(mesh), r"lm_head returns logits that are divided over ranks by S\(1\)")
    model = Model(CLASSES, bias=False)
    parallelize_module(model, mesh, {"lm_head": RowwiseParallel(input_layouts=Replicate())})
    refused(model, r"lm_head is a Linear that is divided over ranks as \(Shard\(dim=1\),\)")
    model = Model(CLASSES, bias=False)
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Shard(0)]))
    refused(model, "lm_head is divided over ranks by its classes, and is called with hidden states that are a plain")
    model = Model(CLASSES, bias=False)
    distribute_module(model.lm_head, mesh, by_rows_of_the_weight, output_fn=scaled)
    refused(model, "lm_head returns logits that are divided over ranks by scaled")
    model = Kind(**BY_CLASS).model(mesh)
    with (
        actmem.apply(model, actmem.Full(), split=split),
        loss_parallel(),
        pytest.raises(UnsupportedError, match=r"label_smoothing = 0\.1 is not permitted under torch's loss_parallel"),
    ):
        F.cross_entropy(model(ids()).flatten(0, 1), labels(CLASSES), label_smoothing=0.1)


def models_of_transformers_compute_their_own_loss_in_chunks(rank: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}

    def by_torch(model: Any) -> None:
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})

    def by_transformers(model: Any) -> None:
        apply_tensor_parallelism(model, mesh)

    for divide in (by_torch, by_transformers):
        around = loss_parallel if divide is by_torch else contextlib.nullcontext
        results: list[list[Tensor]] = []
        for split in (None, actmem.Split(loss=8)):
            torch.manual_seed(0)
            config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, vocab_size=128)
            model: Any = LlamaForCausalLM(config).double().train()
            divide(model)
            with actmem.apply(model, actmem.Full(), split=split) as applied, around():
                loss = model(input_ids=ids(), labels=ids()).loss
                loss.backward()
            if split is not None:
                notes = applied.report().notes
                assert notes == ("lm_head: logits in 8 chunks of tokens, for cross_entropy.",), (divide.__name__, notes)
            results.append([whole(loss), *(whole(p.grad) for p in model.parameters())])
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


def a_decoder_divided_as_by_torchtitan_trains_in_chunks(rank: int) -> None:
    """Its residual stream is a DTensor that is divided by the sequence, up to the head."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    outside: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    results: list[list[Tensor]] = []
    for split in (None, actmem.Split(loss=CHUNKS)):
        model = decoder().double()
        for layer in model.layers:
            parallelize_module(layer, mesh, block_plan(Shard(1), sequence=True))
        parallelize_module(model, mesh, outside)
        with actmem.apply(model, actmem.Full(), split=split) as applied, loss_parallel():
            loss = F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten())
            loss.backward()
            assert split is None or applied.report().notes[0].startswith("head: logits in 16 chunks of tokens")
        results.append([whole(loss), *(whole(p.grad) for p in model.parameters())])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


RIGHT = (
    a_decoder_divided_as_by_torchtitan_trains_in_chunks,
    chunks_train_as_the_same_ranks_do_without,
    a_frozen_head_in_exact_chunks_is_bitwise_plain,
    backward_outside_of_loss_parallel_is_as_inside,
    gathered_logits_are_used_in_chunks_as_those_of_any_head_are,
    a_tensor_of_this_ranks_classes_is_what_it_would_be,
    other_uses_of_divided_logits_make_them_whole,
    logits_are_refused_once_the_weights_have_changed,
    what_cannot_be_done_is_refused_by_name,
    models_of_transformers_compute_their_own_loss_in_chunks,
)


def test_two_ranks_that_divide_the_classes_split_alike(tmp_path: Path) -> None:
    outcomes = run(RIGHT, tmp_path)
    assert outcomes == {case.__name__: ["", ""] for case in RIGHT}, "\n".join(
        text for each in outcomes.values() for text in each
    )


# ---------------------------------------------------------------- small, and as predicted

MANY = 4 * CLASSES
SPLITS: dict[str, actmem.Split | None] = {
    "plain": None,
    "forward": actmem.Split(loss=CHUNKS),
    "backward": actmem.Split(loss=CHUNKS, gradients="backward"),
}
SIZES = [
    Kind(num_classes=MANY + 1),
    Kind(**BY_CLASS, num_classes=MANY, sequence=True),
    Kind(**BY_CLASS, num_classes=MANY + 1, reduction="none"),
]


def made(kind: Kind) -> tuple[Model, Callable[[], None]]:
    """Return a rank's model, and its training step."""
    model = kind.model(init_device_mesh("cpu", (NUM_RANKS,)))

    def step() -> None:
        with kind.around():
            loss = kind.loss(model)
            (loss if kind.reduction != "none" else loss.mean()).backward()
        model.zero_grad(set_to_none=True)

    return model, step


def measured(kind: Kind) -> dict[str, int]:
    """Return the peaks of a step, and what is alive before the head."""
    model, step = made(kind)
    kept: list[Tensor] = []
    before = actmem.measure(lambda: kept.append(model.body(ids())), model=model).timeline[-1].live_bytes
    kept.clear()
    found = {"before": before, "weight": local(model.lm_head.weight).nbytes}
    for name, split in SPLITS.items():
        with actmem.apply(model, actmem.SaveEverything(), split=split):
            step()
            found[name] = step_bytes(patiently(step), model, None)
    return found


@contextlib.contextmanager
def member(rank: int, world: int, store: str) -> Generator[None]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    at = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=at, rank=rank, world_size=world, timeout=timedelta(seconds=PATIENCE_SECONDS))
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


def _measures_kinds(rank: int, folder: str) -> None:
    with member(rank, NUM_RANKS, f"{folder}/store"):
        Path(folder, f"{rank}.json").write_text(json.dumps([measured(kind) for kind in SIZES]))


def test_the_loss_takes_an_eighth_and_what_was_predicted_of_each_rank(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_measures_kinds, args=(str(tmp_path),), nprocs=NUM_RANKS)
    for rank in range(NUM_RANKS):
        for kind, row in zip(SIZES, json.loads((tmp_path / f"{rank}.json").read_text()), strict=True):
            whole = row["plain"] - row["before"]
            for name, split in SPLITS.items():
                said = f"{kind.name}, rank {rank}, {name}"
                seen = actmem.profile_rank(lambda kind=kind: made(kind), world=NUM_RANKS, rank=rank, split=split)
                told = actmem.predict(seen, actmem.SaveEverything(), FLAT).tensor_bytes
                assert abs(told - row[name]) <= 64, said
                if split is not None:  # the gradient of the head's weight is not the loss's
                    assert row[name] - row["before"] - row["weight"] <= whole / 8, said


# ---------------------------------------------------------------- models that a layout builds


def _trains_layouts(rank: int, world: int, layouts: Sequence[Layout], folder: str) -> None:
    for number, (layout, (name, split)) in enumerate(itertools.product(layouts, SPLITS.items())):
        with member(rank, world, f"{folder}/{number}.store"):
            model, batch = of_the_catalogue()
            paths = [block.path for block in find_blocks(model, None, None)]
            job = build_job(find_parts(model), batch, layout, optimizer="sgd", blocks=paths)
            applied = actmem.apply(job.model, actmem.Full(), split=split)
            job.step()
            parameters = {n: whole(p) for n, p in job.model.named_parameters()}
            found = {
                "bytes": step_bytes(patiently(job.step), job.model, job.optimizer),
                "notes": applied.report().notes,
            }
            torch.save((parameters, found), f"{folder}/{layouts.index(layout)}.{name}.{rank}.pt")


def of_the_catalogue() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = replace(tiny("llama-3.1-8b"), vocab_size=MANY)
    return build(config, device="cpu", dtype=torch.float32), example(config, batch=2, sequence=64, device="cpu")


def compare(layouts: Sequence[Layout], folder: Path) -> None:
    """Train every layout on real ranks, plain and split; compare them, and with what is predicted."""
    world = layouts[0].world
    torch.multiprocessing.spawn(_trains_layouts, args=(world, layouts, str(folder)), nprocs=world)
    model, batch = of_the_catalogue()
    start = dict(model.named_parameters())
    for number, layout in enumerate(layouts):
        for rank, (name, split) in itertools.product(range(world), SPLITS.items()):
            said = f"{layout}, rank {rank}, {name}"
            parameters, found = torch.load(folder / f"{number}.{name}.{rank}.pt")
            plain, _ = torch.load(folder / f"{number}.plain.{rank}.pt")
            for key, value in parameters.items():
                torch.testing.assert_close(value - start[key], plain[key] - start[key], rtol=1e-3, atol=1e-7)
            if split is not None:
                (note,) = found["notes"]
                assert note.startswith("lm_head: logits in 16 chunks of tokens, for cross_entropy"), said
            seen = profile_layout(model, batch, layout, rank=rank, optimizer="sgd", split=split)
            told = actmem.predict(seen, actmem.Full(), FLAT).tensor_bytes
            assert abs(told - found["bytes"]) <= 64, said


def test_a_layout_that_divides_tensors_trains_in_chunks_and_takes_what_was_predicted(tmp_path: Path) -> None:
    compare([Layout(tp=2, sequence_parallel=True)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", [[Layout(tp=2)], [Layout(dp_shard=2, tp=2, sequence_parallel=True), Layout(cp=2, tp=2)]], ids=str
)
def test_so_does_every_kind_of_layout(layouts: list[Layout], tmp_path: Path) -> None:
    compare(layouts, tmp_path)


def test_a_split_of_a_pipeline_is_refused() -> None:
    model, batch = of_the_catalogue()
    with pytest.raises(ModeError, match=r"split = Split\(loss=16.*cannot be combined with a pipeline"):
        profile_layout(model, batch, Layout(pp=2), split=actmem.Split(loss=CHUNKS))
