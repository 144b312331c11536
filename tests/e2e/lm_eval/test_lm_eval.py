"""lm-eval scores the default model through the gateway as in its own process."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Product
from tests.e2e.lm_eval import equal

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'lm-eval[api]'")


@pytest.mark.slow
def test_the_harness_sees_the_same_model(
    product: Product, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = equal.run(product.url, model.name, model)
    assert [one.problem for one in found] == [None, None]
    ours, theirs = found[0].scores["acc,none"]
    assert 0.3 < ours < 0.95 and ours == theirs  # neither random nor perfect
