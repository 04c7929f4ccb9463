"""What plans, declarations and other versions of torch have to do with a compiled function inside an eager block."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import actmem
from actmem import Full, Offload, Rule, Rules, UnsupportedError
from actmem.compilercompat import on_compiled_function
from actmem.engine.compiled_regions import Region
from tests.children import run
from tests.compile.blocks import Block as Decoder
from tests.compile.blocks import assert_same_bits, attention, build, fresh_compiler, step
from tests.compile.test_compiled_regions import (
    CALLS,
    REGION,
    WIDTH,
    built,
    counted,
    feed_forward,
    regions,
    trained,
    with_an_operator_of_its_own,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, of many kinds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_compiler():
        yield


RULES = {
    "module": [Rule("save", module="*.attention")],
    "target": [Rule("save", target="attention")],
    "op": [Rule("save", op="compiled", module="*.attention")],
    "op, the other way round": [Rule("recompute", op="compiled", module="*.mlp"), Rule("save", op="compiled")],
}


def test_rules_reach_a_graph_by_module_by_target_and_as_an_operator() -> None:
    model = build(attention, "dense")
    for block in model.modules():
        if isinstance(block, Decoder):
            block.attention.compile()
            block.mlp.compile()
    plain = step(model)
    for rules in RULES.values():
        with actmem.apply(model, Rules([*rules, Rule("recompute")])) as applied:
            for _ in range(3):
                assert_same_bits(plain, step(model))
            report = applied.report()
        parts = {part.module: part for part in report.compiled_parts}
        assert parts.keys() == {"attention", "mlp"}
        assert parts["attention"].num_calls == parts["attention"].num_blocks == 2
        assert parts["attention"].num_replayed == 0 and parts["attention"].held_bytes > 0, rules
        assert parts["mlp"].num_replayed == 2 and parts["mlp"].held_bytes == 0, rules
        assert "attention, in 2 blocks: 2 calls of compiled graphs in the forward pass, 0 replayed; " in str(report)


@pytest.mark.parametrize("rule", [Rule("offload", op="compiled"), Rule("offload", module="*.part")])
def test_what_a_graph_saves_is_offloaded_and_the_graph_is_not_called_again(rule: Rule) -> None:
    model = built(feed_forward)
    plain, _ = trained(model, [8, 8, 8])
    ours, report = trained(
        model, [8, 8, 8], Rules([rule, Rule("recompute")], offload=Offload(to="host", copy_cpu=True, min_bytes=1))
    )
    assert all(map(torch.equal, plain, ours))
    assert report is not None and report.moved is not None and report.moved.back_bytes == report.moved.out_bytes > 0
    (part,) = report.compiled_parts
    assert part.num_calls == 3 and part.num_replayed == 0
    assert {row.decision for row in regions(report)} == {"offload"}
    assert report.offloaded_bytes == sum(
        kind.num_blocks * row.num_bytes * row.count for kind in report.kinds for row in kind.rows if row.op == REGION
    )


def test_a_compiled_function_that_is_declared_replayable_takes_no_more_than_without() -> None:
    compiled = torch.compile(lambda x, weight: F.gelu(x @ weight).sin())

    class Calling(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.weight, self.function = nn.Parameter(torch.eye(WIDTH)), function

        def forward(self, x: Tensor) -> Tensor:
            return x + self.function(x.sin(), self.weight)

    found: list[tuple[list[Tensor], Any]] = []
    for function in (compiled, actmem.replayable(compiled)):
        model = nn.Sequential(*(Calling(function) for _ in range(3)))
        found.append(trained(model, [8, 8, 8], Full()))
    (one, before), (other, after) = found
    assert all(map(torch.equal, one, other))
    assert before is not None and after is not None and after.held_bytes == before.held_bytes < before.plain_bytes
    assert after.compiled_parts == before.compiled_parts


def test_the_declaration_lets_operators_of_other_libraries_run_again_inside_a_graph() -> None:
    model = built(with_an_operator_of_its_own)
    plain, _ = trained(model, [8, 8])
    for block in model:
        block.part._compiled_call_impl = actmem.replayable(block.part._compiled_call_impl)
    CALLS.clear()
    ours, report = trained(model, [8, 8], Full())
    assert all(map(torch.equal, plain, ours)) and counted is not None
    assert len(CALLS) == 12, "once in each forward pass and once in each replay"
    assert all(row.replayed for row in regions(report))


class OnContext(torch.autograd.Function):
    """Puts a tensor on `ctx` itself, where no hook of autograd sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scores = x @ x.t()
        return ctx.scores @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.scores @ grad


