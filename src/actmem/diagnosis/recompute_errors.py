"""Causes of messages from torch's checkpoint when recomputation differs from forward."""

from __future__ import annotations

from actmem.error_causes import Cause, github

__all__ = ["RECOMPUTING"]

_METADATA = r"Recomputed values for the following tensors have different metadata than during the forward pass"
_NUMBER = (
    r"A different number of tensors was saved during the original forward and recomputation"
    r"|trying to save more tensors during recomputation than during the original forward pass"
    r"|Detected non-determinism while running activation checkpointing"
)
_NOT_STORED = r"encountered during backward but not found in storage"
_ONCE = "The forward code runs once, and only recorded operators run again"
_FULL = "actmem.apply(model, actmem.Full())"

_DIFFERENT_TENSORS = (
    Cause(
        name="zero3-partitioned",
        message=_METADATA,
        pairs="empty",
        hints=("(?i)deepspeed", "(?i)zero.?3|stage3"),
        what="DeepSpeed ZeRO-3 freed the memory of frozen parameters between recomputation and its check: a recomputed "
        "tensor has shape [0]. Adapters (LoRA) on a frozen model are the usual case.",
        fix="Use a DeepSpeed version that includes pull request 8148 (0.19.2 does not). Until then "
        "use_reentrant=True, which does not check what it recomputes.",
        actmem="Not tested: actmem has not been run under DeepSpeed. Under FSDP2 it has, with frozen parameters.",
        reports=github("huggingface/transformers#47254", "deepspeedai/DeepSpeed#8148"),
    ),
    Cause(
        name="cache-grew",
        message=_METADATA,
        pairs="doubled",
        hints=("past_key_values?", "DynamicCache", "use_cache", "kv_cache"),
        what="A key-value cache received its keys and values twice: once in forward, once in recomputation. A "
        "dimension of the recomputed tensors is exactly twice that of the saved ones.",
        fix="Train with use_cache=False (model.config.use_cache = False), unless layers share keys and values "
        "(num_kv_shared_layers > 0, Gemma 3n and 4): these need them passed from layer to layer.",
        actmem=f"{_ONCE}, so the cache grows once, and models that share keys and values train correctly: {_FULL}",
        reports=github("huggingface/transformers#34928", "NVIDIA-NeMo/Automodel#3677"),
    ),
    Cause(
        name="routing-flipped",
        message=_METADATA,
        pairs="rows",
        hints=("(?i)moe|expert", "(?i)router|top_?k|dispatch"),
        what="A router sent some tokens to other experts the second time: the number of rows differs by a few, and the "
        "other dimensions are equal. A tie in top-k, or a nondeterministic kernel, is enough.",
        fix="Save the router's product, its top-k and the dispatch layout, all three, in the policy. Run a block twice "
        "on the same input to see which kernel differs.",
        actmem="Routing decisions are never computed again, in any mode: their results are held. " + _FULL,
        reports=github("pytorch/torchtitan#1117", "NVIDIA-NeMo/Automodel#3140"),
    ),
    Cause(
        name="precision-lost",
        message=_METADATA,
        pairs="precision",
        hints=("(?i)fsdp|fully_shard", "(?i)autocast|mixed.?precision"),
        what="Recomputation ran in another precision: shapes are equal, but bfloat16 or float16 has become float32 or "
        "vice versa. FSDP2 before torch 2.13 skips its cast of the inputs the second time; fully_shard has also been "
        "seen to lose autocast in recomputation.",
        fix="Use torch 2.13 or newer, or wrap the block for checkpointing before fully_shard.",
        actmem=f"The casts that ran are recorded like everything else: {_FULL} before fully_shard.",
        reports=github("pytorch/pytorch#159359", "pytorch/pytorch#148831", "NVIDIA-NeMo/Automodel#3513"),
    ),
    Cause(
        name="autocast-cache",
        message=_METADATA,
        pairs="shifted",
        hints=("(?i)autocast",),
        what="The same tensors appear one position earlier or later: something was saved in only one of the runs. "
        "Under autocast a weight that was cast before comes from a cache and is not cast again.",
        fix="Before the block, do not run a forward without gradients or share weights under the same autocast. "
        "torch.autocast(..., cache_enabled=False) should avoid it too (not confirmed in the reports).",
        actmem=f"A cast is recorded where it ran, and its result is reused where it was used: {_FULL}",
        reports=github("pytorch/pytorch#141896", "pytorch/pytorch#193338"),
    ),
    Cause(
        name="context-lost",
        message=_METADATA,
        pairs="kind",
        hints=("(?i)sdpa_kernel|scaled_dot_product", "(?i)context_parallel", "(?i)flash|attn_mask|attention"),
        what="Tensors of another kind were saved: masks instead of scores, or more dimensions. Another attention "
        "kernel ran the second time, as when sdpa_kernel or context_parallel was active during forward but not during "
        "backward.",
        fix="Run backward inside the same context, or enter it inside the block; checkpoint(..., context_fn=...) can "
        "enter it again.",
        actmem=f"The recorded operator is the kernel that ran: {_FULL}",
        reports=github("huggingface/trl#4314", "NVIDIA-NeMo/Automodel#2993"),
    ),
    Cause(
        name="other-graph",
        message=f"{_METADATA}|{_NUMBER}",
        hints=(
            r"compile_wrapper|OptimizedModule|__compiled_fn|torch\.compile\(",
            "_inductor|CompiledFunction|aot_autograd",
        ),
        needs_hint=True,
        what="A compiled function chose another of its graphs the second time: a static one in forward, a dynamic one "
        "in recomputation.",
        fix="torch._dynamo.mark_dynamic on the sizes that vary, before the first step, or "
        "torch._C._dynamo.eval_frame._set_lru_cache(False). Best of all, compile the checkpointed block: "
        "torch.compile(checkpointed block).",
        actmem="In a compiled block the partitioner implements the plan, and no code runs twice: apply, then "
        "block.compile().",
        reports=github("pytorch/pytorch#166926", "pytorch/torchtitan#1991"),
    ),
    Cause(
        name="recomputation-differs",
        message=_METADATA,
        general=True,
        what="Recomputation produced tensors of other shapes or dtypes than forward did, in no known pattern: state "
        "that changed in between, a branch on it, or a context that is no longer active.",
        fix="torch.utils.checkpoint.set_checkpoint_debug_enabled(True) lists the operators of both runs; run explain "
        "on that text. use_reentrant=True silences this check but not the difference.",
        actmem=f"{_ONCE}: {_FULL}. actmem.doctor(model, example=batch) runs a block twice and names what differs.",
        reports=github("pytorch/pytorch#144637"),
    ),
    Cause(
        name="other-operators",
        message=_NUMBER,
        hints=("(?i)swiglu|xformers", "(?i)expert|router", "(?i)DistributedDataParallel|ddp"),
        what="Recomputation ran other operators than forward: a branch on a random number or on state, a kernel that "
        "behaves differently the second time, or routed experts with other loads.",
        fix="Find the first operator that differs with torch.utils.checkpoint.set_checkpoint_debug_enabled(True), then "
        "move the branch out of the block, or exclude that block from checkpointing.",
        actmem=f"{_ONCE}: {_FULL}",
        reports=github("pytorch/pytorch#144035", "NVIDIA-NeMo/RL#1203", "jzhang38/TinyLlama#152"),
    ),
)

