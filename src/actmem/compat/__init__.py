"""The names of other systems over actmem's engine, so that a user of one switches by changing an import.

- `prime_rl.py`: checkpoint targets, as in prime-rl.
- `torchtitan.py`: per-operator selective checkpointing, as in torchtitan, newer classes and older function.
- `nemo.py`: selective, full and sub-module checkpointing of layer lists, as in NeMo Automodel.
- `axolotl.py`: activation offloading, as in axolotl and TRL.
- `configs.py`: their configuration files, read: what they become here.
- `_translating.py`: what they share.

These files translate and decide nothing: every function ends in `actmem.apply`. Where the other system returns nothing,
the handle comes back here, to report and to remove. A second call with the same arguments does nothing and returns
a handle of the first. An option that could only be ignored raises. Nothing of the other systems is imported.
"""
