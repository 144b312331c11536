"""A tokenizer for the tiny model: ids for single characters and a few longer tokens."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from wire.grammar import Matcher

VOCAB_SIZE = 128
EOS = 2
DIGITS = Matcher.grammar_from_regex("[0-9]{3,9}")
SUMS = Matcher.grammar_from_lark('start: sum\nsum: NUMBER | sum "+" sum\nNUMBER: /[0-9]{1,2}/')


def make_tokenizer() -> tokenizers.Tokenizer:
    """Spellings of 108 of the model's 128 ids; the others have none, as in padded vocabularies."""
    names = ["<pad>", "<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ"]
    merges = [("t", "r"), ("tr", "u"), ("tru", "e"), ('"', ":"), ("{", '"'), ("1", "2")]
    merges += [('"', "}"), ("a", "b"), ("ab", "c")]
    names += [left + right for left, right in merges]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:3])
    return tokenizer
