"""Causes of messages from the code around recomputation: reentrant checkpointing, trainers, compilers, offloading."""

from __future__ import annotations

from actmem.error_causes import Cause, github

__all__ = ["AROUND"]

_FULL = "actmem.apply(model, actmem.Full())"
_FLOWS = f"Gradients flow as in plain training, whether or not the inputs require them: {_FULL}"

_REENTRANT = (
    Cause(
        name="inputs-without-gradient",
        message=r"None of the inputs have requires_grad=True\. Gradients will be None",
        warning=True,
        hints=("(?i)peft|lora",),
        what="Reentrant checkpointing around a block whose inputs do not require gradients: the block's own parameters "
        "get none. Adapters on a frozen model then stay at zero. If the block has nothing to train, it is harmless.",
        fix="use_reentrant=False, or model.enable_input_require_grads() after adding the adapters. "
        "actmem.doctor(model, example=batch) lists trainable parameters without a gradient.",
        actmem=_FLOWS,
        reports=github("huggingface/transformers#42489", "huggingface/trl#2486"),
    ),
    Cause(
        name="loss-without-graph",
        message=r"element 0 of tensors does not require grad and does not have a grad_fn",
        hints=("(?i)peft|lora", "(?i)checkpoint"),
        what="Nothing that the loss depends on requires a gradient. With reentrant checkpointing and a frozen "
        "embedding, every block cuts the graph; otherwise everything is frozen, or forward ran under no_grad.",
        fix="use_reentrant=False, or model.enable_input_require_grads(). Otherwise check which parameters have "
        "requires_grad.",
        actmem=f"{_FLOWS}. If everything is frozen, actmem changes nothing.",
        reports=github("huggingface/transformers#26377", "huggingface/transformers#42489"),
    ),
    Cause(
        name="frozen-region",
        message=r"none of output has requires_grad=True, this checkpoint\(\) is not necessary",
        what="Reentrant checkpointing around a block that has nothing to train and whose inputs carry no gradient.",
        fix="Do not checkpoint that block, or use_reentrant=False.",
        actmem="A block through which no gradient flows is left alone, and the report says so: " + _FULL,
        reports=github("hiyouga/LlamaFactory#6358", "Nerogar/OneTrainer#549"),
    ),
    Cause(
        name="marked-ready-twice",
        message=r"Expected to mark a variable ready only once",
        what="Under DDP a parameter received its gradient twice in one backward pass. Reentrant checkpointing runs "
        "backward inside backward, which DDP does not expect when there are unused or shared parameters.",
        fix="use_reentrant=False and find_unused_parameters=False; with the same parameters used in every step, "
        "static_graph=True.",
        actmem=f"There is one backward pass, as in plain training: {_FULL}, then DistributedDataParallel(model).",
        reports=github("huggingface/peft#313", "huggingface/accelerate#389", "pytorch/pytorch#24005"),
    ),
    Cause(
        name="reentrant-not-said",
        message=r"the use_reentrant parameter should be passed explicitly",
        warning=True,
        what="checkpoint was called without use_reentrant, and uses the older, reentrant form.",
        fix="checkpoint(..., use_reentrant=False); for transformers "
        "gradient_checkpointing_kwargs={'use_reentrant': False}.",
        actmem=f"There is only one form: {_FULL}",
        reports=github("pytorch/pytorch#160534"),
    ),
    Cause(
        name="keywords-refused",
        message=r"Unexpected keyword arguments: [\w, ]+",
        what="The reentrant form of torch's checkpoint takes no keyword arguments for the function.",
        fix="Pass use_reentrant=False, or bind the arguments first: checkpoint(functools.partial(f, max_seqlen=n), x).",
        actmem=f"A block is called as before, with any arguments: {_FULL}",
        reports=github("unslothai/unsloth-zoo#1038"),
    ),
    Cause(
        name="inputs-of-backward",
        message=r"torch\.utils\.checkpoint is incompatible with \.grad\(\) or passing an `inputs` parameter to "
        r"\.backward",
        what="Reentrant checkpointing needs a whole backward pass, and torch.autograd.grad or backward(inputs=...) "
        "runs only a part of one.",
        fix="use_reentrant=False.",
        actmem=f"Any form of backward works: {_FULL}",
    ),
    Cause(
        name="policy-needs-non-reentrant",
        message=r"Passing `context_fn` or `debug` is only supported when use_reentrant=False",
        what="A selective policy, or debug, was passed to the reentrant form, which supports neither.",
        fix="use_reentrant=False.",
        actmem="actmem.apply(model, actmem.Selective(save=['attention', 'matmul']))",
    ),
    Cause(
        name="arguments-out-of-order",
        message=r"Boolean value of Tensor with more than one value is ambiguous",
        hints=("preserve_rng_state", "CheckpointFunction"),
        needs_hint=True,
        what="A checkpoint function received a tensor where it expects preserve_rng_state: the caller and the function "
        "disagree on the order of the arguments.",
        fix="Call it as checkpoint(function, *args, use_reentrant=False), or update the library that replaces it.",
        actmem=f"There is no such function to call: {_FULL}",
        reports=github("unslothai/unsloth-zoo#1218"),
    ),
)

