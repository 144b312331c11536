"""A run of `pagewire up`, ended with the test."""

import pytest

from tests.pagewire.launcher.fake_services import write_checkout
from tests.pagewire.launcher.run_of_up import Up


@pytest.fixture
def up(tmp_path):
    write_checkout(tmp_path)
    up = Up(tmp_path)
    yield up
    up.close()
