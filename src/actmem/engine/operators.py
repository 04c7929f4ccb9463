"""What the tape must know about an operator before it may record it.

NOTE [ Never replayed ]
Most operators may run again: same inputs, same bits. Those that may not are found here, each class with a name and a
reason (`REASONS`), and the tape treats what they wrote as given (see NOTE [ Barriers ] in `barriers.py`):

- *uninitialised*, *constant*: a storage that was born with nothing, or one constant, in it is where a kernel that the
  tape cannot see (Triton, numpy, pybind) puts its result. Its contents are unknown until a recorded operator overwrites
  all of it.
- *collective*: another rank would have to take part a second time. Those in `_REISSUED` may run again on request
  (NOTE [ Collectives again ] in `barriers.py`).
- *routing*: a tie may break the other way, and every shape behind it would change.
- *opaque*: higher-order and custom operators may do what their schema does not say.
- *recurrent*: fused recurrent kernels keep a workspace that no schema describes.
- *gradient*: its kernel asks whether an input requires grad, and in a replay none does.
- *unrepeatable*: two runs on the same input may differ in the last bit.
- *transfer*: a copy from an accelerator to the host would make the host wait.

Aliasing is what storages say, not what schemas say: an output on a known storage is a view of it. Writes are what the
schema says, and the list `UNDECLARED_WRITES` where it says nothing. What is written is taken to be read as well,
argument by argument, unless it is known to be overwritten whole: `out=`, and the lists `_OVERWRITES` and `_FILLED`.

NOTE [ Undivided ]
Autograd divides composite operators (`batch_norm`, `matmul`, `dropout`) before the tape sees them. Where autograd is
left out, as in inference mode, they come whole, with effects that their schemas do not declare: `batch_norm` updates
running statistics, `matmul` asks what requires grad. The tape divides them itself and records the parts, as it does
everywhere else.
"""

from __future__ import annotations

from typing import Any

import torch

from actmem.decisions import Reason
from actmem.engine.values import tensors
from actmem.ops import GROUPS
from actmem.torchcompat import as_outside, is_composite, without_wrapper, writes_list

__all__ = [
    "DESCRIBED",
    "REASONS",
    "UNINITIALISED",
    "UNREPEATABLE_ON_ACCELERATOR",
    "WHOLE_CALLS",
    "Operator",
    "describe",
    "generator_state",
]

WHOLE_CALLS = ("replayable.", "triton.")
"""How the names of Python functions begin that are recorded as one operator: declared pure, or a launch of Triton."""

REASONS: dict[Reason, str] = {
    Reason.UNINITIALISED: "born uninitialised; a kernel that the tape cannot see may have filled it",
    Reason.CONSTANT: "born constant; a kernel that the tape cannot see may have added to it",
    Reason.COLLECTIVE: "a collective: every other rank would have to run it again too",
    Reason.ROUTING: "decides routing: a tie may break differently the second time",
    Reason.OPAQUE: "a higher-order or custom operator that may do more than its schema says",
    Reason.RECURRENT: "a fused recurrent kernel with an undescribed workspace",
    Reason.UNREPEATABLE: "two runs on the same input may differ in the last bit",
    Reason.GRADIENT: "computes something else where no input requires grad, as in a replay",
    Reason.TRANSFER: "a copy from the accelerator to the host",
    Reason.UNSEEN: "made by code that the tape did not see, such as a compiled function",
    Reason.EXTERNAL: "written from outside: the tape did not see the storage born",
    Reason.PARAMETER: "reads a trainable parameter without differentiating through it; an optimizer that steps inside "
    "backward would change it",
    Reason.GENERATOR: "random, and the state of its generator cannot be read",
    Reason.BARRIER: "fewer bytes than the never-replayed values that a replay would need",
    Reason.CUT: "one of the fewest bytes that part what is never replayed from what autograd saves",
    Reason.UNIT: "output of a nested FSDP unit, whose parameters are gone when it would be replayed",
}