_USED_AGAIN = (
    Cause(
        name="saved-tensors-read-twice",
        message=r"Unpack is being triggered for a tensor that was already unpacked once",
        hints=(r"saved_tensors", "(?i)mamba|stk|triton"),
        what="The backward of an autograd.Function reads ctx.saved_tensors more than once, and torch's checkpoint "
        "returns each tensor only once.",
        fix="Read it once, into variables: x, weight = ctx.saved_tensors. actmem.doctor(model) finds the function.",
        actmem=f"Saved tensors may be read as often as in plain training: {_FULL}",
        reports=github("pytorch/pytorch#82156", "state-spaces/mamba#1021", "stanford-futuredata/stk#7"),
    ),
    Cause(
        name="compiled-then-eager",
        message=r"Something went unexpectedly wrong in activation checkpoint",
        hints=("recompile_limit|cache_size_limit", "compile_wrapper|OptimizedModule|__compiled_fn"),
        what="torch's own bookkeeping broke. This was seen when forward ran compiled and recomputation ran in eager, "
        "because the recompilation limit was reached in between.",
        fix="Raise torch._dynamo.config.recompile_limit, or mark the sizes that vary with torch._dynamo.mark_dynamic.",
        actmem=f"{_ONCE}, whichever of them was compiled: {_FULL}",
        reports=github("unslothai/unsloth-zoo#1001"),
    ),
    Cause(
        name="fp8-module",
        message=r"if early stop is enabled, we don't expect to reach here|target_frame\.early_stop is set",
        hints=("(?i)transformer_engine|fp8",),
        what="Recomputation saved more tensors than forward did. Seen with FP8 modules of Transformer Engine, which "
        "keep state between calls.",
        fix="Use transformer_engine.pytorch.checkpoint for those modules; it supports FP8.",
        actmem="Not tested: actmem has not been run with Transformer Engine.",
        reports=github("NVIDIA/TransformerEngine#415"),
    ),
    Cause(
        name="second-backward-selective",
        message=r"Trying to backward an extra time\. You are only allowed to backward once on any region computed "
        r"under "
        r"selective activation checkpoint",
        hints=("retain_graph", "(?i)pipelin|zero.?bubble|stage_backward"),
        what="Backward went through a selectively checkpointed region twice: retain_graph=True, a pipeline schedule "
        "that splits backward into inputs and weights, or compiled autograd.",
        fix="Checkpoint the whole region, without a policy, or run backward through it once.",
        actmem="Backward may run twice, and in parts: actmem.apply(model, actmem.Selective(save=['matmul']))",
        reports=github("pytorch/pytorch#142862", "pytorch/pytorch#136766"),
    ),
    Cause(
        name="shared-weight-under-autocast",
        message=_NOT_STORED,
        hints=(r"aten\._to_copy\.default (invocation index \d+ )?encountered",),
        needs_hint=True,
        what="Recomputation asked for a cast that forward did not perform. Under autocast a weight that two blocks "
        "share is cast once and then cached, so the second block has no cast of its own to find.",
        fix="Remove aten._to_copy from the policy, or do not share weights between checkpointed blocks under autocast.",
        actmem="A cast is recorded where it ran: actmem.apply(model, actmem.Selective(save=['matmul', "
        "'aten._to_copy']))",
        reports=github("pytorch/pytorch#193338"),
    ),
    Cause(
        name="sharded-inside-region",
        message=_NOT_STORED,
        hints=(r"fsdp\.\w+\.\w+ (invocation index \d+ )?encountered",),
        needs_hint=True,
        what="An FSDP unit inside the selectively checkpointed region gathers its parameters again.",
        fix="Shard whole blocks, so that the unit is not smaller than the region, or checkpoint the whole region.",
        actmem="The results of a nested FSDP unit are held, and its collectives are not run again: apply, then "
        "fully_shard.",
        reports=github("NVIDIA-NeMo/Automodel#3258"),
    ),
    Cause(
        name="state-took-another-path",
        message=_NOT_STORED,
        hints=(r"\w{1,40}\.\w{1,60}_\.\w{1,40} (invocation index \d+ )?encountered",),
        needs_hint=True,
        what="An in-place operator ran only in recomputation: state that was None in forward existed the second time, "
        "and was added to. It is then counted twice as well.",
        fix="Create the state before the first forward, and update it outside the region.",
        actmem=f"{_ONCE}, so state is written once: actmem.apply(model, actmem.Selective(save=['matmul']))",
        reports=github("NVIDIA-NeMo/Automodel#3247"),
    ),
    Cause(
        name="not-in-storage",
        message=_NOT_STORED,
        general=True,
        hints=(r"\S{1,80} (invocation index \d+ )?encountered",),
        what="Recomputation asked for the result of an operator that forward did not run: other state, another "
        "context, or a branch.",
        fix="Find what the block reads besides its arguments. Without a policy, set_checkpoint_debug_enabled(True) "
        "lists both runs.",
        actmem=f"{_ONCE}: actmem.apply(model, actmem.Selective(save=['matmul']))",
        reports=github("pytorch/pytorch#193338"),
    ),
    Cause(
        name="saved-result-overwritten",
        message=r"Tensor cached during selective activation checkpoint has been mutated",
        hints=(r"relu_|masked_fill_|tanh_|add_",),
        what="An in-place operator wrote into the result of an operator whose results the policy saves.",
        fix="Make that operator out of place, or do not save the one before it. allow_cache_entry_mutation=True only "
        "silences this: the gradients are then wrong.",
        actmem="Tensors that a replay may need are copied before they are overwritten: "
        "actmem.apply(model, actmem.Selective(save=['matmul']))",
        reports=github("mindspore-ai/hyper-parallel#937", "pytorch/pytorch#119590"),
    ),
    Cause(
        name="graph-kept",
        message=r"Trying to backward through the graph a second time",
        hints=("retain_graph", "(?i)reentrant|CheckpointFunction", "(?i)recurrent|memory|state"),
        what="Backward reached a graph that an earlier backward has freed: a module keeps a tensor with its graph from "
        "step to step, or a loss is used twice. Reentrant checkpointing cannot retain a graph at all.",
        fix="Detach what is kept between steps: self.state = state.detach(). With retain_graph=True, set "
        "use_reentrant=False. actmem.doctor(model) lists modules that keep such tensors.",
        actmem="actmem does not change this: plain training fails in the same way.",
        reports=github("huggingface/transformers#43203", "unslothai/unsloth#3592"),
    ),
)

RECOMPUTING: tuple[Cause, ...] = (*_DIFFERENT_TENSORS, *_USED_AGAIN)
