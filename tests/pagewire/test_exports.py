"""The names that `import pagewire` exports."""

import doctest
import inspect
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import pagewire
from pagewire import BeamSearch, CallOptions, SamplingParams

ROOT = Path(__file__).parents[2]


def test_all_names_are_listed_once_and_sorted():
    public = {
        name
        for name, value in vars(pagewire).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert set(pagewire.__all__) == public | {"__version__", "LLM"}
    by_kind = sorted(
        pagewire.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    assert pagewire.__all__ == by_kind


def test_the_import_is_that_of_the_client_until_a_program_asks_for_an_engine():
    said = "import sys, pagewire; print('pagewire.cli' in sys.modules, pagewire.LLM.__name__)"
    run = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert run.stdout == "False LLM\n"
    with pytest.raises(AttributeError, match="'pagewire' has no attribute 'Llm'"):
        pagewire.Llm  # noqa: B018


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