_TRUSTED = frozenset({"aten", "prims", "actmem"})
_COLLECTIVE = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "fsdp"}
)
_REISSUED = frozenset({"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast"})
"""Functional collectives that may run again on request: they write nothing, and every rank gives as many bytes as the
others. `all_to_all_single` is not among them: how much it moves may differ from rank to rank."""

UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize"}
)
_CONSTANT = frozenset(
    {
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "zero_",
        "fill_",
        "fill",
        "zero",
    }
    | {"scalar_tensor", "_efficientzerotensor"}
)
_ROUTING = frozenset(
    {"topk", "sort", "argsort", "msort", "kthvalue", "mode", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
)
_RECURRENT = frozenset(
    {
        "mkldnn_rnn_layer",
        "_cudnn_rnn",
        "miopen_rnn",
        "_lstm_mps",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "quantized_lstm",
        "quantized_gru",
    }
)
_ASKS_GRADIENT = frozenset({"_sparse_mm_reduce_impl"})
_UNREPEATABLE = frozenset({"_ctc_loss", "linalg_lstsq"})
_ACCUMULATING = frozenset(
    {"index_put", "index_put_", "_index_put_impl_", "_index_put_impl", "_unsafe_index_put", "put", "put_"}
)
UNREPEATABLE_ON_ACCELERATOR = frozenset(
    {
        "index_add",
        "index_add_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "scatter",
        "scatter_",
        "index_copy",
        "index_copy_",
    }
    | {
        "cumsum",
        "cumsum_",
        "histc",
        "bincount",
        "median",
        "nanmedian",
        "max_unpool2d",
        "max_unpool3d",
        "_embedding_bag",
        "put",
        "put_",
    }
    | {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
)
"""Operators that torch documents as nondeterministic on an accelerator."""

_OVERWRITES = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "bernoulli_",
        "normal_",
        "uniform_",
        "random_",
        "exponential_",
        "cauchy_",
        "geometric_",
        "log_normal_",
    }
)
"""In-place operators that write every element of `self`, and read none of it. Any other argument that is written is
taken to be read as well, unless it is `out=` or listed in `_FILLED`."""

_FILLED: dict[str, str] = {"rrelu_with_noise": "noise", "rrelu_with_noise_": "noise"}
"""Operators that also fill one argument without reading it. Their gradient formulas save it before it is filled.
(Those of `UNDECLARED_WRITES` save theirs early too: plain autograd sees the statistics that the operator leaves.)"""

_CONJUGATES = frozenset({"linalg_pinv", "linalg_lstsq"})
"""Operators whose kernels compute with conjugate views of what they are given. See `torchcompat.as_outside`."""

_WHOLE = frozenset({"linalg_svdvals", "linalg_eigvals", "linalg_eigvalsh", "linalg_cond", "linalg_matrix_rank"}) | {
    "linalg_matrix_norm",
    "linalg_norm",
    "nuclear_norm",
    "norm",
}
"""Composite operators that write nothing and are left undivided: they ask whether a mode is active, and their parts
would have other bits."""

_IN_TRAINING = frozenset({"running_mean", "running_var", "noise"})
"""Arguments that an operator with a `training` flag only writes if that is on."""

