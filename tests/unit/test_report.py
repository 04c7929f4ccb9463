from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn

import actmem
from actmem import Full, Report, Rule, Rules, SaveEverything, Selective
from actmem.reporting.report_text import size
from tests.zoo import TitanLike


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x).exp())


def stack(num_blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(num_blocks)])


def reported(model: nn.Module, mode: actmem.modes.Mode, x: Tensor | None = None) -> Report:
    with actmem.apply(model, mode) as applied:
        model(torch.ones(4, 8) if x is None else x).sum().backward()
        return applied.report()


VALUE_BYTES = 4 * 8 * 4


def test_totals_of_a_block_whose_every_value_is_known() -> None:
    report = reported(stack(), Full())
    assert report.plain_bytes == 7 * VALUE_BYTES, "the input, and an exp and a tanh in each of three blocks"
    assert report.held_bytes == 3 * VALUE_BYTES, "the inputs of the blocks, two of which the block before made"
    assert report.recomputed_bytes == 4 * VALUE_BYTES
    assert report.saved_bytes == report.never_replayed_bytes == 0
    assert report.num_replayed == 3 * 3, "addmm, exp and tanh"


def test_saving_everything_holds_what_plain_training_holds() -> None:
    report = reported(stack(), SaveEverything())
    assert report.held_bytes == report.plain_bytes == 7 * VALUE_BYTES
    assert report.saved_bytes == 3 * 2 * VALUE_BYTES
    assert report.shared_bytes == 2 * VALUE_BYTES, "what one block made and saved is the input of the next"
    assert report.recomputed_bytes == report.num_replayed == 0


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.lin(x)
        return x + torch.tanh(y * cos + y.roll(1, -1) * sin)


class WithTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rotated() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x, angles = x + 1, torch.arange(32.0).view(4, 8) + x * 0
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x.sum()


@pytest.mark.parametrize("mode", [Full(), SaveEverything(), Selective(save=["matmul"])], ids=repr)
def test_tables_that_all_layers_share_count_once_as_the_meter_counts_them(mode: Any) -> None:
    torch.manual_seed(0)
    model, x = WithTables(), torch.ones(4, 8)

    def saved_bytes() -> int:
        scalars = 8  # the loss and its gradient
        return actmem.measure(lambda: model(x).backward(), model=model).saved_bytes - scalars

    plain_bytes = saved_bytes()
    with actmem.apply(model, mode) as applied:
        model(x).backward()
        report = applied.report()
        held_bytes = saved_bytes()
    assert report.plain_bytes == plain_bytes
    assert report.held_bytes == held_bytes
    assert report.shared_bytes >= 3 * 2 * VALUE_BYTES
    assert "the totals count it once" in str(report).replace("\n", " ")


def test_a_saved_value_that_only_a_replay_needs_is_held_and_says_so() -> None:
    report = reported(stack(), Selective(save=["matmul"]))
    (kind,) = report.kinds
    (product,) = (row for row in kind.rows if row.op.startswith("aten.addmm"))
    assert product.decision == "save" and not product.by_autograd
    assert "(a replay starts here)" in str(report)
    assert report.saved_bytes == 3 * VALUE_BYTES
    assert report.num_replayed == 3 * 2


def test_a_value_that_cannot_be_replayed_has_its_reason() -> None:
    class Routed(Block):
        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = torch.topk(self.lin(x), 2)
            return super().forward(x) * weights.sum(-1, keepdim=True) + x.gather(1, chosen).sum()

    report = reported(nn.Sequential(Routed(), Routed()), Full())
    never = [row for kind in report.kinds for row in kind.rows if row.decision == "never"]
    assert report.never_replayed_bytes == 2 * sum(row.num_bytes * row.count for row in never) > 0
    assert all(row.why for row in never)
    assert "aten.topk.default" in {row.op for row in never}


def test_layers_that_are_alike_are_folded_and_others_are_not() -> None:
    assert [kind.num_blocks for kind in reported(stack(5), Full()).kinds] == [5]
    folded = reported(stack(5), Full(every=2)).kinds
    assert [kind.paths for kind in folded] == [("0", "2", "4"), ("1", "3")]


def test_what_dies_before_the_backward_pass_is_not_counted() -> None:
    class Masked(Block):
        def forward(self, x: Tensor) -> Tensor:
            mask = self.lin(x).exp().sigmoid() > 0.5  # saved for a gradient that never comes
            return super().forward(x) * mask

    model = nn.Sequential(Masked(), Masked())
    assert reported(model, SaveEverything()).recomputed_bytes == 0
    plain = actmem.measure(lambda: model(torch.ones(4, 8)).sum().backward()).saved_bytes
    report = reported(model, Full())
    with actmem.apply(model, Full()):
        model(torch.ones(4, 8)).sum().backward()
        measured = actmem.measure(lambda: model(torch.ones(4, 8)).sum().backward()).saved_bytes
    assert plain - measured == report.plain_bytes - report.held_bytes


def test_rules_that_decided_nothing_are_listed_once_every_block_has_run() -> None:
    model = stack()
    mode = Rules([Rule("save", op="convolution"), Rule("save", op="matmul"), Rule("recompute")])
    with actmem.apply(model, mode) as applied:
        model[0](torch.ones(4, 8)).sum().backward()
        assert applied.report().unmatched == ()
        assert applied.report().unobserved == ("1", "2")
        assert "not run yet: 1 ... 2 (2 blocks)" in str(applied.report())
        model(torch.ones(4, 8)).sum().backward()
        assert applied.report().unmatched == ("Rule('save', op='convolution')",)
        assert applied.report().unobserved == ()


def test_calls_in_eval_mode_are_a_note() -> None:
    model = stack().eval()
    with actmem.apply(model, Full()) as applied:
        model(torch.ones(4, 8)).sum().backward()
        (note,) = applied.report().notes
    assert note.startswith("3 block calls ran in eval mode") and "model.train()" in note


def test_a_call_without_gradients_is_no_note_and_is_not_observed() -> None:
    model = stack()
    with actmem.apply(model, Full()) as applied:
        with torch.no_grad():
            model(torch.ones(4, 8))
        assert applied.report().notes == () and len(applied.report().unobserved) == 3


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**30, "3.00 GiB")],
)
def test_sizes_are_written_for_readers(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_the_text_of_a_report(snapshot: SnapshotAssertion) -> None:
    torch.manual_seed(0)
    ids = torch.arange(24).view(2, 12)
    mode = Selective(save=["attention", actmem.every_second("matmul"), "convolution"])
    assert str(reported(TitanLike(), mode, ids)) == snapshot
