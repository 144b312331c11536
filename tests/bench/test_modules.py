"""Every benchmark can be imported, even if it then needs a device."""

import importlib
import pkgutil

import bench

OPTIONAL = {"lm_eval_equal": "lm_eval"}  # what they need that is not installed with the rest


def test_every_module_imports() -> None:
    names = [found.name for found in pkgutil.iter_modules(bench.__path__)]
    assert len(names) > 20
    for name in names:
        try:
            importlib.import_module(f"bench.{name}")
        except ModuleNotFoundError as error:
            assert error.name == OPTIONAL.get(name), name
