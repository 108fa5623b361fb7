"""Write a small llama-architecture GGUF model with random weights that real engines load and chat with.

It says word salad, yet everything around it is real: load time, speeds, slots, context limits, streaming,
metrics, embeddings. The same arguments give the same bytes.

How the salad stays readable: dimension 0 of the residual stream holds one constant for every token and no
block writes to it, so column 0 of the output matrix is a bias per token. That bias lets whole words through
and shuts out control, byte and half-word tokens. The end-of-turn token is shut out as well, so a request
runs to its limit, unless ``--eos-every N`` gives it a chance of about 1/N per token at temperature 1.

    python -m tests.support.tiny_gguf --out mid.gguf --size-mb 40
"""

import argparse
import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ALIGNMENT = 32
UNSIGNED, FLOAT, TRUTH, TEXT, LIST, SIGNED = 4, 6, 7, 8, 9, 5
PLAIN_TOKEN, UNKNOWN_TOKEN, CONTROL_TOKEN, BYTE_TOKEN = 1, 2, 3, 6
F32, F16, Q8_0 = 0, 1, 8
FILE_TYPES = {"F16": 1, "Q8_0": 7}
TENSOR_TYPES = {"F16": F16, "Q8_0": Q8_0}
BYTES_PER_WEIGHT = {"F16": 2.0, "Q8_0": 34 / 32}

BOS, END_OF_TURN = 1, 4
SHUT_OUT = -60.0
SPREAD = 2.5
WORDS = 400
GAP = "\u2581"
WIDTHS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
CHATML = (
    "{%- for turn in messages -%}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of the network; ``kv`` is the width of keys and values."""

    vocab: int
    width: int
    layers: int
    inner: int
    head: int
    kv: int

    @property
    def weights(self) -> int:
        block = 2 * self.width * self.width + 2 * self.kv * self.width + 3 * self.inner * self.width
        return 2 * self.vocab * self.width + self.layers * block


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a SentencePiece-like tokenizer; ``spoken`` marks the ones the model may say."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    spoken: tuple[bool, ...]


def write_model(
    out: Path,
    *,
    size_mb: float = 2.0,
    quant: str = "F16",
    name: str | None = None,
    ctx: int = 4096,
    eos_every: float = 0.0,
    seed: int = 1,
) -> Shape:
    """Write ``out`` with about ``size_mb`` million bytes; ``ctx`` is the trained context in tokens."""
    vocabulary = make_vocabulary()
    shape = choose_shape(size_mb * 1e6 / BYTES_PER_WEIGHT[quant], len(vocabulary.tokens))
    label = name or out.stem
    facts = _facts(vocabulary, shape, label, ctx, FILE_TYPES[quant])
    tensors = list(_tensor_shapes(shape, TENSOR_TYPES[quant]))
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts)))
        file.writelines(facts)
        offset = 0
        for tensor, rows, columns, kind in tensors:
            dims = (columns, rows) if rows else (columns,)
            file.write(_text(tensor) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset))
            offset += _padded(_tensor_bytes(rows, columns, kind))
        _pad(file)
        for values, kind in _weights(shape, vocabulary, TENSOR_TYPES[quant], eos_every, seed):
            file.write(_packed(values, kind))
            _pad(file)
    return shape


def make_vocabulary() -> Vocabulary:
    """Markers, every byte, printable ASCII, and made-up words with all their beginnings, so that merging from
    the left reaches each word."""
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    kinds = [UNKNOWN_TOKEN] + [CONTROL_TOKEN] * 4
    tokens += [f"<0x{value:02X}>" for value in range(256)]
    kinds += [BYTE_TOKEN] * 256
    words = [GAP + word for word in _words()]
    pieces = dict.fromkeys([GAP, *map(chr, range(0x21, 0x7F))])
    pieces.update(dict.fromkeys(word[:end] for word in words for end in range(2, len(word) + 1)))
    whole = set(words)
    spoken = [False] * len(tokens) + [piece in whole for piece in pieces]
    return Vocabulary((*tokens, *pieces), (*kinds, *[PLAIN_TOKEN] * len(pieces)), tuple(spoken))


