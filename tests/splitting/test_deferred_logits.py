"""Logits in chunks: what comes out is what plain torch gives, and whole logits are made only on demand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actmem.errors import UnsupportedError, VersionError
from actmem.splitting import DeferredLogits, SplitHead

WIDTH, CLASSES = 32, 500
Use = Callable[[Tensor, Tensor], Tensor]


def transformers_loss(logits: Tensor, labels: Tensor) -> Tensor:
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, CLASSES), shifted.view(-1), ignore_index=-100, reduction="sum") / 7


def soft_capped_and_smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    capped = torch.tanh(logits / 30) * 30
    return F.cross_entropy(capped[..., :-1, :].reshape(-1, CLASSES), labels[..., 1:].reshape(-1), label_smoothing=0.1)


def class_weights(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1, CLASSES, dtype=logits.dtype)
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1), weight=weight.float())


def each_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels[:, 1:].clamp(min=0).unsqueeze(-1)
    return torch.gather((logits[:, :-1] / 0.7).float().log_softmax(-1), -1, chosen).squeeze(-1).exp()


def selected_less_their_sum(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.clamp(min=0).unsqueeze(-1)
    sums = torch.stack([torch.logsumexp(rows, dim=-1) for rows in logits])
    return torch.gather(logits, dim=-1, index=chosen) - sums.unsqueeze(-1)


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    found: list[Tensor] = []
    for chunk in logits.reshape(-1, CLASSES).split(10, dim=0):
        logs = F.log_softmax(chunk, dim=-1)
        found.append(-(torch.exp(logs) * logs).sum(-1))
    return torch.cat(found)


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)
    return F.cross_entropy(rows, labels.view(-1)) + 1e-2 * (torch.logsumexp(rows, dim=-1) ** 2).mean()


def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.view(-1, CLASSES), dim=-1), labels.view(-1))


def masked_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[labels >= 0], labels[labels >= 0])


USES: list[Use] = [
    transformers_loss,
    soft_capped_and_smoothed,
    class_weights,
    each_token,
    log_probabilities,
    selected_less_their_sum,
    entropy,
    z_loss,
    negative_log_likelihood,
    masked_rows,
]


def run(use: Use, *, split: bool, dtype: torch.dtype, bias: bool = False, autocast: bool = False) -> tuple[Any, Any]:
    """Return what comes out and all gradients, and what the split did."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES, bias=bias).to(dtype)
    hidden = torch.randn(4, 16, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, (4, 16))
    labels[0, :5] = -100
    stand_in = SplitHead(head, "head", 16) if split else None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = use(head(hidden), labels)
    out.sum().backward()
    return (out.detach(), hidden.grad, *(p.grad for p in head.parameters())), stand_in and stand_in.deferral


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_whole_logits_up_to_the_order_of_sums(use: Use, bias: bool) -> None:
    plain, _ = run(use, split=False, dtype=torch.float64, bias=bias)
    found, deferral = run(use, split=True, dtype=torch.float64, bias=bias)
    assert deferral.in_chunks
    assert not deferral.made_real
    for x, y in zip(plain, found, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        torch.testing.assert_close(y, x, rtol=1e-6, atol=1e-7)  # `.float()` in some of them


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_in_half_precision_it_is_no_further_from_the_truth_than_twice_as_far_as_plain(use: Use, autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    plain, _ = run(use, split=False, dtype=dtype, autocast=autocast)
    found, deferral = run(use, split=True, dtype=dtype, autocast=autocast)
    assert not deferral.made_real
    truth, _ = run(use, split=False, dtype=torch.float64)
    for x, y, z in zip(plain, found, truth, strict=True):
        assert x.dtype == y.dtype
        error = (x.double() - z).norm()
        assert (y.double() - z).norm() <= 2 * error


def test_rows_of_values_are_bitwise_those_of_whole_logits_if_products_of_fewer_rows_are() -> None:
    torch.manual_seed(0)
    head, hidden = nn.Linear(WIDTH, CLASSES), torch.randn(64, WIDTH)
    whole = head(hidden)
    if not torch.equal(whole, torch.cat([head(x) for x in hidden.split(4)])):
        pytest.skip("this machine's matrix product gives other bits for fewer rows")
    chosen = torch.randint(0, CLASSES, (64, 1))
    wanted = torch.gather(whole.log_softmax(-1), -1, chosen)
    SplitHead(head, "head", 16)
    assert torch.equal(torch.gather(head(hidden).log_softmax(-1), -1, chosen), wanted)


def deferred() -> tuple[DeferredLogits, SplitHead, nn.Linear]:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, CLASSES)
    stand_in = SplitHead(head, "head", 4)
    logits = head(torch.randn(2, 8, WIDTH, requires_grad=True))
    assert isinstance(logits, DeferredLogits)
    return logits, stand_in, head


def test_shape_dtype_and_device_are_known_without_values() -> None:
    logits, stand_in, _ = deferred()
    assert logits.shape == (2, 8, CLASSES) and logits.size(-1) == CLASSES and len(logits) == 2
    assert logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.requires_grad
    assert logits.view(-1, CLASSES)[3:].shape == (13, CLASSES)
    assert not stand_in.deferral.made_real


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.transpose(1, 2).sum(1),
        lambda x: x[..., :10].sum(),
        lambda x: torch.cat([x, x]).sum(),
        lambda x: x.sum(),
        lambda x: x.topk(3).values,
        lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(2, 8, dtype=torch.long)),
        lambda x: x.clone().div_(2).sum(),
        lambda x: x.div_(2).sum(),
    ],
    ids=["transposed", "classes", "cat", "sum of all", "topk", "loss over images", "clone", "in place"],
)
def test_what_cannot_be_done_by_rows_makes_the_tensor_real_once_and_says_who_asked(use: Any) -> None:
    logits, stand_in, head = deferred()
    hidden = logits.hidden
    found = use(logits)
    use(head._call_impl(hidden.detach().requires_grad_()))
    stand_in.remove()
    wanted = use(head(hidden))
    assert torch.equal(found, wanted)
    (who,) = stand_in.deferral.made_real
    assert "test_deferred_logits.py:" in who
    found.sum().backward()
    once = hidden.grad.clone()
    hidden.grad = None
    wanted.sum().backward()
    assert torch.equal(once, hidden.grad)


