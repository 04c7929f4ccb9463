"""Callbacks for the training loops of other libraries. Each only turns events into `apply`, `remove` and metrics.

- `transformers.py`: a callback for `Trainer`, and thus for the trainers of TRL.
- `lightning.py`: a callback for Lightning's `Trainer`, under both of its package names.
- `metrics.py`: metrics of a step, as a plain dict for any logger.

Accelerate, PEFT and a plain loop need nothing from here: call `actmem.apply` before `accelerator.prepare`, and after
`get_peft_model`. `import actmem` imports none of these libraries.
"""
