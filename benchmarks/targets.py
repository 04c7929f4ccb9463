"""What each target and mode frees, and what it recomputes, in the families of models that people train.

Bytes and FLOPs come from `actmem.measure` and repeat on every machine with the same torch and transformers. The models
have few layers and little width, in the proportions of their large relatives. The tables are in docs/tuning.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import actmem
from actmem import Full, Selective, Targets, every_second
from actmem.modes import Mode
from actmem.structure import find_blocks, find_roles
from benchmarks.outcome import RESULTS, Bound, Outcome
from benchmarks.table import replaced, rows

PAGE = Path(__file__).parent.parent / "docs" / "tuning.md"
BEGIN = "<!-- tables: written by `python -m benchmarks.targets`, from here -->"
END = "<!-- tables: to here -->"
LADDER_BEGIN, LADDER_END = BEGIN.replace("tables", "ladder"), END.replace("tables", "ladder")

MODES: dict[str, Mode] = {
    "Full()": Full(),
    "Full(every=2)": Full(every=2),
    "save attention": Selective(save=["attention"]),
    "save attention, every second matmul": Selective(save=["attention", every_second("matmul")]),
    "save attention, matmul, grouped_matmul": Selective(save=["attention", "matmul", "grouped_matmul"]),
}
"""Modes in addition to the targets. The names of selective modes say what they save."""
TOGETHER = (("norm", "attn_proj"), ("norm", "mlp"), ("norm", "moe_act"), ("norm", "attention", "routed_experts"))
"""Targets that are combined, where a model has all of them."""
LADDER = {
    "norm": 'Targets(["norm"])',
    "save attention, matmul, grouped_matmul": 'Selective(save=["attention", "matmul", "grouped_matmul"])',
    "save attention, every second matmul": 'Selective(save=["attention", every_second("matmul")])',
    "norm + mlp": 'Targets(["norm", "mlp"])',
    "save attention": 'Selective(save=["attention"])',
    "Full()": "Full()",
}
"""What to try in turn, for the first of the families."""


@dataclass(frozen=True)
class Scale:
    """The size of the models."""

    width: int = 160
    batch: int = 2
    length: int = 256
    num_layers: int = 4

    @property
    def decoder(self) -> dict[str, Any]:
        """Settings that every decoder of transformers has."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.width * 11 // 4,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": self.length,
            "pad_token_id": 0,
        }

    @property
    def experts(self) -> dict[str, Any]:
        """Settings of a mixture of experts."""
        return {"num_experts_per_tok": 2, "moe_intermediate_size": self.width * 3 // 4}


def _transformers(model_type: str, scale: Scale, **settings: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**scale.decoder, **settings}))


def _llama(scale: Scale) -> nn.Module:
    return _transformers("llama", scale)


def _lora(scale: Scale) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return get_peft_model(_llama(scale), LoraConfig(r=8, lora_dropout=0.05, target_modules=adapted))


