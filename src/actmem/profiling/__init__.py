"""Find out what a step does by running it, on fake tensors or for real, with nothing held."""

from typing import TYPE_CHECKING

from actmem.doors import on_first_use

if TYPE_CHECKING:
    from actmem.profiling.autocast_lists import card_autocast, for_card
    from actmem.profiling.compiled_step import CompiledRun, CompiledStep, Section
    from actmem.profiling.complaints import called_as
    from actmem.profiling.examples import argument_names, loss_of, named_arguments, shapes_of
    from actmem.profiling.fake_model import fake_part
    from actmem.profiling.kernel_workspaces import KernelWorkspaces
    from actmem.profiling.optimizer_state import OptimizerLike
    from actmem.profiling.packed_batches import documents_of
    from actmem.profiling.rank_profile import profile_rank
    from actmem.profiling.restored_state import Restored, generator_states, inputs_of
    from actmem.profiling.shards import STEP, sharded
    from actmem.profiling.step_profile import check_step, profile, profiles

__all__ = [
    "STEP",
    "CompiledRun",
    "CompiledStep",
    "KernelWorkspaces",
    "OptimizerLike",
    "Restored",
    "Section",
    "argument_names",
    "called_as",
    "card_autocast",
    "check_step",
    "documents_of",
    "fake_part",
    "for_card",
    "generator_states",
    "inputs_of",
    "loss_of",
    "named_arguments",
    "profile",
    "profile_rank",
    "profiles",
    "shapes_of",
    "sharded",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "actmem.profiling.autocast_lists": "card_autocast for_card",
        "actmem.profiling.compiled_step": "CompiledRun CompiledStep Section",
        "actmem.profiling.complaints": "called_as",
        "actmem.profiling.examples": "argument_names loss_of named_arguments shapes_of",
        "actmem.profiling.fake_model": "fake_part",
        "actmem.profiling.kernel_workspaces": "KernelWorkspaces",
        "actmem.profiling.optimizer_state": "OptimizerLike",
        "actmem.profiling.packed_batches": "documents_of",
        "actmem.profiling.rank_profile": "profile_rank",
        "actmem.profiling.restored_state": "Restored generator_states inputs_of",
        "actmem.profiling.shards": "STEP sharded",
        "actmem.profiling.step_profile": "check_step profile profiles",
    },
)
