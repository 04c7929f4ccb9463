"""Profiles of hypothesis (HYPOTHESIS_PROFILE=many searches longer, and elsewhere each time); what every test needs."""

import gc
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,  # a shared machine is slow at times
    derandomize=True,  # the same examples in every run: a change that turns a test red is to blame for it
    database=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "many",
    settings.get_profile("default"),
    derandomize=False,
    max_examples=500,
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests_have_ended() -> None:
    """Wait for them: a test that compares the threads before and after would see them end."""
    ending = [t for t in threading.enumerate() if t.name.startswith("actmem-")]
    if ending:
        gc.collect()  # a failed test, or a cycle, may hold their lane
    for thread in ending:
        thread.join(5.0)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let actmem think that nothing was compiled in this process, as tests before this one may have done."""
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        monkeypatch.setitem(dynamo.counters, "frames", Counter())


@pytest.fixture
def flat_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the name "flat" stand for a device where a budget is a bound on the bytes of tensors."""
    monkeypatch.setenv("ACTMEM_DEVICES", str(Path(__file__).with_name("devices.toml")))