def test_copies_and_pickles_hold_values() -> None:
    logits, _, head = deferred()
    wanted = head._call_impl(logits.hidden)
    with torch.no_grad():
        assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), wanted)
        assert torch.equal(copy.deepcopy(logits.detach()), wanted)


def test_logits_are_refused_once_the_weights_have_changed() -> None:
    logits, _, head = deferred()
    with torch.no_grad():
        head.weight.add_(1)
    with pytest.raises(VersionError, match="were not kept"):
        F.cross_entropy(logits.view(-1, CLASSES), torch.zeros(16, dtype=torch.long))
    with pytest.raises(VersionError, match="were not kept"):
        logits.topk(3)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
def test_logits_are_refused_after_a_step_of_their_own_optimizer_and_not_after_one_of_another(options: Any) -> None:
    logits, _, head = deferred()
    other = nn.Linear(2, 2)
    other(torch.randn(1, 2)).sum().backward()
    torch.optim.AdamW(other.parameters(), **options).step()
    F.cross_entropy(logits.view(-1, CLASSES), torch.zeros(16, dtype=torch.long)).backward()
    optimizer = torch.optim.AdamW(head.parameters(), **options)
    optimizer.step()  # torch does not count the writes of a fused one
    with pytest.raises(VersionError, match="were not kept"):
        logits.argmax(-1)


def test_a_head_whose_forward_was_replaced_computes_what_it_was_replaced_by() -> None:
    results: list[list[Tensor]] = []
    for split in (False, True):
        torch.manual_seed(0)
        head, hidden = nn.Linear(WIDTH, CLASSES), torch.randn(64, WIDTH, requires_grad=True)
        plain = head.forward
        head.forward = lambda x, plain=plain: plain(x) * 3  # as accelerate's hooks do
        called = SplitHead(head, "lm_head", 4) if split else None
        loss = F.cross_entropy(head(hidden), torch.arange(64) % CLASSES)
        loss.backward()
        assert called is None or called.deferral.in_chunks
        results.append([loss.detach(), hidden.grad, head.weight.grad])  # pyright: ignore[reportArgumentType]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_writing_in_place_beside_other_tensors_of_the_same_logits_is_refused() -> None:
    logits, _, _ = deferred()
    wide = logits.double()
    with pytest.raises(UnsupportedError, match="writes in place"):
        logits.mul_(2)
    del wide
    logits.mul_(2)


def test_a_second_backward_pass_is_refused_not_wrong() -> None:
    logits, _, _ = deferred()
    loss = F.cross_entropy(torch.tanh(logits).view(-1, CLASSES), torch.zeros(16, dtype=torch.long))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        loss.backward()


def test_in_eval_mode_without_gradients_and_under_hooks_the_head_is_what_it_was() -> None:
    head, hidden = nn.Linear(WIDTH, CLASSES), torch.randn(8, WIDTH)
    SplitHead(head, "head", 4)
    assert type(head(hidden)) is DeferredLogits
    with torch.no_grad():
        assert type(head(hidden)) is Tensor
    hook = head.register_forward_hook(lambda *_: None)
    assert type(head(hidden)) is Tensor
    hook.remove()
    assert type(head.eval()(hidden)) is Tensor


def test_a_head_with_adapters_is_split_too() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = WIDTH, CLASSES
            self.base = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, CLASSES, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    def step(split: bool) -> list[Tensor]:
        torch.manual_seed(0)
        head, hidden = Adapted().double(), torch.randn(64, WIDTH, dtype=torch.float64, requires_grad=True)
        if split:
            stand_in = SplitHead(head, "head", 16)
        loss = F.cross_entropy(head(hidden), torch.arange(64))
        loss.backward()
        assert not split or not stand_in.deferral.made_real
        return [loss.detach(), hidden.grad, head.down.weight.grad, head.up.weight.grad]

    for x, y in zip(step(False), step(True), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-12)


def test_no_tokens_are_no_chunks() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    SplitHead(head, "head", 4)
    assert head(torch.randn(0, WIDTH)).shape == (0, CLASSES)


class Named(nn.Linear):
    """Computes what its base does."""


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, Named, Doubled])
@pytest.mark.parametrize("use", [each_token, z_loss, soft_capped_and_smoothed], ids=lambda f: f.__name__)
def test_a_frozen_head_passes_gradients_on(use: Use, kind: type[nn.Linear]) -> None:
    def step(split: bool) -> list[Tensor]:
        torch.manual_seed(0)
        head = kind(WIDTH, CLASSES).double().requires_grad_(False)
        hidden = torch.randn(4, 16, WIDTH, dtype=torch.float64, requires_grad=True)
        stand_in = SplitHead(head, "head", 16) if split else None
        out = use(head(hidden), torch.arange(64).view(4, 16))
        out.sum().backward()
        assert stand_in is None or (stand_in.deferral.in_chunks and not stand_in.deferral.made_real)
        return [out.detach(), hidden.grad]

    for x, y in zip(step(False), step(True), strict=True):
        torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-12)
