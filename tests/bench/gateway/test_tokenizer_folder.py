"""The gateway is measured with the tokenizer of a folder, or with one made for it."""

import json
from pathlib import Path

from bench.gateway.__main__ import with_tokenizer
from gateway.tokens.tokenizer import Tokenizer


def test_a_checkpoint_without_a_tokenizer_gets_one_of_its_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300}))
    with with_tokenizer(tmp_path) as made:
        assert Tokenizer.from_folder(made).vocab_size == 300
        with with_tokenizer(made) as found:
            assert found == made
    assert not made.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
