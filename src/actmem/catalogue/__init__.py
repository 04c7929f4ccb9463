"""Build ten well-known models from their published numbers, with torch alone.

`build(name)` creates a model, by default on the meta device; `example(name)` a batch for it. Nothing here knows about
decisions, plans or tapes, and `import actmem` does not import it.

- `model_configs.py` holds the numbers, with their sources.
- `layers.py`, `attention.py` and `moe.py` hold the parts of a layer.
- `decoder.py` and `vit.py` assemble them.
- `builder.py` builds models and examples.

>>> from actmem.catalogue import build, example, tiny
>>> config = tiny("gpt-oss-20b")
>>> model = build(config, device="cpu")
>>> model(**example(config, sequence=16, device="cpu")).loss.backward()
"""

from actmem.catalogue.attention import Attention, LatentAttention
from actmem.catalogue.builder import build, example, names
from actmem.catalogue.decoder import IGNORED, CausalLM, Decoder, Output, following_tokens, next_token_loss
from actmem.catalogue.model_configs import Config, DecoderConfig, VisionConfig, find, tiny
from actmem.catalogue.moe import Experts, MoE

__all__ = [
    "IGNORED",
    "Attention",
    "CausalLM",
    "Config",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "LatentAttention",
    "MoE",
    "Output",
    "VisionConfig",
    "build",
    "example",
    "find",
    "following_tokens",
    "names",
    "next_token_loss",
    "tiny",
]
