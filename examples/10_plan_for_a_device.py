"""Plan for hardware you need not have: Llama-3.1-8B on one H100, and with adapters on one RTX 4090. Nothing is run."""

from peft import LoraConfig, get_peft_model

import actmem
from actmem.catalogue import build, example


def show(title: str, plan: actmem.Plan) -> None:
    """Print what a plan promises."""
    said = plan.predicted
    print(f"{title}: peak {said.peak_bytes / 2**30:.1f} of {said.budget_bytes / 2**30:.1f} GiB, ", end="")
    print(f"step {said.step_time_ratio:.3f} times plain, none below {said.bound:.3f}, {len(plan.rules)} rules")


model = build("llama-3.1-8b")  # on the meta device: no bytes
batch = example("llama-3.1-8b", sequence=8192)
show("8B, all parameters, H100", actmem.fit(model, batch, budget="72GiB", device="h100-80gb", optimizer="adamw_fused"))

try:
    actmem.fit(model, batch, budget=0.95, device="rtx4090-24gb")
except actmem.BudgetError as error:
    print(f"\n8B, all parameters, 4090: {error}\n")

lora = LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
adapted = get_peft_model(build("llama-3.1-8b"), lora)
batch = example("llama-3.1-8b", sequence=2048)
show("8B, adapters, 4090", actmem.fit(adapted, batch, budget=0.95, device="rtx4090-24gb"))
