"""Set a budget: the plan is made before training, predicts its peak, and meets the prediction."""

import torch

import actmem
from actmem.catalogue import build, example, tiny

CONFIG = tiny("llama-3.1-8b")
model = build(CONFIG, device="cpu", dtype=torch.float32)
batch = example(CONFIG, batch=4, sequence=128, device="cpu")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step() -> None:
    """Train one step."""
    out = model(**batch)  # the logits stay alive as long as this name does
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()


speed = actmem.device("h100-80gb").tensors_only()  # so small a model is less than what a card takes for itself
found = actmem.profile(model, batch)  # on fake tensors
plain_bytes = actmem.predict(found, actmem.SaveEverything(), speed).peak_bytes
least_bytes = actmem.predict(found, actmem.Full(), speed).peak_bytes
budget = (plain_bytes + least_bytes) // 2  # in your code: "20GiB", or 0.9 of the device

plan = actmem.fit(model, batch, budget=budget, device=speed)
applied = actmem.apply(model, plan)
step()  # creates the optimizer state
measured = actmem.measure(step, model=model, optimizer=optimizer)

print(f"saving everything takes {plain_bytes:9,} bytes")
print(f"the budget              {budget:9,}")
print(f"predicted under plan    {plan.predicted.peak_bytes:9,}, at {plan.predicted.peak_at}")
print(f"measured, in tensors    {measured.tensor_bytes:9,}")
print(f"measured in all         {measured.peak_bytes:9,}, at {measured.peak_op}")
print(f"step time               {plan.predicted.step_time_ratio:.4f} of plain, none below {plan.predicted.bound:.4f}")
assert measured.tensor_bytes == plan.predicted.peak_bytes <= budget

try:
    actmem.fit(model, batch, budget="1MiB", device=speed)
except actmem.BudgetError as error:
    print(f"\nAnd one that cannot be met:\n{error}")
