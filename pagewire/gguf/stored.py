"""The tensors of a GGUF file, to be read with the names and values of a Hugging Face folder."""

from pagewire.gguf.architecture import added, num_swapped_heads, weights
from pagewire.gguf.blocks import StoredTensor
from pagewire.gguf.delta_nets import is_decay, tiles
from pagewire.gguf.header import GgufHeader


def stored_weights(header: GgufHeader) -> dict[str, StoredTensor]:
    """All of them by name. Raises BadGguf."""
    return {
        name: StoredTensor(
            header.path,
            tensor,
            num_swapped_heads(header, tensor),
            added(header, tensor),
            tiles(header, tensor),
            is_decay(header, tensor),
        )
        for name, tensor in weights(header).items()
    }
