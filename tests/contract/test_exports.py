import importlib
import pkgutil

import actmem
from tests.children import run

PROMISED = {
    "ActmemError",
    "Applied",
    "ApplyError",
    "Budget",
    "BudgetError",
    "Compiled",
    "Device",
    "DeviceError",
    "Diagnosis",
    "ExpertCounts",
    "Explanation",
    "FreedStorageError",
    "FromPlan",
    "Frontier",
    "Full",
    "JobPlan",
    "Largest",
    "Layout",
    "Measurement",
    "ModeError",
    "Offload",
    "OffloadActivations",
    "OffloadError",
    "Plan",
    "PlanError",
    "Prediction",
    "Profile",
    "Quantile",
    "Ranks",
    "ReplayError",
    "Report",
    "Rule",
    "Rules",
    "SaveEverything",
    "Selective",
    "SelfCheckError",
    "SnapshotError",
    "Split",
    "StageProfile",
    "StructureError",
    "Targets",
    "Trace",
    "UnsupportedError",
    "Verification",
    "VersionError",
    "apply",
    "device",
    "doctor",
    "every_second",
    "explain",
    "fit",
    "fit_job",
    "frontier",
    "known_devices",
    "largest",
    "measure",
    "offload",
    "predict",
    "profile",
    "profile_layout",
    "profile_rank",
    "profile_stages",
    "ranks",
    "record",
    "replayable",
    "verify",
}


def test_the_public_names_are_exactly_the_promised_ones() -> None:
    assert set(actmem.__all__) == PROMISED
    assert actmem.__all__ == sorted(actmem.__all__, key=lambda name: (not name[0].isupper(), name))
    assert {name for name in PROMISED if not hasattr(actmem, name)} == set()


def test_importing_actmem_imports_no_torch_and_applying_imports_no_solver_and_no_extra() -> None:
    code = (
        "import sys, actmem; lean = set(sys.modules); actmem.apply, actmem.measure; full = set(sys.modules)"
        "; print('torch' in lean, sorted(full & {'highspy', 'jinja2', 'plotly', 'pydantic', 'rich', 'tyro'}))"
    )
    done = run("-c", code)
    assert (done.stdout.strip(), done.returncode) == ("False []", 0), done.stderr


def test_no_public_function_has_the_name_of_a_module() -> None:
    modules = {info.name for info in pkgutil.iter_modules(actmem.__path__)}
    assert modules & PROMISED == set()


def test_every_public_name_is_documented() -> None:
    assert [name for name in PROMISED if not (getattr(actmem, name).__doc__ or "").strip()] == []


def test_every_module_says_what_it_is_for_and_what_it_exports_exists() -> None:
    for info in pkgutil.walk_packages(actmem.__path__, "actmem."):
        module = importlib.import_module(info.name)
        assert (module.__doc__ or "").strip(), info.name
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), f"{info.name}.{name}"


def test_every_error_can_be_caught_as_one_of_actmem_and_as_a_builtin() -> None:
    errors = [getattr(actmem, name) for name in PROMISED if name.endswith("Error")]
    for error in errors:
        assert issubclass(error, actmem.ActmemError)
        assert error is actmem.ActmemError or issubclass(error, (ValueError, RuntimeError))