def with_a_function_that_holds(part: Any, x: Tensor) -> Tensor:
    return part.down(OnContext.apply(part.up(x)).sin())


def test_what_a_function_in_a_graph_holds_by_itself_is_a_note() -> None:
    model = built(with_a_function_that_holds)
    plain, _ = trained(model, [8, 8, 8])
    ours, report = trained(model, [8, 8, 8], Full())
    assert all(map(torch.equal, plain, ours))
    assert report is not None and any(note.startswith("held because part ") for note in report.notes), str(report)
    assert report.never_replayed_bytes == 3 * 8 * 8 * 4


def test_where_torch_does_not_tell_what_it_compiled_the_bytes_are_listed_and_a_note_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = built(feed_forward)
    plain, _ = trained(model, [8, 8])
    torch._dynamo.reset()
    wrappers: Any = sys.modules["torch._functorch._aot_autograd.runtime_wrappers"]
    factory = wrappers._AOTDispatchAutogradFunctionFactory
    on_compiled_function(lambda kind: None)
    original = inspect.getclosurevars(factory.build).nonlocals["build"]

    def make(*args: Any, **kwargs: Any) -> Any:
        """Stand where a version of torch has no such class: what it returns tells nobody."""
        made = factory(*args, **kwargs)
        return SimpleNamespace(build=lambda: original(made))

    monkeypatch.setattr(wrappers, "_AOTDispatchAutogradFunctionFactory", make)
    ours, report = trained(model, [8, 8], Full())
    assert all(map(torch.equal, plain, ours))
    assert report is not None and not regions(report)
    assert any("does not say when it has compiled a function" in note for note in report.notes)
    assert any(note.startswith("held because part ") for note in report.notes)
    rows = [row for kind in report.kinds for row in kind.rows if row.module == "part"]
    assert rows and {row.decision for row in rows} == {"never"}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_of_the_compiler_that_change_nothing_on_a_cpu(mode: str) -> None:
    model = built(feed_forward, num_blocks=2, mode=mode)
    plain, _ = trained(model, [8, 8, 8])
    ours, report = trained(model, [8, 8, 8], Full())
    assert all(map(torch.equal, plain, ours)) and all(row.replayed for row in regions(report))


def test_graphs_in_the_pool_of_cuda_graphs_are_refused_by_name() -> None:
    graph = SimpleNamespace(fx_kwargs={"cudagraphs": True}, device_types={"cuda"}, source_code="")
    metadata = SimpleNamespace(mutated_graph_handled_indices=(), num_tensors_saved_with_no_vc_check=0)
    region = Region(lambda args: [args[0].sin()], graph, metadata)

    class Calling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            (out,) = region([super().forward(x)])
            return out

    model = nn.Sequential(Calling(4, 4), Calling(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    with actmem.apply(model, Full(), blocks="*"), pytest.raises(UnsupportedError, match="reduce-overhead"):
        model(torch.ones(2, 4))


SCRIPT = """
import json, torch, warnings
warnings.simplefilter("ignore")
from actmem import Full
from tests.compile.test_compiled_regions import built, dropped, trained
plain, _ = trained(model := built(dropped), [8, 8, 8])
torch._dynamo.reset()
ours, report = trained(model, [8, 8, 8], Full())
counters = torch._dynamo.utils.counters
print(json.dumps({
    "same": len(plain) == len(ours) and all(map(torch.equal, plain, ours)),
    "sum": float(ours[1].double().sum()),
    "replayed": [part.num_replayed for part in report.compiled_parts],
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
}))
"""


@pytest.mark.slow
def test_graphs_from_the_cache_on_disk_are_replayed_like_new_ones(tmp_path: Path) -> None:
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    found: list[dict[str, Any]] = []
    for _ in range(2):
        done = run("-c", SCRIPT, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = found
    assert warm["hits"] > cold["hits"], "the second process compiles nothing"
    assert cold["same"] and warm["same"] and cold["sum"] == warm["sum"]
    assert cold["replayed"] == warm["replayed"] == [3]
