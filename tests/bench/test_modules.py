"""Every benchmark can be imported, even if it then needs a device."""

import importlib
import pkgutil

import pytest

import bench

MODULES = sorted(found.name for found in pkgutil.iter_modules(bench.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_it_imports(name: str) -> None:
    if name == "lm_eval_equal":
        pytest.importorskip("lm_eval")
    importlib.import_module(f"bench.{name}")
