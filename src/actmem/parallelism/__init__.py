"""Build the parallel model that a layout describes, with torch's own functions, and profile its ranks."""

from actmem.parallelism.layout_profile import profile_layout
from actmem.parallelism.model_parts import Parts, check_parts, find_parts
from actmem.parallelism.rank_job import RankJob, build_job
from actmem.parallelism.stage_profiles import StageProfile, profile_stages

__all__ = [
    "Parts",
    "RankJob",
    "StageProfile",
    "build_job",
    "check_parts",
    "find_parts",
    "profile_layout",
    "profile_stages",
]
