"""Every benchmark can be imported, even if it then needs a device."""

import importlib
import pkgutil

import bench


def test_every_module_imports() -> None:
    names = [found.name for found in pkgutil.walk_packages(bench.__path__, "bench.")]
    assert len(names) > 20
    for name in names:
        importlib.import_module(name)
