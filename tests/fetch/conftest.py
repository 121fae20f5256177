"""The store in memory, for all tests of this folder."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def memory() -> ModuleType:
    """The module `memory_hub`: tests are no package."""
    if "memory_hub" not in sys.modules:
        spec = spec_from_file_location("memory_hub", Path(__file__).with_name("memory_hub.py"))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules["memory_hub"] = module
        spec.loader.exec_module(module)
    return sys.modules["memory_hub"]