_TRAINERS = (
    Cause(
        name="cache-in-training",
        message=r"`?use_cache=True`? is incompatible with gradient checkpointing"
        r"|Caching is incompatible with gradient checkpointing in \w+",
        warning=True,
        what="A key-value cache is on in training, and transformers turns it off for each call. Harmless, except for "
        "models whose layers share keys and values (num_kv_shared_layers > 0): these then train on wrong ones.",
        fix="model.config.use_cache = False in training, and True again for generation. Not if layers share keys and "
        "values: do not checkpoint those with torch.",
        actmem=f"The cache may stay on: forward runs once. {_FULL}",
        reports=github("huggingface/trl#3683", "NVIDIA-NeMo/Automodel#1705"),
    ),
    Cause(
        name="checkpointing-twice",
        message=r"activation_checkpointing in FSDP config and the gradient_checkpointing in training arg",
        what="Recomputation is enabled twice: in FSDP's configuration and in the trainer's arguments.",
        fix="Switch one off: gradient_checkpointing=False in the trainer's arguments.",
        actmem="Switch both off, and let actmem decide: " + _FULL,
        reports=github("huggingface/transformers#28499"),
    ),
    Cause(
        name="no-wrap-policy",
        message=r"'NoneType' object is not callable",
        hints=(r"accelerate/\S{0,80}fsdp|fsdp2?_prepare_\w*|auto_wrap_policy",),
        needs_hint=True,
        what="accelerate was asked for activation checkpointing under FSDP without a policy that says what to wrap.",
        fix="fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP in accelerate's configuration.",
        actmem="Remove fsdp_activation_checkpointing; actmem finds the blocks itself: " + _FULL,
        reports=github("huggingface/accelerate#4140"),
    ),
    Cause(
        name="mixed-tensors",
        message=r"got mixed torch\.Tensor and DTensor",
        hints=("(?i)fsdp|fully_shard", "(?i)checkpoint"),
        what="A recomputed block found its parameters sharded where it expected them gathered: two forward passes "
        "before one backward pass, the reentrant form, or FSDP inside the checkpointed region.",
        fix="Checkpoint first, then fully_shard; use_reentrant=False; one forward pass per backward pass.",
        actmem=f"No forward runs a second time: {_FULL} before fully_shard.",
        reports=github("pytorch/pytorch#153354"),
    ),
    Cause(
        name="fp8-outside-context",
        message=r"'Tensor' object has no attribute 'main_grad'",
        what="An FP8 layer was recomputed outside its fp8_autocast, and took the code path of other precisions.",
        fix="Use the checkpoint function of Transformer Engine or Megatron, which enters fp8_autocast again.",
        actmem="Not tested: actmem has not been run with Megatron or Transformer Engine.",
        reports=github("NVIDIA/Megatron-LM#7538"),
    ),
    Cause(
        name="torch-too-old",
        message=r"cannot import name '(CheckpointPolicy|create_selective_checkpoint_contexts)'",
        what="This version of torch predates selective checkpointing.",
        fix="Install a newer torch.",
        actmem="actmem requires torch 2.13 or newer.",
        reports=github("pytorch/torchtitan#439"),
    ),
    Cause(
        name="packet-in-list",
        message=r"Expected op in `op_list` to be an OpOverload but got",
        what="A selective policy lists an operator without its overload: torch.ops.aten.mm is a packet of several.",
        fix="Write torch.ops.aten.mm.default.",
        actmem="Both are accepted, and a name that matches nothing raises an error: "
        "actmem.apply(model, actmem.Selective(save=['aten.mm']))",
        reports=github("pytorch/pytorch#176065"),
    ),
)

