"""The APIs of other systems on top of actmem's engine, so that their users can switch by changing an import.

- `prime_rl.py`: checkpoint targets, as in prime-rl.
- `torchtitan.py`: per-operator selective checkpointing, as in torchtitan: the newer classes and the older function.
- `nemo.py`: selective, full and sub-module checkpointing of layer lists, as in NeMo Automodel.
- `axolotl.py`: activation offloading, as in axolotl and TRL.
- `configs.py`: reads their configuration files and translates them.
- `exports.py`: writes a plan as the nearest settings of such a system, and of others.
- `_translation.py`: what they share.

These files only translate: every function ends in `actmem.apply`. Where the original returns nothing, these functions
return the handle, for reports and removal. A second call with the same arguments does nothing and returns a handle of
the first. An option that could only be ignored raises. None of the other systems is imported.
"""
