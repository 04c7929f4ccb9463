"""actmem inside the loops of other libraries. Thin: each file translates events into `apply`, `remove` and numbers.

- `transformers.py`: a callback for `Trainer`, and so for the trainers of TRL.
- `lightning.py`: a callback for Lightning's `Trainer`, under both of its package names.
- `metrics.py`: what a step did, as a plain dict for any logger.

Accelerate, PEFT and a plain loop need nothing from here: call `actmem.apply` before `accelerator.prepare`, and after
`get_peft_model`. `import actmem` imports none of these libraries.
"""
