"""Every benchmark can be imported, even if it then needs a device."""

import importlib
import pkgutil

import bench

OPTIONAL = {"lm_eval_equal": "lm_eval"}  # what they need that is not installed with the rest


def test_every_module_imports() -> None:
    names = [found.name for found in pkgutil.walk_packages(bench.__path__, "bench.")]
    assert len(names) > 20
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name == OPTIONAL.get(name.rpartition(".")[2]), name
