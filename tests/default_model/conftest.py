"""A GGUF file small enough to convert in milliseconds, and the real model converted afresh."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel

from default_model import source
from default_model.folder import materialize
from default_model.source import GgufSource

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 32, 4, 2, 8, 64, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def metadata(writer: GGUFWriter) -> None:
    """Hyperparameters and vocabulary of the small model."""
    tokens = CONTROL + sorted(ByteLevel.alphabet()) + ["ab"]
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def weights(writer: GGUFWriter) -> None:
    """Random weights under GGUF's names; one is quantized, as all matrices of the real model."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    writer.add_tensor("token_embd.weight", normal(len(CONTROL) + 257, HIDDEN))
    writer.add_tensor("output_norm.weight", normal(HIDDEN))
    for layer in range(LAYERS):
        shapes = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
        }
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", normal(*shape))
        kind = GGMLQuantizationType.Q8_0
        packed = quantize(normal(HIDDEN, FFN), kind)
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", packed, raw_dtype=kind)


Edit = Callable[[GGUFWriter], None]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., GgufSource]:
    """Writes the small model, with the metadata and tensors that a test adds."""

    def write(edit: Edit = lambda writer: None, architecture: str = "llama") -> GgufSource:
        path = tmp_path / "Tiny-Instruct.Q8_0.gguf"
        writer = GGUFWriter(path, architecture)
        metadata(writer)
        weights(writer)
        edit(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufSource(path=path, release="tiny-1.0")

    return write


@pytest.fixture
def tiny(write_gguf: Callable[..., GgufSource]) -> GgufSource:
    """The small model, unmodified."""
    return write_gguf()


@pytest.fixture(scope="session")
def fresh_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real default model, converted by the code under test and not taken from the cache."""
    root = tmp_path_factory.mktemp("default-model")
    yield materialize(source.find(), root)
    shutil.rmtree(root)  # half a gigabyte
