"""The names that `import pagewire` exports."""

import doctest
import inspect
import tomllib
from dataclasses import fields
from pathlib import Path

import pagewire
from pagewire import BeamSearch, CallOptions, SamplingParams

ROOT = Path(__file__).parents[2]


def test_all_names_are_listed_once_and_sorted():
    public = {
        name
        for name, value in vars(pagewire).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(pagewire.__all__) == public | {"__version__"}
    by_kind = sorted(
        pagewire.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert pagewire.__all__ == by_kind


def test_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pagewire.__version__ == project["version"]


def test_every_sampling_field_is_a_keyword_of_every_call():
    own = {"model", "request_id", "timeout_s", "priority", "tenant"}
    own |= {"cache_salt", "skip_prefix_cache", "n", "metadata", "idempotency_key", "beam_search"}
    assert CallOptions.__annotations__.keys() == {f.name for f in fields(SamplingParams)} | own


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "pagewire" / "py.typed").is_file()


def test_the_examples_in_docstrings_hold():
    for value in (SamplingParams, BeamSearch, pagewire.JsonSchema, pagewire.Choice, pagewire.Tool):
        example = doctest.DocTestFinder().find(value, globs={value.__name__: value})
        assert doctest.DocTestRunner().run(example[0]) == (0, 1)
