"""Mixture of experts, with shapes that do not depend on where the tokens go.

NOTE [ dispatch without dynamic shapes ]

Each token becomes as many rows as experts are chosen for it. The rows are sorted by expert, and grouped products run
over them with the ends of the groups as offsets. So every tensor has tokens x chosen rows, whatever the router decides,
and a trace on fake tensors shows the bytes of a real step. Grouped products run in bfloat16, the one dtype that torch
supports for them on every device; weights of another dtype are cast first.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from actmem.catalogue.layers import Factory, GatedMLP, gated
from actmem.catalogue.model_configs import Activation, DecoderConfig, ExpertsConfig

__all__ = ["PRODUCT_DTYPE", "Experts", "MoE", "Router"]

PRODUCT_DTYPE = torch.bfloat16
"""The dtype of grouped products."""


class Router(nn.Module):
    """The router: chooses the experts of each token, and their weights."""

    e_score_correction_bias: Tensor | None

    def __init__(self, hidden_size: int, config: ExpertsConfig, factory: Factory) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size, **factory))
        self.bias = nn.Parameter(torch.empty(config.num_experts, **factory)) if config.bias else None
        # DeepSeek balances its experts with it. It gets no gradient: a training loop adjusts it.
        balance = torch.empty(config.num_experts, device=factory["device"]) if config.scores == "sigmoid" else None
        self.register_buffer("e_score_correction_bias", balance)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the chosen experts, both (tokens, chosen)."""
        logits = functional.linear(x, self.weight, self.bias).float()
        num_chosen = self.config.num_chosen
        if self.config.scores == "softmax_of_chosen":
            best, chosen = logits.topk(num_chosen)
            return best.softmax(-1).type_as(x), chosen
        if self.config.scores == "softmax":
            weights, chosen = logits.softmax(-1).topk(num_chosen)
        else:
            scores = logits.sigmoid()
            chosen = self._choices(scores.detach()).topk(num_chosen).indices
            weights = scores.gather(1, chosen)
        return (weights / weights.sum(-1, keepdim=True) * self.config.scaling).type_as(x), chosen

    def _choices(self, scores: Tensor) -> Tensor:
        """Return the scores that experts are chosen by: balanced, and in the best groups only."""
        if self.e_score_correction_bias is not None:
            scores = scores + self.e_score_correction_bias
        if self.config.num_groups == 1:
            return scores
        groups = scores.view(len(scores), self.config.num_groups, -1)
        best = groups.topk(2).values.sum(-1).topk(self.config.num_chosen_groups).indices
        left_out = torch.ones(groups.shape[:-1], device=scores.device, dtype=torch.bool).scatter(1, best, False)
        return groups.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)


class Experts(nn.Module):
    """All routed experts of a layer, stacked; they run on rows that are sorted by expert."""

    def __init__(self, hidden_size: int, experts: ExpertsConfig, config: DecoderConfig, factory: Factory) -> None:
        super().__init__()
        count, inner = experts.num_experts, experts.intermediate_size
        self.activation: Activation = config.activation
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden_size, **factory))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, inner, **factory))
        self.gate_up_proj_bias = self.down_proj_bias = None
        if experts.bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * inner, **factory))
            self.down_proj_bias = nn.Parameter(torch.empty(count, hidden_size, **factory))

    def forward(self, rows: Tensor, expert_of_row: Tensor) -> Tensor:
        """Run each row through its expert; the rows of one expert are adjacent."""
        every = torch.arange(len(self.down_proj), device=rows.device)
        ends = torch.searchsorted(expert_of_row, every, right=True, out_int32=True)
        inner = _grouped(rows, self.gate_up_proj, ends, self.gate_up_proj_bias, expert_of_row)
        gate, up = inner.chunk(2, dim=-1)
        return _grouped(gated(gate, up, self.activation), self.down_proj, ends, self.down_proj_bias, expert_of_row)


class MoE(nn.Module):
    """The feed-forward part of a layer with experts."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, factory: Factory) -> None:
        super().__init__()
        self.num_chosen = experts.num_chosen
        self.gate = Router(config.hidden_size, experts, factory)
        self.experts = Experts(config.hidden_size, experts, config, factory)
        self.shared_experts = None
        if experts.num_shared:
            shared = experts.num_shared * experts.intermediate_size
            self.shared_experts = GatedMLP(config.hidden_size, shared, config.activation, factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the outputs of the chosen and the shared experts for each token."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens)
        # NOTE [ dispatch without dynamic shapes ]
        expert_of_row, order = chosen.flatten().sort(stable=True)
        rows = self.experts(tokens.index_select(0, order // self.num_chosen), expert_of_row)
        of_token = rows.index_select(0, order.argsort()).unflatten(0, (-1, self.num_chosen))
        out = torch.bmm(weights.unsqueeze(1), of_token).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)


def _grouped(rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, expert_of_row: Tensor) -> Tensor:
    product = functional.grouped_mm(rows.to(PRODUCT_DTYPE), weight.to(PRODUCT_DTYPE).mT, offs=ends).to(rows.dtype)
    return product if bias is None else product + bias.index_select(0, expert_of_row)