def _gemma3(scale: Scale) -> nn.Module:
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * scale.num_layers
    sliding = {"layer_types": kinds[: scale.num_layers], "sliding_window": scale.length // 4}
    return _transformers("gemma3_text", scale, head_dim=scale.width // 8, **sliding)


def _qwen3_moe(scale: Scale) -> nn.Module:
    return _transformers("qwen3_moe", scale, head_dim=scale.width // 8, num_experts=8, **scale.experts)


def _deepseek_v3(scale: Scale) -> nn.Module:
    latent = {"q_lora_rank": scale.width // 4, "kv_lora_rank": scale.width // 8}
    # Values are as wide as keys here: a CPU has no fused attention for narrower ones, while an accelerator does.
    heads = {"qk_nope_head_dim": scale.width // 8, "qk_rope_head_dim": scale.width // 16}
    heads["v_head_dim"] = sum(heads.values())
    routing = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return _transformers("deepseek_v3", scale, num_key_value_heads=8, **latent, **heads, **routing, **scale.experts)


def _qwen3_next(scale: Scale) -> nn.Module:
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * scale.num_layers
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": scale.width // 8}
    widths = {"linear_key_head_dim": scale.width // 8, "linear_value_head_dim": scale.width // 8}
    mixture = {"num_experts": 8, "shared_expert_intermediate_size": scale.width * 3 // 4, **scale.experts}
    return _transformers("qwen3_next", scale, layer_types=kinds[: scale.num_layers], **heads, **widths, **mixture)


def _vit(scale: Scale) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": scale.width, "intermediate_size": 4 * scale.width, "num_hidden_layers": scale.num_layers}
    side = 4 * int(scale.length**0.5)
    return ViTForImageClassification(ViTConfig(**sizes, num_attention_heads=8, image_size=side, patch_size=4))


def _titan(scale: Scale, *, sparse: bool) -> nn.Module:
    from tests.zoo_titan import TitanLike

    ffn = scale.width * 3 // 4 if sparse else scale.width * 11 // 4
    return TitanLike(dim=scale.width, layers=scale.num_layers, heads=8, kv_heads=2, ffn=ffn, vocab=512, sparse=sparse)


FAMILIES: dict[str, Callable[[Scale], nn.Module]] = {
    "Llama": _llama,
    "Llama, long sequences": _llama,
    "Llama, LoRA": _lora,
    "Gemma-3": _gemma3,
    "Qwen3-MoE": _qwen3_moe,
    "DeepSeek-V3": _deepseek_v3,
    "Qwen3-Next": _qwen3_next,
    "ViT": _vit,
    "torchtitan-like, dense": lambda scale: _titan(scale, sparse=False),
    "torchtitan-like, experts": lambda scale: _titan(scale, sparse=True),
}


def run(scale: Scale | None = None, *, families: tuple[str, ...] = tuple(FAMILIES)) -> Outcome:
    """Measure every family under every target and mode, and compare it with the bounds."""
    scale = scale or Scale()
    outcome = Outcome("targets", {**vars(scale), "families": list(families)})
    for family in families:
        for name, figures in _family(family, scale):
            outcome.exact[f"{family}: {name}"] = figures
    _bound(outcome)
    return outcome


def _family(family: str, scale: Scale) -> Iterator[tuple[str, dict[str, Any]]]:
    if "long" in family:
        scale = replace(scale, batch=1, length=4 * scale.length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family](scale).train()
    plain = _figures(model, scale)
    yield "plain", _compared(plain, plain)
    found = find_roles(model, find_blocks(model))
    present = {target for its_roles in found for target in its_roles}
    named = {name: Targets([name]) for name in actmem.decision_rules.TARGETS if name in present}
    named |= {" + ".join(names): Targets(names) for names in TOGETHER if present.issuperset(names)}
    for name, mode in {**named, **MODES}.items():
        with actmem.apply(model, mode):
            yield name, _compared(_figures(model, scale), plain)


def _figures(model: nn.Module, scale: Scale) -> actmem.Measurement:
    """Measure the third step, which adds to existing gradients: then activations alone decide its peak."""
    step = _stepper(model, scale)
    for _ in range(2):
        step()
    return actmem.measure(step, model=model)


def _stepper(model: nn.Module, scale: Scale) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 512, (scale.batch, scale.length), generator=generator)
    side = 4 * int(scale.length**0.5)
    pixels = torch.randn(scale.batch, 3, side, side, generator=generator)

    def step() -> None:
        torch.manual_seed(0)
        out: Any
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind is None:
            out = model(ids, ids)
        elif kind == "vit":
            out = model(pixel_values=pixels, labels=torch.ones(scale.batch, dtype=torch.long))
        else:
            out = model(input_ids=ids, labels=ids, use_cache=False)
        loss: Tensor = out if isinstance(out, Tensor) else out.loss
        loss.backward()

    return step


def _compared(m: actmem.Measurement, plain: actmem.Measurement) -> dict[str, Any]:
    return {
        "saved_bytes": m.saved_bytes,
        "accumulating_bytes": m.step_bytes,
        "forward_flops": m.forward_flops,
        "replayed_flops": m.replayed_flops,
        "replayed_operators": m.num_replayed_ops,
        "saved_fraction": m.saved_bytes / plain.saved_bytes,
        "peak_fraction": m.step_bytes / plain.step_bytes,
        "replayed_fraction": m.replayed_flops / m.forward_flops,
    }


def _bound(outcome: Outcome) -> None:
    """Promise that no mode has a higher peak than plain training, and that more targets save less."""
    found = outcome.exact
    highest = max(figures["peak_fraction"] for figures in found.values())
    outcome.bounds.append(Bound("any target or mode: step peak / plain's", highest, 1.0))
    for fewer, more in (("norm", "norm + attn_proj"), ("moe_act", "routed_experts"), ("attn_proj", "attention")):
        ratios = [
            figures["saved_bytes"] / found[name.removesuffix(more) + fewer]["saved_bytes"]
            for name, figures in found.items()
            if name.endswith(f": {more}")
        ]
        if ratios:
            outcome.bounds.append(Bound(f"{more}: saved / {fewer}'s, highest", max(ratios), 0.999))
    for free in ("norm", "moe_act"):
        work = [figures["replayed_flops"] for name, figures in found.items() if name.endswith(f": {free}")]
        if work:
            outcome.bounds.append(Bound(f"{free}: replayed FLOPs", max(work), 0))


def update(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the tables of docs/tuning.md from the results."""
    result = json.loads((results / "targets.json").read_text())
    text = replaced(page.read_text(), LADDER_BEGIN, LADDER_END, "\n".join(_ladder(result)))
    page.write_text(replaced(text, BEGIN, END, "\n".join(_tables(result))))


def _ladder(result: dict[str, Any]) -> Iterator[str]:
    family = result["settings"]["families"][0]
    found = [(mode, result["exact"][f"{family}: {name}"]) for name, mode in LADDER.items()]
    body = [[f"`{mode}`", f"{f['saved_fraction']:.0%}", f"{f['replayed_fraction']:.0%}"] for mode, f in found]
    return rows(["mode", "saved", "run again"], body)


def _tables(result: dict[str, Any]) -> Iterator[str]:
    env, settings = result["environment"], result["settings"]
    yield (
        f"Width {settings['width']}, {settings['num_layers']} layers, {settings['batch']} sequences of "
        f"{settings['length']} tokens, fp32, torch {env['torch']} on a CPU."
    )
    yield ""
    for family in settings["families"]:
        yield f"### {family}"
        yield ""
        if "long" in family:
            yield f"One sequence of {4 * settings['length']} tokens."
            yield ""
        named = {
            name.removeprefix(f"{family}: "): f for name, f in result["exact"].items() if name.startswith(f"{family}: ")
        }
        body = [
            [
                _title(name),
                f"{f['saved_fraction']:.0%}",
                f"{f['peak_fraction']:.0%}",
                f"{f['replayed_fraction']:.1%}",
                str(f["replayed_operators"]),
            ]
            for name, f in named.items()
        ]
        yield from rows(["mode or targets", "saved", "peak", "run again", "operators"], body)


def _title(name: str) -> str:
    if name == "plain":
        return "plain training"
    if name in MODES:
        return f"`{name}`" if name.startswith("Full") else name
    return " + ".join(f"`{target}`" for target in name.split(" + "))


if __name__ == "__main__":
    update()