def _words() -> list[str]:
    """``WORDS`` different words: a few real ones, then one or two syllables in a fixed shuffled order."""
    heads = [
        "b",
        "bl",
        "d",
        "dr",
        "f",
        "fl",
        "g",
        "gr",
        "j",
        "k",
        "kl",
        "l",
        "m",
        "n",
        "p",
        "pl",
        "r",
        "s",
        "sh",
        "sk",
        "t",
        "th",
        "v",
        "z",
    ]
    tails = ["a", "an", "ar", "e", "el", "en", "i", "im", "is", "o", "ol", "on", "u", "um", "us"]
    syllables = [head + tail for head in heads for tail in tails]
    made = dict.fromkeys(
        ["the", "a", "of", "and", "to", "in", "it", "is", "on", "hello", "world", "one", "two", "three"]
    )
    for step in range(len(syllables)):
        first, second = syllables[step * 7 % len(syllables)], syllables[step * 131 % len(syllables)]
        made.update({first: None, first + second: None})
    return list(made)[:WORDS]


def choose_shape(weights: float, vocab: int) -> Shape:
    """The shape nearest to ``weights`` parameters, preferring about ten layers."""

    def candidate(width: int) -> Shape:
        head = 32 if width < 512 else 64
        one, two = (
            Shape(vocab=vocab, width=width, layers=n, inner=3 * width, head=head, kv=width // 2)
            for n in (1, 2)
        )
        block = two.weights - one.weights
        layers = max(2, round((weights - one.weights + block) / block))
        return Shape(vocab=vocab, width=width, layers=layers, inner=3 * width, head=head, kv=width // 2)

    def cost(shape: Shape) -> float:
        return abs(math.log(shape.weights / weights)) + abs(shape.layers - 10) / 50

    return min(map(candidate, WIDTHS), key=cost)


def _facts(vocabulary: Vocabulary, shape: Shape, name: str, ctx: int, file_type: int) -> list[bytes]:
    scores = [-float(max(0, index - 260)) for index in range(shape.vocab)]
    numbers = {
        "general.file_type": file_type,
        "general.quantization_version": 2,
        "llama.context_length": ctx,
        "llama.embedding_length": shape.width,
        "llama.block_count": shape.layers,
        "llama.feed_forward_length": shape.inner,
        "llama.attention.head_count": shape.width // shape.head,
        "llama.attention.head_count_kv": shape.kv // shape.head,
        "llama.rope.dimension_count": shape.head,
        "llama.vocab_size": shape.vocab,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": END_OF_TURN,
    }
    texts = {
        "general.architecture": "llama",
        "general.name": name,
        "general.basename": name,
        "general.description": "random weights for tests",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.chat_template": CHATML,
    }
    truths = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }
    count = shape.vocab
    return [
        *(_fact(key, TEXT, _text(value)) for key, value in texts.items()),
        *(_fact(key, UNSIGNED, struct.pack("<I", value)) for key, value in numbers.items()),
        *(_fact(key, TRUTH, struct.pack("<?", value)) for key, value in truths.items()),
        _fact("llama.attention.layer_norm_rms_epsilon", FLOAT, struct.pack("<f", 1e-5)),
        _fact("tokenizer.ggml.tokens", LIST, _list(TEXT, count, b"".join(map(_text, vocabulary.tokens)))),
        _fact("tokenizer.ggml.scores", LIST, _list(FLOAT, count, struct.pack(f"<{count}f", *scores))),
        _fact(
            "tokenizer.ggml.token_type",
            LIST,
            _list(SIGNED, count, struct.pack(f"<{count}i", *vocabulary.kinds)),
        ),
    ]


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _list(kind: int, count: int, packed: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + packed


def _fact(key: str, kind: int, packed: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + packed


def _tensor_shapes(shape: Shape, kind: int) -> Iterator[tuple[str, int, int, int]]:
    """(name, rows, columns, type) in file order; 0 rows means a vector."""
    yield "token_embd.weight", shape.vocab, shape.width, kind
    yield "output.weight", shape.vocab, shape.width, kind
    yield "output_norm.weight", 0, shape.width, F32
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", 0, shape.width, F32
        yield block + "attn_q.weight", shape.width, shape.width, kind
        yield block + "attn_k.weight", shape.kv, shape.width, kind
        yield block + "attn_v.weight", shape.kv, shape.width, kind
        yield block + "attn_output.weight", shape.width, shape.width, kind
        yield block + "ffn_norm.weight", 0, shape.width, F32
        yield block + "ffn_gate.weight", shape.inner, shape.width, kind
        yield block + "ffn_up.weight", shape.inner, shape.width, kind
        yield block + "ffn_down.weight", shape.width, shape.inner, kind


def _weights(
    shape: Shape, vocabulary: Vocabulary, kind: int, eos_every: float, seed: int
) -> Iterator[tuple[Floats, int]]:
    """Values and types of the tensors, in file order."""
    bits = np.random.PCG64(seed)

    def noise(rows: int, columns: int, deviation: float) -> Floats:
        # Raw output of the bit generator is the one stream that numpy promises never to change.
        raw = bits.random_raw(-(-rows * columns // 4)).view(np.uint16)[: rows * columns]
        scale = np.float32(deviation * math.sqrt(3) / 32768)
        return ((raw.astype(np.float32) - np.float32(32767.5)) * scale).reshape(rows, columns)

    ones = np.ones(shape.width, dtype=np.float32)
    embedding = noise(shape.vocab, shape.width, 1.0)
    embedding[:, 0] = math.sqrt(shape.width)
    yield embedding, kind
    # After the last norm the constant is about sqrt(width / 2), every other entry about sqrt(1 / 2).
    output = noise(shape.vocab, shape.width, SPREAD / math.sqrt(shape.width / 2))
    bias = np.where(vocabulary.spoken, 0.0, SHUT_OUT)
    if eos_every > 0:
        output[END_OF_TURN] = 0.0
        bias[END_OF_TURN] = math.log(WORDS) + SPREAD**2 / 2 - math.log(eos_every)
    output[:, 0] = bias / math.sqrt(shape.width / 2)
    yield output, kind
    yield ones, F32
    entry = 1 / math.sqrt(shape.width)
    exit_ = 0.3 / math.sqrt(shape.layers)
    for _ in range(shape.layers):
        yield ones, F32
        yield noise(shape.width, shape.width, entry), kind
        yield noise(shape.kv, shape.width, entry), kind
        yield noise(shape.kv, shape.width, entry), kind
        yield _without_row_0(noise(shape.width, shape.width, exit_ * entry)), kind
        yield ones, F32
        yield noise(shape.inner, shape.width, entry), kind
        yield noise(shape.inner, shape.width, entry), kind
        yield _without_row_0(noise(shape.width, shape.inner, exit_ / math.sqrt(shape.inner))), kind


def _without_row_0(values: Floats) -> Floats:
    values[0] = 0.0
    return values


def _packed(values: Floats, kind: int) -> bytes:
    if kind == F32:
        return values.astype("<f4").tobytes()
    if kind == F16:
        return values.astype("<f2").tobytes()
    groups = values.reshape(-1, 32)
    scale = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype("<f2")
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    packed = np.empty((len(groups), 34), dtype=np.uint8)
    packed[:, :2] = scale.view(np.uint8)
    packed[:, 2:] = np.clip(np.rint(groups / divisor), -127, 127).astype(np.int8).view(np.uint8)
    return packed.tobytes()


def _tensor_bytes(rows: int, columns: int, kind: int) -> int:
    count = (rows or 1) * columns
    return {F32: 4 * count, F16: 2 * count, Q8_0: count // 32 * 34}[kind]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(file: BinaryIO) -> None:
    position = file.tell()
    file.write(bytes(_padded(position) - position))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tiny_gguf", description="write a tiny random GGUF model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size-mb", type=float, default=2.0, help="file size in 10^6 bytes")
    parser.add_argument("--quant", choices=sorted(FILE_TYPES), default="F16")
    parser.add_argument("--name", help="the model's name (default: stem of the file)")
    parser.add_argument("--ctx", type=int, default=4096, help="trained context in tokens")
    parser.add_argument("--eos-every", type=float, default=0.0, help="mean tokens of a turn, 0: never ends")
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args(arguments)
    shape = write_model(
        chosen.out,
        size_mb=chosen.size_mb,
        quant=chosen.quant,
        name=chosen.name,
        ctx=chosen.ctx,
        eos_every=chosen.eos_every,
        seed=chosen.seed,
    )
    size = chosen.out.stat().st_size / 1e6
    sys.stdout.write(f"{chosen.out} {size:.1f} MB, {shape.layers} layers of {shape.width}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