UNDECLARED_WRITES: dict[str, tuple[str, ...]] = {
    "native_batch_norm": ("running_mean", "running_var"),
    "batch_norm_update_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that an operator writes although its schema does not say so."""

_OPTIONAL_STATISTICS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
"""Batch norms that may be called without running statistics."""

_NUMERICS = (
    GROUPS["matmul"] | GROUPS["batched_matmul"] | GROUPS["grouped_matmul"] | GROUPS["convolution"] | GROUPS["attention"]
)

QUICK: dict[str, Any] = {
    "aten.add.Tensor": torch.add,
    "aten.addmm.default": torch.addmm,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.clone.default": torch.clone,
    "aten.detach.default": torch.Tensor.detach,
    "aten.div.Tensor": torch.div,
    "aten.embedding.default": torch.embedding,
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": torch.nn.functional.gelu,
    "aten.index_select.default": torch.index_select,
    "aten.mean.dim": torch.mean,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.native_layer_norm.default": torch.native_layer_norm,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.rsqrt.default": torch.rsqrt,
    "aten.select.int": torch.select,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.t.default": torch.t,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.Tensor.view,
}
"""Functions of torch that run exactly this operator when they are given its arguments, and parse them faster than the
operator itself does. A test compares what a dispatch mode sees of both."""


class Operator:
    """One operator overload, as the tape sees it. Made once per process and operator by `describe`."""

    __slots__ = (
        "accumulate",
        "again",
        "call",
        "calm",
        "composite",
        "declared",
        "dropout",
        "fills_saved",
        "fresh",
        "func",
        "in_place",
        "may_alias",
        "name",
        "never",
        "numerics",
        "on_accelerator",
        "overload",
        "overwritten",
        "packet",
        "plain",
        "random",
        "reissued",
        "seeded",
        "statistics",
        "training",
        "transfers",
        "view",
        "writes",
    )

    def __init__(self, func: Any, packet: str | None = None) -> None:
        """Describe an overload by its schema; or, if `packet` is its name, a callable that is recorded as a whole."""
        self.func = func
        self.call = self.again = without_wrapper(func)
        """What the tape calls, and what a replay calls, outside any handler."""
        self.composite = False
        """Runs as other operators, and the tape records those. See NOTE [ Undivided ]."""
        self.reissued = False
        """A collective that may run again on request."""
        self.declared = packet is not None and packet.startswith(WHOLE_CALLS[0])
        """A Python function that was declared pure, by `actmem.replayable`."""
        self.view: bool | int = False
        """Computes nothing: every output shares the storage of an input. 2 if it also sets the conj or neg bit."""
        self.may_alias = getattr(func, "__name__", "").startswith(("_unsafe_view", "unsafe_split", "lift"))
        """May return a view although its schema does not say so."""
        self.fresh = True
        """May return a tensor that it did not merely write."""
        self.writes: tuple[tuple[int, str], ...] = ()
        """Position and name of the arguments that it writes."""
        self.overwritten: frozenset[int | str] = frozenset()
        """Position and name of those of them that it overwrites whole and does not read."""
        self.training: tuple[int, str] | None = None
        """Position and name of a `training` flag that decides whether it writes `_IN_TRAINING`."""
        self.fills_saved: frozenset[int | str] = frozenset()
        """Position and name of those that autograd saves before they are written."""
        self.never: Reason | None = None
        """Why it is never replayed, whatever its arguments."""
        self.random = False
        self.seeded: tuple[int, str] | None = None
        """Position and name of the `generator` argument."""
        self.dropout: tuple[int, str] | None = None
        """Position and name of a dropout probability that decides whether it is random."""
        self.accumulate: tuple[int, str] | None = None
        """Position and name of an `accumulate` flag that decides whether it is repeatable."""
        self.on_accelerator = False
        """Never replayed on an accelerator, unless deterministic algorithms are on."""
        self.transfers = False
        """May copy between devices."""
        self.statistics: tuple[tuple[int, str], ...] | None = None
        """Position and name of the `training` flag, then of the running statistics that are only written if it is
        on."""
        self.numerics = False
        """Its bits depend on the flags of `torchcompat.numerics`."""
        if packet is None:
            self._read_schema()
        else:
            self.packet = self.name = packet
            self.overload = ""
            self.numerics = self.declared  # nobody knows what it computes
        conditional = (
            self.composite
            or isinstance(self.call, _Resolving)
            or self.never
            or self.accumulate
            or self.transfers
            or self.on_accelerator
        )
        pure = not (self.view or self.writes or conditional)
        self.plain = pure and not self.random
        """Pure, deterministic, replayable whatever its arguments: the short way through the tape."""
        self.calm = pure and self.random and self.dropout is not None
        """Like a plain one where it drops nothing out."""
        self.in_place = (
            not (conditional or self.random or self.fresh or self.overwritten or self.training or self.fills_saved)
            and len(self.writes) == 1
            and self.writes[0][0] == 0
        )
        """Like a plain one, except that it reads and writes its first argument, and returns it."""

    def _read_schema(self) -> None:
        schema = getattr(self.func, "_schema", None)
        if schema is None:  # a higher-order operator
            self.packet = f"higher_order.{self.func.name()}"
            self.overload = ""
            self.name = self.packet
            self.never = Reason.OPAQUE
            return
        namespace, _, base = schema.name.partition("::")
        self.packet = f"{namespace}.{base}"
        self.overload = schema.overload_name or "default"
        self.name = f"{self.packet}.{self.overload}"
        self.call = self.again = QUICK.get(self.name, self.call)
        arguments = {a.name: (i, a.name) for i, a in enumerate(schema.arguments)}
        undeclared = UNDECLARED_WRITES.get(base, ()) if namespace == "aten" else ()
        declared = tuple(
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if (a.alias_info is not None and a.alias_info.is_write) or a.name in undeclared
        )
        if self.name == "_c10d_functional.wait_tensor.default":
            self.view = True  # it returns what it is given, when that has arrived
            return
        if namespace in _COLLECTIVE:
            if namespace == "_c10d_functional" and base in _REISSUED:
                self.reissued, self.again = True, _Waited(self.func)
            # Their schemas do not say what they write: everything they are given.
            self.never = Reason.COLLECTIVE
            self.writes = (
                tuple((i, a.name) for i, a in enumerate(schema.arguments) if "Tensor" in str(a.type))
                if namespace == "c10d"
                else declared
            )
            return
        self.composite = is_composite(self.func) and base not in _WHOLE
        if namespace not in _TRUSTED:
            self.call = _Resolving(self.func)  # nobody knows
            self.never = Reason.OPAQUE
            self.writes = declared
            return
        if base in ("_conj", "_neg_view"):
            self.view = 2
            return
        if base in _CONJUGATES or writes_list(self.func):
            self.call = _Resolving(self.func)
        if base in ("detach", "set_", "detach_", "lift_fresh") or (
            not self.composite
            and not declared
            and schema.returns
            and all(r.alias_info is not None for r in schema.returns)
        ):
            self.view = True
            return
        self.writes = declared
        self.fresh = any(r.alias_info is None for r in schema.returns)
        filled = "self" if base in _OVERWRITES else _FILLED.get(base)
        overwritten = [w for w in declared if w[1] == filled or schema.arguments[w[0]].is_out]
        self.overwritten = frozenset(where for write in overwritten for where in write)
        if any(name in _IN_TRAINING for _, name in declared):
            self.training = arguments.get("training")
        early = (*undeclared, _FILLED.get(base))
        self.fills_saved = frozenset(where for write in declared if write[1] in early for where in write)
        self.never = self._reason(base)
        self.random = torch.Tag.nondeterministic_seeded in self.func.tags
        self.seeded = arguments.get("generator")
        self.dropout = arguments.get("dropout_p")
        self.accumulate = arguments.get("accumulate") if base in _ACCUMULATING else None
        self.on_accelerator = base in UNREPEATABLE_ON_ACCELERATOR and torch.accelerator.is_available()
        self.transfers = base in ("_to_copy", "copy_", "copy", "_pin_memory") and torch.accelerator.is_available()
        self.numerics = self.packet in _NUMERICS
        if base in _OPTIONAL_STATISTICS:
            self.statistics = (arguments["training"], arguments["running_mean"], arguments["running_var"])

    @staticmethod
    def _reason(base: str) -> Reason | None:
        if base in UNINITIALISED:
            return Reason.UNINITIALISED
        if base in _CONSTANT:
            return Reason.CONSTANT
        if base in _ROUTING:
            return Reason.ROUTING
        if base in _RECURRENT:
            return Reason.RECURRENT
        if base in _ASKS_GRADIENT:
            return Reason.GRADIENT
        return Reason.UNREPEATABLE if base in _UNREPEATABLE else None

    def draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether this call takes random numbers."""
        if not self.random:
            return False
        if self.dropout is None:
            return True
        return _argument(self.dropout, args, kwargs, 0.0) != 0.0

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, str], ...]:
        """Return position and name of the arguments that this call writes."""
        if self.training is None or _argument(self.training, args, kwargs, False):
            return self.writes
        return tuple(write for write in self.writes if write[1] not in _IN_TRAINING)

    def unread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[int]:
        """Return the positions of running statistics that this call updates and computes nothing from.

        A replay leaves them out: it must not update them again, and need not keep what they were.
        """
        if self.statistics is None or kwargs or not args[self.statistics[0][0]]:
            return frozenset()
        return frozenset(position for position, _ in self.statistics[1:])

    def forbids(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor | None) -> Reason | None:
        """Return why this call, with these arguments, is never replayed; None if it may be."""
        if self.never is not None:
            return self.never
        if self.accumulate is not None and _argument(self.accumulate, args, kwargs, False):
            return Reason.UNREPEATABLE
        if out is None or not (self.on_accelerator or self.transfers):
            return None
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else out.device
        if self.on_accelerator and device.type != "cpu" and not torch.are_deterministic_algorithms_enabled():
            return Reason.UNREPEATABLE
        if self.transfers and device.type == "cpu":
            sources = [a for a in args if isinstance(a, torch.Tensor)]
            if any(a.device.type != "cpu" for a in sources):
                return Reason.TRANSFER
        return None

    def generator(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> torch.Generator | None:
        """Return the generator that this call draws from; None if it is not accessible."""
        given = None if self.seeded is None else _argument(self.seeded, args, kwargs, None)
        if given is not None:
            return given
        if device.type == "cpu":
            return torch.default_generator
        if device.type == "meta":
            return torch.default_generator  # nothing is drawn, so any generator will do
        generators: Any = getattr(torch.get_device_module(device), "default_generators", None)
        index: Any = device.index  # None means the current one
        index = torch.accelerator.current_device_index() if index is None else index
        return None if generators is None or index >= len(generators) else generators[index]

    def __repr__(self) -> str:
        return f"Operator({self.name})"


class _Resolving:
    """Run an operator inside a handler as it would run outside."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with as_outside(self.func):
            return self.func(*args, **kwargs)


class _Waited:
    """Run a functional collective, and return when its result has arrived."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.ops._c10d_functional.wait_tensor(self.func(*args, **kwargs))


def _argument(where: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any], default: Any) -> Any:
    position, name = where
    return args[position] if position < len(args) else kwargs.get(name, default)


DESCRIBED: dict[int, Operator] = {}
"""Every operator that was met so far, by the id of its overload, which it keeps alive: hashing an overload runs
Python code."""


def describe(func: Any) -> Operator:
    """Return the description of an operator overload or higher-order operator."""
    operator = DESCRIBED.get(id(func))
    if operator is None:
        operator = DESCRIBED[id(func)] = Operator(func)
    return operator


def generator_state(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Generator, torch.Tensor] | None:
    """Return the generator that a call draws from, and its state; None if that cannot be read."""
    first = next(tensors(args), None)
    device = first.device if first is not None else torch.device(kwargs.get("device") or torch.get_default_device())
    generator = operator.generator(args, kwargs, device)
    if generator is None:
        return None
    try:
        return generator, generator.get_state()
    except RuntimeError:  # a captured graph does not let its generator be read
        return None