_COMPILERS = (
    Cause(
        name="flex-not-compiled",
        message=r"SOLUTION: Use torch\.compile\(flex_attention\)",
        warning=True,
        what="FlexAttention ran uncompiled, which is slow and holds all scores. Inside a selectively checkpointed "
        "region this happens even if it is compiled: the policy's dispatch mode disables compilation.",
        fix="Compile around the checkpointed block, or torch._inductor.config.wrap_inductor_compiled_regions = True.",
        actmem="What is compiled inside a block stays compiled: flex_attention = torch.compile(flex_attention).",
        reports=github("pytorch/torchtitan#1631", "pytorch/pytorch#175229"),
    ),
    Cause(
        name="compilation-skipped",
        message=r"non-infra torch dispatch mode present, this is not supported today in torch\.compile",
        warning=True,
        what="torch.compile skipped a function because a dispatch mode was active: the policy of selective "
        "checkpointing, a counter or a logger.",
        fix="Compile around the checkpointed block, or torch._inductor.config.wrap_inductor_compiled_regions = True.",
        actmem="actmem's own mode lets compiled functions run compiled: actmem.apply(model, "
        "actmem.Selective(save=['matmul']))",
        reports=github("pytorch/pytorch#163013", "pytorch/pytorch#161889"),
    ),
    Cause(
        name="cuda-graph-recording",
        message=r"graph recording observed an input tensor deallocate during graph recording that did not occur during "
        r"replay",
        what="CUDA graphs (torch.compile mode reduce-overhead) inside a checkpointed region: recomputation frees "
        "tensors in a different order from the recorded one.",
        fix="torch.compile(model, mode='default'), or no checkpointing there.",
        actmem="Not tested: actmem has not yet run on an accelerator.",
        reports=github("bghira/SimpleTuner#3155", "pytorch/pytorch#154306"),
    ),
    Cause(
        name="seed-during-capture",
        message=r"Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture",
        what="Checkpointing reads the state of the random generator while a CUDA graph is being captured.",
        fix="preserve_rng_state=False, only if nothing in the region is random; otherwise do not capture it.",
        actmem="Not tested: actmem has not yet run on an accelerator. It reads the state for random operators only.",
        reports=github("pytorch/pytorch#83148"),
    ),
    Cause(
        name="budget-with-graph-break",
        message=r"must cover the entire forward of a graph.{0,200}?forward op\(s\) are unannotated",
        what="torch.compile's memory budget for regions found operators outside every region: there was a graph break "
        "inside one.",
        fix="Remove the graph break (TORCH_LOGS=graph_breaks), or set the budget per module.",
        actmem="A budget in bytes, in eager or compiled, needs no regions: actmem.apply(model, actmem.Budget('20GiB'), "
        "example=batch)",
        reports=github("pytorch/pytorch#194291"),
    ),
)

_MEMORY = (
    Cause(
        name="offload-not-cleared",
        message=r"(?i:backward pass should have cleared tracker of all tensors)|Untracked tensor",
        what="An offloading context found tensors of an earlier step: some saved tensor was never used (a branch that "
        "backward does not take, experts without tokens), or backward ran outside the context.",
        fix="Run forward and backward inside one context, and update the library: trl has fixed several such bugs.",
        actmem="Offloaded tensors are dropped when their graph is freed, used or not: "
        "actmem.apply(model, actmem.OffloadActivations(to='host'))",
        reports=github("meta-pytorch/torchtune#2709", "huggingface/trl#5730"),
    ),
    Cause(
        name="inference-tensor-written",
        message=r"Inplace update to inference tensor outside InferenceMode is not allowed",
        what="A buffer that was created under inference_mode is written in training. Seen when offloading keeps its "
        "buffers from an evaluation (the cause is inferred there).",
        fix="Evaluate under torch.no_grad() instead, or create the buffers again for training.",
        actmem="Without gradients a block is left alone, and no buffer is kept between steps: " + _FULL,
        reports=github("unslothai/unsloth#3828"),
    ),
    Cause(
        name="no-cuda-here",
        message=r"Torch not compiled with CUDA enabled",
        hints=("(?i)offload",),
        what="The code asks for CUDA by name, as some offloading does, but the machine or this build of torch does not "
        "have it.",
        fix="Use a library that asks torch.accelerator, or install a build of torch for your device.",
        actmem="actmem asks torch.accelerator: actmem.apply(model, actmem.OffloadActivations(to='host')). That lane "
        "has run only on a simulated device.",
        reports=github("axolotl-ai-cloud/axolotl#3995"),
    ),
    Cause(
        name="out-of-memory",
        message=r"(?i:\bout of memory\b)|OutOfMemoryError|DefaultCPUAllocator: (can't allocate|not enough) memory",
        what="The step needs more memory than there is. If checkpointing is on, it may not reach the blocks; if memory "
        "grew from step to step, something keeps tensors alive.",
        fix="actmem.doctor(model, example=batch, mode=mode) shows whether a mode has any effect, and what grows.",
        actmem="actmem fit MODEL --device this --budget 0.9, on the machine of the card, finds a plan that fits, or "
        "says what would; applied.report() shows what is held.",
        reports=github("NVIDIA-NeMo/Automodel#1986"),
    ),
)

AROUND: tuple[Cause, ...] = (*_REENTRANT, *_TRAINERS, *_COMPILERS, *_MEMORY)
